"""`TracePlan`: a plan together with the trace that it is for."""

from __future__ import annotations

from typing import NamedTuple

from remat.documents.trace import Trace
from remat.plan import Plan


class TracePlan(NamedTuple):
    """A plan and the trace that it is for, in which operations may be split and tensors
    offloaded."""

    trace: Trace
    plan: Plan
