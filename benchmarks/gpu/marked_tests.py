"""Step 0 of the acceptance run: the tests marked gpu, one file at a time."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from xml.etree import ElementTree

from benchmarks.gpu.setting import Setting
from benchmarks.gpu.verdicts import Report

ROOT = Path(__file__).parents[2]

_REPORT_LENGTH = 4000
"""Characters of the report of a failed test that are stored."""

_MARKED = re.compile(r"^(@|pytestmark = )pytest\.mark\.gpu$", re.MULTILINE)
_MARKED_TIMES = re.compile(r"^@pytest\.mark\.device_times$", re.MULTILINE)


def marked_files(folder: Path = ROOT / "tests", *, has_times: bool = False) -> list[Path]:
    """Return the test files with tests marked gpu; with `has_times`, those that measure time.

    The other files may import packages that the GPU machine lacks.
    """
    mark = _MARKED_TIMES if has_times else _MARKED
    return [path for path in sorted(folder.rglob("test_*.py")) if mark.search(path.read_text())]


def run_marked_tests(file: Path, has_times: bool) -> Callable[[Setting, Report], None]:
    """Return a part that runs the tests marked gpu of one file in a process of their own: those of
    times, or all others."""

    def run(setting: Setting, report: Report) -> None:
        results = setting.folder / f"{file.stem}.xml"
        results.unlink(missing_ok=True)
        with setting.gpu():
            completed = subprocess.run(
                [
                    sys.executable, "-m", "pytest",
                    "-m", "gpu and " + ("device_times" if has_times else "not device_times"),
                    "-q", "-rfE", "--tb=short",
                    "-p", "no:cacheprovider", f"--junitxml={results}", str(file),
                ],
                cwd=ROOT,
                check=False,
            )  # fmt: skip
        subject, requirement = file.name, "all pass"
        if not results.exists():
            observed = f"pytest ended with {completed.returncode}, no results"
            report.judge(subject, requirement, observed, False)
            return
        counts, failures = read_results(results)
        failed = list(failures)
        run_count = counts["tests"] - counts["skipped"]
        passed = run_count - counts["failures"] - counts["errors"]
        observed = f"{passed} of {run_count} passed"
        if counts["skipped"]:
            observed += f", {counts['skipped']} skipped"
        if failed:
            observed += f"; failed: {', '.join(failed)}"
        if completed.returncode == 0 and not run_count:
            report.skip(subject, requirement, observed)
        else:
            is_met = completed.returncode == 0
            report.judge(subject, requirement, observed, is_met, **counts, failures=failures)

    return run


def read_results(results: Path) -> tuple[dict[str, int], dict[str, str]]:
    """Return the counts of a JUnit XML file, and the end of the report of each test that failed."""
    suites = list(ElementTree.parse(results).getroot().iter("testsuite"))
    names = ("tests", "skipped", "failures", "errors")
    counts = {name: sum(int(s.get(name, 0)) for s in suites) for name in names}
    cases = [case for suite in suites for case in suite.iter("testcase")]
    failures = {
        case.get("name", ""): f"{report.get('message', '')}\n{report.text or ''}"[-_REPORT_LENGTH:]
        for case in cases
        for report in (*case.findall("failure"), *case.findall("error"))
    }
    return counts, failures
