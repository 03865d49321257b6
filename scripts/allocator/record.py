"""Records what torch's own caching allocator does: with random sequences of allocations
and frees, and with training steps by remat's plans.

    python -m scripts.allocator.record tests/data/allocator --python PYTHON

PYTHON has a CUDA build of torch, and what remat needs. No device is needed: torch runs against
`no_device.c`, which is compiled here with `cc` and preloaded. Nothing is computed; the allocator is
libtorch's own, and so are the allocations of a step.

The file is JSON, a list of recordings: torch's version; `actions`, the `[action, address, size]` of
the snapshot's `device_traces`; `segments` of the snapshot at the end, with their blocks; `peaks` of
`torch.cuda.memory_stats`; of a plan its `trace` and `runs` too.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

SOURCE = Path(__file__).with_name("no_device.c")
PLANS = (("gpt", "75%"), ("resnet", "60%"))
LIBRARIES = ("libcuda.so.1", "libnvidia-ml.so.1")


def sequence(seed: int, count: int) -> Iterator[tuple[int, int | None]]:
    """Random allocations (key, bytes) and frees (key, None): sizes around every threshold."""
    draw = random.Random(seed)
    sizes = [1, 511, 512, 513, 4096, 300_000, (1 << 20) - 512, 1 << 20, (1 << 20) + 1]
    sizes += [3 << 20, (9 << 20) + 17, (10 << 20) - 1, 10 << 20, (10 << 20) + 1, 25 << 20, 70 << 20]
    live: list[int] = []
    for key in range(count):
        while live and (draw.random() < 0.45 or len(live) > 60):
            yield live.pop(draw.randrange(len(live))), None
        size = draw.choice(sizes) if draw.random() < 0.3 else int(10 ** draw.uniform(2, 7.6))
        live.append(key)
        yield key, size


@contextmanager
def history() -> Iterator[None]:
    """Record what the allocator does."""
    import torch

    torch.cuda.memory._record_memory_history(max_entries=10**6, context=None)
    yield
    torch.cuda.memory._record_memory_history(enabled=None)


def recorded() -> dict[str, Any]:
    """What was recorded so far."""
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


def run(events: list[tuple[Any, int | None]]) -> dict[str, Any]:
    """Events through torch's allocator, in this process."""
    import torch

    addresses: dict[Any, int] = {}
    with history():
        for key, size in events:
            if size is None:
                torch.cuda.caching_allocator_delete(addresses.pop(key))
            else:
                addresses[key] = torch.cuda.caching_allocator_alloc(size)
        return recorded()


def _child(python: str, module: str, *arguments: str, given: Any = None, on: bool = False) -> Any:
    """What another process prints as JSON, with or without expandable segments."""
    command = [python, "-m", f"scripts.allocator.{module}", *arguments]
    return json.loads(without_device(command, is_expandable=on, stdin=json.dumps(given)))


def without_device(command: list[str], *, is_expandable: bool, stdin: str = "") -> str:
    """Run a command against the runtime that has no device; its stdout."""
    root = SOURCE.parents[2]
    with tempfile.TemporaryDirectory() as folder:
        for name in LIBRARIES:
            compiler = ["cc", "-shared", "-fPIC", "-w", "-o", str(Path(folder, name)), str(SOURCE)]
            subprocess.run(compiler, check=True)
        environment = os.environ | {
            "LD_LIBRARY_PATH": folder,
            "LD_PRELOAD": str(Path(folder, LIBRARIES[0])),
            "PYTHONPATH": f"{root}:{root / 'solver'}",
            "PYTORCH_CUDA_ALLOC_CONF": f"expandable_segments:{is_expandable}",
            "TORCH_CUBLAS_WORKSPACE_CACHE": "1",  # as torch does without it up to 2.14
        }
        done = subprocess.run(
            command, input=stdin, env=environment, text=True, stdout=subprocess.PIPE, check=True
        )
    return done.stdout


def main() -> None:
    """Write one file for torch's version."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--python", default=sys.executable)
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.child:
        import torch

        done = run(json.load(sys.stdin))
        print(json.dumps({"torch": torch.__version__, **done}), flush=True)
        os._exit(0)  # threads of a device that is not there do not end
    sequences = {f"random {seed}": list(sequence(seed, 600)) for seed in range(3)}
    found: list[dict[str, Any]] = []
    plans = {
        (model, budget): _child(chosen.python, "steps", "plan", model, budget)
        for model, budget in PLANS
    }
    for is_expandable in (False, True):
        for name, events in sequences.items():
            done = _child(chosen.python, "record", ".", "--child", given=events, on=is_expandable)
            found.append({"name": name, "is_expandable": is_expandable, **done})
        for (model, budget), plan in plans.items():
            done = _child(chosen.python, "steps", "run", model, given=plan, on=is_expandable)
            name = f"plan {model} {budget}"
            found.append({"name": name, "is_expandable": is_expandable, **done})
    version = found[0]["torch"].partition("+")[0]
    path = chosen.folder / f"torch-{version}.json.gz"
    path.write_bytes(gzip.compress(json.dumps(found).encode(), mtime=0))
    print(f"{path}: {len(found)} recordings, {path.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
