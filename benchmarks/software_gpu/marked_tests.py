"""The tests marked gpu, on the software GPU; one case is a test file."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.gpu.marked_tests import ROOT, marked_files, read_results
from benchmarks.software_gpu.tables import Row


def cases() -> list[str]:
    """Return the paths of the test files."""
    return [str(path.relative_to(ROOT)) for path in marked_files()]


def run_case(case: str) -> list[Row]:
    """Run the tests marked gpu of one file, and return their counts."""
    with tempfile.TemporaryDirectory() as folder:
        results = Path(folder, "results.xml")
        completed = subprocess.run(
            [
                sys.executable, "-m", "pytest", "-m", "gpu", "-q", "-rfEs", "--tb=short",
                "-p", "no:cacheprovider", "-p", "scripts.software_gpu.pytest_plugin",
                f"--junitxml={results}", case,
            ],
            cwd=ROOT,
            check=False,
        )  # fmt: skip
        if not results.exists():
            return [
                {"file": case, "is_met": False, "why": f"pytest ended with {completed.returncode}"}
            ]
        counts, failures = read_results(results)
        failed = list(failures)
    return [{"file": case, **counts, "failed": failed, "is_met": completed.returncode == 0}]
