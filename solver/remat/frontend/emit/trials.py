"""Each block of a model run by itself in several ways, by who will run the policies."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from torch.utils._pytree import tree_leaves

from remat.blockwise.policies import AS_IT_IS, BlockPolicy
from remat.blockwise.step import Way
from remat.errors import TraceError, one_line
from remat.frontend.blocks.profile import Invocation, gets_gradient, measured
from remat.frontend.capture.model.context import random_numbers_restored
from remat.frontend.emit.executors import Executor
from remat.frontend.emit.recorded import fingerprint
from remat.frontend.memory.gauge import Gauge
from remat.report.tables import starred

logger = logging.getLogger("remat")

_ROUNDS = 3

_BLOCK = "block"
"""Of policies whose block is yet to be named."""


_Tried = tuple[tuple[Way, ...], tuple[BlockPolicy, ...], str]
"""The ways of a block, their policies, and why there is only one, if it is so."""


@dataclass
class Trials:
    """Looks at each call of a block, and tells its ways. Blocks that run the same operators have
    the same ones, tried once. `policies` has what the ways of each call are."""

    executor: Executor
    policies: list[tuple[BlockPolicy, ...]] = field(default_factory=list)
    whys: dict[str, str] = field(default_factory=dict)
    """Of the blocks that can only be left as they are."""
    _known: dict[object, _Tried] = field(default_factory=dict)

    def __call__(self, gauge: Gauge, call: Invocation) -> tuple[Way, ...]:
        kind, why = fingerprint(call)
        key = (kind, tuple(map(gets_gradient, tree_leaves((call.args, call.kwargs)))))
        if key not in self._known:
            logger.info("trying ways to checkpoint %s", call.site.path)
            self._known[key] = self._tried(gauge, call, why)
        ways, policies, why = self._known[key]
        if why:
            self.whys[starred(call.site.path)] = why
        self.policies.append(policies)
        return ways

    def _tried(self, gauge: Gauge, call: Invocation, why: str) -> _Tried:
        """As it is, and, unless it is said `why` it cannot be run again, by each policy that is
        worth a try."""
        site = call.site
        found: Sequence[tuple[BlockPolicy, float | None]] = ()
        if not why:
            with random_numbers_restored():
                found = self.executor.choices(_BLOCK, site.module, call.run)
        as_it_is = BlockPolicy(block=_BLOCK, how=AS_IT_IS)
        try:
            kept, forward_s = self._measured(gauge, call, as_it_is, _ROUNDS)
        except RuntimeError as error:
            raise TraceError(f"{site.path} cannot be run by itself: {one_line(error)}") from None
        tried: list[tuple[BlockPolicy, float | None, Way]] = []
        for policy, left in found:
            try:
                way, _ = self._measured(gauge, call, policy, _ROUNDS if left is None else 1)
            except Exception as error:  # the executor's, which has rules that we do not know
                why = one_line(error)  # whoever keeps the error keeps its frames, and their graph
                logger.info("%s cannot run like this: %s: %s", site.path, policy.saved, why)
            else:
                tried.append((policy, left, way))
        if any(left is None for _, left, _ in tried):  # what is compared is to be as warm
            warm, warm_s = self._measured(gauge, call, as_it_is, _ROUNDS)
            kept = replace(kept, time_s=min(kept.time_s, warm.time_s))
            forward_s = min(forward_s, warm_s)
        ways = [kept]
        for _, left, way in tried:  # one run tells what it takes, but not how long
            extra_s = way.time_s - kept.time_s if left is None else left * forward_s
            ways.append(replace(way, time_s=kept.time_s + max(0.0, extra_s)))
        return tuple(ways), (as_it_is, *(policy for policy, _, _ in tried)), "" if tried else why

    def _measured(
        self, gauge: Gauge, call: Invocation, policy: BlockPolicy, rounds: int
    ) -> tuple[Way, float]:
        """The fastest of some rounds, and the seconds of the fastest forward."""
        run = partial(self.executor.run, policy, call.site.module, call.forward)
        found = [measured(gauge, call.by(run), self.executor.gradients) for _ in range(rounds)]
        return min((way for way, _ in found), key=lambda way: way.time_s), min(s for _, s in found)
