"""Planted faults are noticed by the checks of numbers and memory; without one, they pass.

Those that need the allocator of a GPU are noticed on the software GPU only: see
`benchmarks.software_gpu.faults`.
"""

from __future__ import annotations

import pytest
from benchmarks.software_gpu.faults import all_faults, row_of
from benchmarks.software_gpu.planted_faults.fault import Fault

FAULTS = [fault for fault in all_faults("cpu") if isinstance(fault, Fault)]


@pytest.mark.slow_cases("no fault")
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_planted_fault_is_noticed(fault: Fault) -> None:
    row = row_of(fault, "cpu")
    assert row["is_met"], row["noticed"] or "nothing noticed it"


def test_at_least_thirty_faults_are_planted() -> None:
    names = [fault.name for fault in all_faults("cuda")]
    assert len(set(names)) == len(names)
    assert sum(not name.startswith("no fault") for name in names) >= 30
