"""`rewrite`: Trace + Schedule -> Program. Pure data in, pure data out.

Every run of the schedule becomes a statement. Views are no operations: they are written down where
a statement needs them, from the copy of their storage that is alive there. What the backward
reads of the forward's variables is what the forward saves.
"""

from __future__ import annotations

from typing import NamedTuple

from remat.documents.arguments import Argument, refs, rename
from remat.documents.program import Bound, Program, Statement
from remat.documents.records import Gradient, Node, Output
from remat.documents.trace import ACCUMULATE, Trace, held_storages
from remat.errors import GraphError
from remat.passes.gradient_accumulation import accumulation_operation_name
from remat.schedule import Schedule
from remat.simulate import simulate

BATCH_NORM = "aten._native_batch_norm_legit_functional.default"
BATCH_NORM_AGAIN = "aten._native_batch_norm_legit.no_stats"
BATCH_NORM_OF_CUDA = "aten._batch_norm_with_update_functional.default"
"""Runs cuDNN's kernel or torch's own, as eager mode does on CUDA."""


class Rerun(NamedTuple):
    """How a batch norm runs again, with the same outputs bit for bit, so that the running
    statistics move only once: by which operation, on which of its arguments. The first `results`
    results are the same, the new statistics come after them and are not made."""

    target: str
    arguments: tuple[int, ...]
    results: int


RERUNS = {
    BATCH_NORM: Rerun(BATCH_NORM_AGAIN, (0, 1, 2, 5, 6, 7), 3),
    # It cannot do without statistics: bias and weight have their shape and type, and stand for
    # them. (The model's own would have to be kept for it, and change meanwhile.)
    BATCH_NORM_OF_CUDA: Rerun(BATCH_NORM_OF_CUDA, (0, 1, 2, 2, 1, 5, 6), 4),
}


def rewrite(trace: Trace, schedule: Schedule) -> Program:
    """The program that runs exactly `schedule`.

    Raises `GraphError` where the schedule does not fit the trace.
    """
    graph = trace.graph()
    timeline = simulate(graph, schedule)
    writer = _Writer(trace, schedule)
    writer.write()
    return Program(
        model=trace.model,
        device=trace.device,
        placeholders=trace.placeholders,
        forward=tuple(writer.statements["forward"]),
        backward=tuple(writer.statements["backward"]),
        saved=tuple(writer.saved),
        states=tuple(writer.states),
        outputs=writer.outputs(),
        gradients=writer.gradients,
        inputs=trace.inputs,
        result=trace.result,
        environment=trace.environment,
        accumulating=trace.accumulating,
        outputs_dropped=trace.outputs_dropped,
        predicted_peak_bytes=timeline.peak_bytes,
    )


