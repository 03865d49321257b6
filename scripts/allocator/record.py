"""Record the actions of torch's own caching allocator, for random allocations and planned steps.

    python -m scripts.allocator.record tests/data/allocator --python PYTHON

PYTHON has a CUDA build of torch, and remat's dependencies. No device is needed: torch runs on the
software GPU (`scripts.software_gpu`). Kernels compute nothing, but the allocator is libtorch's own,
and so are the allocations of a step.

The file is a JSON list of recordings: torch's version; `actions`, the `[action, address, size]` of
the snapshot's `device_traces`; `segments` of the final snapshot, with their blocks; `peaks` of
`torch.cuda.memory_stats`; for a plan also its `trace` and `runs`.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import random
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from scripts.software_gpu.build import build_library, site_packages_of
from scripts.software_gpu.environment import gpu_environment

PLANS = (("gpt", "75%"), ("resnet", "60%"))


def random_events(seed: int, count: int) -> Iterator[tuple[int, int | None]]:
    """Yield random allocations (key, bytes) and frees (key, None).

    The sizes lie around the allocator's thresholds.
    """
    rng = random.Random(seed)
    sizes = [1, 511, 512, 513, 4096, 300_000, (1 << 20) - 512, 1 << 20, (1 << 20) + 1]
    sizes += [3 << 20, (9 << 20) + 17, (10 << 20) - 1, 10 << 20, (10 << 20) + 1, 25 << 20, 70 << 20]
    live: list[int] = []
    for key in range(count):
        while live and (rng.random() < 0.45 or len(live) > 60):
            yield live.pop(rng.randrange(len(live))), None
        size = rng.choice(sizes) if rng.random() < 0.3 else int(10 ** rng.uniform(2, 7.6))
        live.append(key)
        yield key, size


@contextmanager
def memory_history() -> Iterator[None]:
    """Record the allocator's actions while the context is entered."""
    import torch

    torch.cuda.memory._record_memory_history(max_entries=10**6, context=None)
    yield
    torch.cuda.memory._record_memory_history(enabled=None)


def read_recording() -> dict[str, Any]:
    """Return the actions recorded so far, the current segments, and the peaks."""
    import torch

    stats = torch.cuda.memory_stats()
    snapshot: Any = torch.cuda.memory._snapshot()
    return {
        "actions": [
            [entry["action"], entry["addr"], entry["size"]]
            for entry in snapshot["device_traces"][0]
            if entry["action"] != "free_requested"
        ],
        "segments": [
            {
                "address": segment["address"],
                "is_small": segment["segment_type"] == "small",
                "blocks": [
                    [b["address"], b["size"], b["requested_size"], b["state"]]
                    for b in segment["blocks"]
                ],
            }
            for segment in snapshot["segments"]
        ],
        "peaks": {
            kind: stats[f"{kind}_bytes.all.peak"] for kind in ("requested", "allocated", "reserved")
        },
    }


def replay_events(events: list[tuple[Any, int | None]]) -> dict[str, Any]:
    """Replay allocations and frees on torch's allocator in this process; return the recording."""
    import torch

    addresses: dict[Any, int] = {}
    with memory_history():
        for key, size in events:
            if size is None:
                torch.cuda.caching_allocator_delete(addresses.pop(key))
            else:
                addresses[key] = torch.cuda.caching_allocator_alloc(size)
        return read_recording()


def _run_child(
    python: str, module: str, *arguments: str, stdin: Any = None, is_expandable: bool = False
) -> Any:
    """Run a module of this package in a process on the software GPU, and return its JSON output."""
    command = [python, "-m", f"scripts.allocator.{module}", *arguments]
    return json.loads(
        run_on_software_gpu(command, is_expandable=is_expandable, stdin=json.dumps(stdin))
    )


def run_on_software_gpu(command: list[str], *, is_expandable: bool, stdin: str = "") -> str:
    """Run a Python's command on the software GPU, and return its stdout."""
    library = build_library(site_packages_of(command[0]))
    environment = gpu_environment(library, is_expandable=is_expandable)
    completed = subprocess.run(
        command, input=stdin, env=environment, text=True, stdout=subprocess.PIPE, check=True
    )
    return completed.stdout


def main() -> None:
    """Write the file of recordings for the version of torch that PYTHON has."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--python", default=sys.executable)
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        import torch

        recording = replay_events(json.load(sys.stdin))
        print(json.dumps({"torch": torch.__version__, **recording}), flush=True)
        os._exit(0)  # not by the exit handlers of CUDA libraries
    random_sequences = {f"random {seed}": list(random_events(seed, 600)) for seed in range(3)}
    recordings: list[dict[str, Any]] = []
    plans = {
        (model, budget): _run_child(options.python, "steps", "plan", model, budget)
        for model, budget in PLANS
    }
    for is_expandable in (False, True):
        runs: dict[str, tuple[tuple[str, ...], Any]] = {
            name: (("record", ".", "--child"), events) for name, events in random_sequences.items()
        }
        for (model, budget), plan in plans.items():
            runs[f"plan {model} {budget}"] = (("steps", "run", model), plan)
        for name, (arguments, stdin) in runs.items():
            recording = _run_child(
                options.python, *arguments, stdin=stdin, is_expandable=is_expandable
            )
            recordings.append({"name": name, "is_expandable": is_expandable, **recording})
    version = recordings[0]["torch"].partition("+")[0]
    path = options.folder / f"torch-{version}.json.gz"
    path.write_bytes(gzip.compress(json.dumps(recordings).encode(), mtime=0))
    print(f"{path}: {len(recordings)} recordings, {path.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
