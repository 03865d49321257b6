"""Step 0: the tests marked gpu, a file at a time."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from xml.etree import ElementTree

from benchmarks.gpu.lines import Report
from benchmarks.gpu.setting import Setting

ROOT = Path(__file__).parents[2]

_MARKED = re.compile(r"^(@|pytestmark = )pytest\.mark\.gpu$", re.MULTILINE)


def files(folder: Path = ROOT / "tests") -> list[Path]:
    """Those with tests marked gpu. The others may import what is not installed beside a GPU."""
    return [p for p in sorted(folder.rglob("test_*.py")) if _MARKED.search(p.read_text())]


def tests(file: Path) -> Callable[[Setting, Report], None]:
    """Run those of a file, in a process that may die."""

    def run(setting: Setting, report: Report) -> None:
        results = setting.folder / f"{file.stem}.xml"
        results.unlink(missing_ok=True)
        done = subprocess.run(
            [
                sys.executable, "-m", "pytest", "-m", "gpu", "-q", "-rfE", "--tb=short",
                "-p", "no:cacheprovider", f"--junitxml={results}", str(file),
            ],
            cwd=ROOT,
            check=False,
        )  # fmt: skip
        what, want = file.name, "all pass"
        if not results.exists():
            report.judge(what, want, f"pytest ended with {done.returncode}, no results", False)
            return
        counts, failed = _read(results)
        ran = counts["tests"] - counts["skipped"]
        text = f"{ran - counts['failures'] - counts['errors']} of {ran} passed"
        if counts["skipped"]:
            text += f", {counts['skipped']} skipped"
        if failed:
            text += f"; failed: {', '.join(failed)}"
        if done.returncode == 0 and not ran:
            report.skip(what, want, text)
        else:
            report.judge(what, want, text, done.returncode == 0, **counts, failed=failed)

    return run


def _read(results: Path) -> tuple[dict[str, int], list[str]]:
    suites = list(ElementTree.parse(results).getroot().iter("testsuite"))
    names = ("tests", "skipped", "failures", "errors")
    counts = {name: sum(int(s.get(name, 0)) for s in suites) for name in names}
    cases = [case for suite in suites for case in suite.iter("testcase")]
    failed = [
        case.get("name", "")
        for case in cases
        if case.find("failure") is not None or case.find("error") is not None
    ]
    return counts, failed
