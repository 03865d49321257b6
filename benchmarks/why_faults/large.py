"""Time and memory of the explanation of a large snapshot.

    python -m benchmarks.why_faults.large FILE --python PYTHON --steps 2750
    python -m benchmarks.why_faults.large FILE

With PYTHON, which has a CUDA build of torch, the file is recorded first, on the software GPU: the
steps of a small net whose outputs a list keeps, with frames. Then prints one JSON line.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
from pathlib import Path

from scripts.software_gpu.build import build_library, site_packages_of
from scripts.software_gpu.environment import gpu_environment


def record(file: str, steps: int) -> None:
    """Train on the software GPU, and write the snapshot of all allocations."""
    import torch
    from torch import optim

    from benchmarks.why_faults.models import Net, batch, squares

    torch.cuda.memory._record_memory_history(max_entries=10**9, stacks="python")
    model = Net(12).to("cuda")
    optimizer = optim.AdamW(model.parameters(), foreach=False)
    outputs: list[torch.Tensor] = []
    for _ in range(steps):
        outputs.append(model(batch("cuda", 16)))
        squares(outputs[-1]).backward()
        optimizer.step()
        optimizer.zero_grad()
    torch.cuda.memory._dump_snapshot(file)


def measure(file: str) -> dict[str, object]:
    """Explain a file, and return what it took."""
    import remat

    started_s, cpu_s = time.perf_counter(), time.process_time()
    explanation = remat.why(file)
    text = explanation.describe()
    assert text
    return {
        "file_bytes": Path(file).stat().st_size,
        "wall_s": round(time.perf_counter() - started_s, 1),
        "cpu_s": round(time.process_time() - cpu_s, 1),
        "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "steps": explanation.steps,
        "cause": explanation.cause and explanation.cause.kind,
    }


def main() -> None:
    """Record the file if a Python is passed, and explain it."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("file")
    parser.add_argument("--python")
    parser.add_argument("--steps", type=int, default=2750)
    parser.add_argument("--record", action="store_true", help="in the process of PYTHON")
    options = parser.parse_args()
    if options.record:
        record(options.file, options.steps)
        return
    if options.python is not None:
        library = build_library(site_packages_of(options.python))
        command = [options.python, "-m", "benchmarks.why_faults.large", options.file, "--record"]
        command += ["--steps", str(options.steps)]
        subprocess.run(command, env=gpu_environment(library), check=True)
    print(json.dumps(measure(options.file)))
    sys.stdout.flush()


if __name__ == "__main__":
    main()
