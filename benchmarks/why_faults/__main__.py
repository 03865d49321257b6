"""Plant faults on the software GPU and on the CPU, and check what `remat why` says of them.

    python -m benchmarks.why_faults --python PYTHON --output RESULTS.json
    python -m benchmarks.why_faults --python PYTHON --only outputs_in_a_list healthy

PYTHON has a CUDA build of torch. Each script runs in a process of its own: the fault until the
memory of a small GPU is exhausted, and the script with the named remedy, which must run to its end
in the same memory. A row is right if the first finding has the planted kind, a planted line, the
module, and the remedy that works.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from scripts.software_gpu.build import build_library, site_packages_of
from scripts.software_gpu.environment import gpu_environment

from benchmarks.why_faults.faults import FAULTS, Fault, planted_lines
from benchmarks.why_faults.healthy import HEALTHY

HEALTHY_BYTES = 8 << 30
Row = dict[str, Any]


class Machine:
    """Runs scripts on the software GPU, or on the CPU of this machine."""

    def __init__(self, python: str, folder: Path | None) -> None:
        self._python, self._folder = python, folder
        self._library = build_library(site_packages_of(python))

    def run(
        self,
        name: str,
        device: str,
        memory_bytes: int,
        environment: dict[str, str] | None = None,
        *,
        is_fixed: bool = False,
    ) -> Row:
        """Run a script, and return what its process printed. Raises RuntimeError if it failed."""
        base = gpu_environment(self._library) if device == "cuda" else {**os.environ}
        command = [self._python, "-m", "benchmarks.why_faults.child", name, device]
        command += ["--fixed"] if is_fixed else []
        if self._folder is not None and not is_fixed:
            command += ["--file", str(self._folder / f"{name}-{device}.pickle")]
        process = subprocess.run(
            command,
            env={
                **base,
                "REMAT_SOFTWARE_GPU_MEMORY_BYTES": str(memory_bytes),
                **(environment or {}),
            },
            capture_output=True,
            text=True,
            check=False,
        )
        if process.returncode:
            raise RuntimeError(f"{name} on {device}: {process.stderr[-2000:]}")
        return json.loads(process.stdout.splitlines()[-1])


def fault_row(machine: Machine, fault: Fault, device: str) -> Row:
    """Return what was found of a fault, and what of it is right."""
    faulty = machine.run(fault.name, device, fault.memory_bytes, fault.environment)
    first: Row = faulty["findings"][0] if faulty["findings"] else {}
    place = first.get("place", {})
    frames = [frame for frame in (place.get("frame"), place.get("script")) if frame]
    lines = planted_lines(fault.name)
    is_line = any((file, line) in lines for file, line, _ in frames) or not lines
    module = place.get("module", "")
    row: Row = {
        "fault": fault.name,
        "device": device,
        "kind": first.get("kind", "nothing"),
        "line": f"{Path(frames[0][0]).name}:{frames[0][1]}" if frames else "",
        "module": module,
        "is_kind": first.get("kind") == fault.kind,
        "is_line": is_line,
        "is_module": module == fault.module or module.startswith(f"{fault.module}."),
        "is_remedy": fault.remedy in first.get("remedy", ""),
        "ran_out": faulty["error"] is not None,
    }
    if device == "cuda":
        fixed = machine.run(
            fault.name, device, fault.memory_bytes, fault.fixed_environment, is_fixed=True
        )
        row["remedy_works"] = fixed["error"] is None
        row["reserved_bytes"] = faulty["reserved_bytes"]
        row["fixed_bytes"] = fixed["reserved_bytes"]
    else:
        fixed = machine.run(fault.name, device, fault.memory_bytes, is_fixed=True)
        row["remedy_works"] = not any(f["kind"] == fault.kind for f in fixed["findings"])
    checks = ["is_kind", "is_line", "is_module", "is_remedy"]
    row["is_right"] = all(row[check] for check in checks)
    return row


def healthy_row(machine: Machine, name: str) -> Row:
    """Return the leaks that were found in a script without one."""
    result = machine.run(name, "cuda", HEALTHY_BYTES)
    leaks = [f["kind"] for f in result["findings"] if f["kind"].startswith("leak")]
    first = result["findings"][0]["kind"] if result["findings"] else ""
    return {
        "healthy": name,
        "first": first,
        "steps": result["steps"],
        "leaks": leaks,
        "is_right": not leaks,
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Run the scripts, print a line for each, write the rows, and return 0 if enough are right."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--python", default=sys.executable)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--snapshots", type=Path, help="a folder for the snapshots")
    parser.add_argument("--only", nargs="+", default=(), help="names, or healthy")
    options = parser.parse_args(argv)
    machine = Machine(options.python, options.snapshots)
    rows: list[Row] = []
    for fault in FAULTS.values():
        if options.only and fault.name not in options.only:
            continue
        for device in ("cuda", "cpu") if fault.is_on_cpu else ("cuda",):
            try:
                rows.append(fault_row(machine, fault, device))
            except RuntimeError as error:
                rows.append({"fault": fault.name, "device": device, "failure": str(error)})
            print(json.dumps(rows[-1]), flush=True)
    for name in HEALTHY:
        if not options.only or name in options.only or "healthy" in options.only:
            try:
                rows.append(healthy_row(machine, name))
            except RuntimeError as error:
                rows.append({"healthy": name, "failure": str(error)})
            print(json.dumps(rows[-1]), flush=True)
    if options.output is not None:
        options.output.write_text(json.dumps(rows, indent=1) + "\n")
    wrong = [row for row in rows if not row.get("is_right")]
    print(f"{len(rows) - len(wrong)} of {len(rows)} right")
    return int(bool(wrong))


if __name__ == "__main__":
    raise SystemExit(main())
