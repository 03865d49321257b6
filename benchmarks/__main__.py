"""`python -m benchmarks`: all of them, each with its defaults."""

from __future__ import annotations

import sys

from benchmarks import overhead, solving

if __name__ == "__main__":
    sys.exit(solving.main([]) or overhead.main([]))
