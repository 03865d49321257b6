"""Bounds and schedules from several moments, found beside the program over slots.

HiGHS lets go of Python's lock while it runs, so a thread is enough to use a second core.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

from remat.graph import Graph
from remat.heuristics.local_search import fitting
from remat.milp.advice import Advisor
from remat.schedule import Schedule

_PROGRAM_S = 20.0
"""Seconds for one program at most."""

_FOLLOW = 12
"""Operations run to follow one piece of advice, in units of the graph's."""


class Pursuit:
    """The schedules known, the cheapest first, and the advisor's bound, both getting better.

    `enough` says of a schedule's time in seconds that no better one is wanted.
    """

    def __init__(
        self,
        graph: Graph,
        budget_bytes: int,
        advisor: Advisor,
        known: Sequence[Schedule],
        enough: Callable[[float], bool],
        stop: Callable[[], bool],
    ) -> None:
        self.known = list(known)
        self._graph = graph
        self._budget_bytes = budget_bytes
        self._advisor = advisor
        self._enough = enough
        self._stop = stop
        self._ended = threading.Event()
        self.error: BaseException | None = None
        """What ended the pursuit before its time, if anything did."""
        self._thread = threading.Thread(
            target=self._guarded,
            args=(self._ended.is_set,),
            name="remat-pursuit",
            daemon=True,
        )

    @property
    def hints(self) -> list[Schedule]:
        """The schedules known and those that the moments imply, which may not fit."""
        return [*self.known, *self._advisor.implied]

    @property
    def best(self) -> Schedule:
        """The cheapest so far."""
        return self.known[0]

    def begin(self) -> None:
        """Run beside the caller until `end`."""
        self._thread.start()

    def end(self) -> None:
        """Stop, within about a second."""
        self._ended.set()
        if self._thread.ident is not None:
            self._thread.join()

    def run_for(self, seconds: float) -> None:
        """Run in the caller's own thread."""
        until = time.monotonic() + seconds
        self._guarded(lambda: time.monotonic() > until)

    def _guarded(self, is_over: Callable[[], bool]) -> None:
        try:
            self._run(is_over)
        except Exception as error:
            self.error = error

    def _run(self, is_over: Callable[[], bool]) -> None:
        def stop() -> bool:
            return is_over() or self._stop()

        for advice in self._advisor.pursue(lambda: self.best, _PROGRAM_S, stop):
            found = fitting(
                self._graph,
                self._budget_bytes,
                known=self.known,
                advice=[advice],
                enough=self._enough,
                effort=_FOLLOW * len(self._graph),
                stop=stop,
            )
            self.known = [rated.schedule for rated in found]
            if stop():
                return
