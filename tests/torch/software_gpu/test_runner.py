"""The runner of the software GPU's tables."""

from __future__ import annotations

import json
from pathlib import Path

from benchmarks.software_gpu.runner import run_cases
from benchmarks.software_gpu.tables import TABLES


def test_a_result_of_finished_cases_has_the_others_as_not_run(tmp_path: Path) -> None:
    table = TABLES["code"]
    finished, other = table.cases()[:2]
    path = tmp_path / "h100" / "code" / f"{finished.replace('/', '_')}.json"
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps({"rows": [{"is_met": True}], "seconds": 1.0}))
    cases = [(table, finished), (table, other)]
    first, second = run_cases(cases, tmp_path, tmp_path, only_finished=True)
    assert first.is_met
    assert not first.failure
    assert not second.is_met
    assert second.failure == "not run"
