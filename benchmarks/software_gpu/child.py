"""Run one case of a table: `python -m benchmarks.software_gpu.child TABLE CASE FILE`.

Its rows are written to FILE as JSON.
"""

from __future__ import annotations

import json
import os
import sys
import warnings
from pathlib import Path

from benchmarks.software_gpu.tables import TABLES


def main(argv: list[str]) -> None:
    """Run the case. An exception of the case ends this process."""
    name, case, output = argv
    warnings.simplefilter("ignore")
    if TABLES[name].has_gpu:
        import torch

        torch.backends.cudnn.enabled = False  # the software GPU does not replace cuDNN
        torch.backends.cuda.enable_cudnn_sdp(False)
    rows = TABLES[name].run_case(case)
    Path(output).write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main(sys.argv[1:])
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # not by the exit handlers of CUDA libraries