class _Writer:
    def __init__(self, trace: Trace, schedule: Schedule) -> None:
        self.trace = trace
        self.schedule = schedule
        self.statements: dict[str, list[Statement]] = {"forward": [], "backward": []}
        self._phase = self.statements["forward"]
        self.saved: dict[str, None] = {}
        self.states: dict[str, None] = {}
        self.gradients: tuple[Gradient, ...] = ()
        self._repeated = schedule.recomputed(trace.graph())
        self._placeholders = {p.name for p in trace.placeholders}
        self._maker = {r.name: node for node in trace.nodes for r in node.results}
        self._variable: dict[str, str] = {}  # tensor -> variable, valid in the current phase
        self._defined: set[str] = set()  # variables
        self._to_save: set[str] = set()  # what the backward can only read if it is saved
        self._made: dict[int, list[str]] = {}  # storage -> tensors that have a variable
        self._ran: set[int] = set()
        self._results = held_storages(trace)
        self._forward_output: dict[str, str] = {}

    def write(self) -> None:
        for op in self.schedule.runs:
            node = self.trace.operations[op]
            if node is None:
                self._start_backward()
            else:
                self._write_run(node, op)
        self.gradients = tuple(
            Gradient(placeholder=g.placeholder, name=self._gradient_name(g))
            for g in self.trace.gradients
        )
        self._drop_unread()

    def outputs(self) -> tuple[Output, ...]:
        """The trace's outputs under their forward variables."""
        return tuple(
            o.model_copy(update={"name": self._forward_output[o.name]}) for o in self.trace.outputs
        )

    # -- one run ----------------------------------------------------------------------------

    def _write_run(self, node: Node, op: int) -> None:
        again = op in self._ran
        self._ran.add(op)
        replays = node.seeded and op in self._repeated
        target, args, kept = node.target, node.args, node.results
        if again and (rerun := RERUNS.get(target)) is not None:
            target, args = rerun.target, tuple(args[i] for i in rerun.arguments)
            kept = tuple(r for r in kept if r.position < rerun.results)
        args = tuple(self._rename(item) for item in args)
        kwargs = {key: self._rename(item) for key, item in node.kwargs.items()}
        if again:
            kept = tuple(r for r in kept if r.storage not in self._results)
        for storage in {r.storage for r in kept}:
            for name in self._made.pop(storage, ()):
                self._variable.pop(name, None)
        bound = tuple(
            Bound(name=self._define(r.name, r.storage), position=r.position) for r in kept
        )
        if node.target == ACCUMULATE:
            self._defined.add(node.name)
            bound = (Bound(name=node.name),)
        self._append(
            Statement(
                target=target,
                args=args,
                kwargs=kwargs,
                results=bound,
                random=("replay" if again else "save") if replays else "",
                state=self._state(node, again) if replays else "",
                device=node.results[0].tensor.device if replays else "",
                module=node.module,
                rerun=again,
            )
        )

    def _state(self, node: Node, again: bool) -> str:
        name = f"rng_{node.name}"
        if not again:
            self._defined.add(name)
        elif name in self._to_save:
            self.states[name] = None
        return name

    def _start_backward(self) -> None:
        """Outputs leave the forward; views are written again where the backward needs them."""
        for output in self.trace.outputs:
            self._forward_output[output.name] = self._read(output.name)
        for names in self._made.values():
            for name in [n for n in names if self._maker[n].view]:
                self._variable.pop(name, None)
                names.remove(name)
        given = [p.name for p in self.trace.placeholders if p.kind not in ("tangent", "constant")]
        self._to_save = {*self._defined, *given}
        self._phase = self.statements["backward"]

    def _gradient_name(self, gradient: Gradient) -> str:
        accumulated = accumulation_operation_name(gradient.placeholder)
        return accumulated if accumulated in self._defined else self._read(gradient.name)

    # -- variables --------------------------------------------------------------------------

    def _rename(self, argument: Argument) -> Argument:
        return rename(argument, self._read)

    def _read(self, name: str) -> str:
        """The variable that holds a tensor now; views are written down here if need be."""
        if name in self._placeholders:
            variable = name
        else:
            if name not in self._variable:
                self._write_view(name)
            variable = self._variable[name]
        if variable in self._to_save:
            self.saved[variable] = None
        return variable

    def _write_view(self, name: str) -> None:
        node = self._maker[name]
        if not node.view:
            raise GraphError(f"the schedule reads {name} before it is produced")
        args = tuple(self._rename(item) for item in node.args)
        kwargs = {key: self._rename(item) for key, item in node.kwargs.items()}
        bound = tuple(
            Bound(name=self._define(r.name, r.storage), position=r.position) for r in node.results
        )
        self._append(
            Statement(
                target=node.target, args=args, kwargs=kwargs, results=bound, module=node.module
            )
        )

    def _define(self, name: str, storage: int) -> str:
        variable, copy = name, 1
        while variable in self._defined:
            copy += 1
            variable = f"{name}__{copy}"
        self._defined.add(variable)
        self._variable[name] = variable
        self._made.setdefault(storage, []).append(name)
        return variable

    def _append(self, statement: Statement) -> None:
        self._phase.append(statement)

    def _drop_unread(self) -> None:
        """Forget variables that nobody reads: the tuple element then dies with its tuple."""
        outputs = {
            "forward": {*self._forward_output.values(), *self.saved},
            "backward": {g.name for g in self.gradients},
        }
        for phase, statements in self.statements.items():
            read = set(outputs[phase])
            for statement in statements:
                read.update(refs((statement.args, *statement.kwargs.values())))
            self.statements[phase] = [
                s.model_copy(update={"results": tuple(b for b in s.results if b.name in read)})
                for s in statements
            ]
