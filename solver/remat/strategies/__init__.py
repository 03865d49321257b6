"""Ways to look for a schedule: frozen dataclasses whose fields are their options."""

from remat.strategies.auto import Auto
from remat.strategies.base import Solution, Strategy
from remat.strategies.exact import Exact
from remat.strategies.keep_all import KeepAll

__all__ = ["Auto", "Exact", "KeepAll", "Solution", "Strategy"]
