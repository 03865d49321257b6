"""Run a command on the software GPU.

    python -m scripts.software_gpu --python PYTHON -- -m pytest -m gpu tests/torch/laws
    python -m scripts.software_gpu --device b200 --numbers -- script.py

The arguments after `--` are those of PYTHON, which has a CUDA build of torch.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Sequence

from scripts.software_gpu.build import BuildError, build_library, site_packages_of
from scripts.software_gpu.environment import DEVICES, gpu_environment


def main(argv: Sequence[str] | None = None) -> int:
    """Build the library if necessary, run the command, and return its exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--python", default=sys.executable)
    parser.add_argument("--device", choices=DEVICES, default="h100")
    parser.add_argument("--expandable", action="store_true", help="expandable segments")
    parser.add_argument("--numbers", action="store_true", help="compute right numbers")
    parser.add_argument("arguments", nargs="+", metavar="ARGUMENT", help="of PYTHON, after --")
    options = parser.parse_args(argv)
    try:
        library = build_library(site_packages_of(options.python))
    except BuildError as error:
        print(error, file=sys.stderr)
        return 2
    environment = gpu_environment(
        library, options.device, is_expandable=options.expandable, has_numbers=options.numbers
    )
    command = [options.python, *options.arguments]
    return subprocess.run(command, env=environment, check=False).returncode


if __name__ == "__main__":
    raise SystemExit(main())
