"""Records what torch's own caching allocator does with sequences of allocations and frees.

    python -m scripts.allocator.record tests/allocator --python PYTHON

PYTHON has a CUDA build of torch. No device is needed: torch runs against `no_device.c`, which is
compiled here with `cc` and preloaded. Nothing is computed; the allocator is libtorch's own.

The file is JSON of torch's version and, for each sequence and both kinds of segments: `actions`,
the `[action, address, size]` of the snapshot's `device_traces`; `segments` of the snapshot at the
end, with their blocks; and `peaks` of `torch.cuda.memory_stats`.
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
from pathlib import Path
from typing import Any

SOURCE = Path(__file__).with_name("no_device.c")
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


def record(events: list[tuple[Any, int | None]]) -> dict[str, Any]:
    """Run the events through torch's allocator, in this process."""
    import torch

    torch.cuda.memory._record_memory_history(max_entries=10**6, context=None)
    addresses: dict[Any, int] = {}
    for key, size in events:
        if size is None:
            torch.cuda.caching_allocator_delete(addresses.pop(key))
        else:
            addresses[key] = torch.cuda.caching_allocator_alloc(size)
    stats = torch.cuda.memory_stats()
    snapshot = torch.cuda.memory._snapshot()
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


def without_device(python: str, arguments: list[str], *, is_expandable: bool, stdin: str) -> str:
    """Run Python against the runtime that has no device; its stdout."""
    with tempfile.TemporaryDirectory() as folder:
        for name in LIBRARIES:
            library = Path(folder, name)
            subprocess.run(["cc", "-shared", "-fPIC", "-w", "-o", library, SOURCE], check=True)
        environment = os.environ | {
            "LD_LIBRARY_PATH": folder,
            "LD_PRELOAD": str(Path(folder, LIBRARIES[0])),
            "PYTORCH_CUDA_ALLOC_CONF": f"expandable_segments:{is_expandable}",
        }
        done = subprocess.run(
            [python, *arguments], input=stdin, env=environment, text=True, stdout=-1, check=True
        )
    return done.stdout


def main() -> None:
    """Write one file for torch's version."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--python", default=sys.executable)
    parser.add_argument("--events", type=Path, help="more sequences, as JSON: name to events")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.child:
        import torch

        found = record(json.load(sys.stdin))
        print(json.dumps({"torch": torch.__version__, **found}))
        return
    sequences = {f"random {seed}": list(sequence(seed, 600)) for seed in range(3)}
    if chosen.events is not None:
        sequences |= json.loads(chosen.events.read_text())
    recorded: list[dict[str, Any]] = []
    for name, events in sequences.items():
        for is_expandable in (False, True):
            text = without_device(
                chosen.python,
                [__file__, ".", "--child"],
                is_expandable=is_expandable,
                stdin=json.dumps(events),
            )
            recorded.append({"name": name, "is_expandable": is_expandable, **json.loads(text)})
    version = recorded[0]["torch"].partition("+")[0]
    path = chosen.folder / f"torch-{version}.json.gz"
    path.write_bytes(gzip.compress(json.dumps(recorded).encode(), mtime=0))
    print(f"{path}: {len(recorded)} recordings, {path.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
