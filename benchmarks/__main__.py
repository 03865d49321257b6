"""Run `solver`, `overhead` and `service` with their defaults: `python -m benchmarks`."""

from __future__ import annotations

import sys

from benchmarks import overhead
from benchmarks.service import __main__ as service
from benchmarks.solver import __main__ as solver

if __name__ == "__main__":
    sys.exit(solver.main([]) or overhead.main([]) or service.main([]))
