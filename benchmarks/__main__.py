"""`python -m benchmarks`: all of them, each with its defaults; arguments are passed on."""

from __future__ import annotations

import sys

from benchmarks import overhead

if __name__ == "__main__":
    sys.exit(overhead.main(sys.argv[1:]))
