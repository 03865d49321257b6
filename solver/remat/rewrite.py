"""`rewrite`: the program that runs a schedule, from a trace. Pure data in, pure data out.

Every run of the schedule becomes a statement. Views are no operations: they are written where a
statement needs them, from the copy of their storage that is live there. The forward saves the
variables that the backward reads.
"""

from __future__ import annotations

import re
from collections.abc import Container, Set
from typing import NamedTuple

from remat.documents.arguments import Argument, rename_refs
from remat.documents.program import Binding, Program, Statement
from remat.documents.records import Gradient, Node, Output
from remat.documents.targets import ACCUMULATE_TARGET
from remat.documents.trace import Trace, storages_live_at_end
from remat.errors import GraphError, wrong_type
from remat.passes.gradient_accumulation import accumulation_operation_name
from remat.schedule import Schedule
from remat.simulate import overwritten_copies, simulate

BATCH_NORM = "aten._native_batch_norm_legit_functional.default"
BATCH_NORM_WITHOUT_STATS = "aten._native_batch_norm_legit.no_stats"
BATCH_NORM_CUDA = "aten._batch_norm_with_update_functional.default"
"""Runs cuDNN's kernel or torch's own, as eager mode does on CUDA."""


class BatchNormRecompute(NamedTuple):
    """How to recompute a batch norm, with bitwise equal outputs, without updating the running
    statistics a second time.

    `target` is the operator, `arguments` are the indices of the original's arguments that it takes.
    Its first `results` results are equal; the new statistics come after them and are not computed.
    """

    target: str
    arguments: tuple[int, ...]
    results: int


BATCH_NORM_RECOMPUTES = {
    BATCH_NORM: BatchNormRecompute(BATCH_NORM_WITHOUT_STATS, (0, 1, 2, 5, 6, 7), 3),
    # This operator requires statistics: bias and weight have their shape and type, and are passed
    # instead. (The model's own would have to be retained for it, and change in between.)
    BATCH_NORM_CUDA: BatchNormRecompute(BATCH_NORM_CUDA, (0, 1, 2, 2, 1, 5, 6), 4),
}


def rewrite(trace: Trace, schedule: Schedule) -> Program:
    """Return the program that runs exactly `schedule`.

    Raises `GraphError` if the schedule does not fit the trace, and TypeError for another object,
    such as a plan.
    """
    if not isinstance(trace, Trace):
        raise wrong_type("rewrite", "a Trace", trace, "pass what remat.trace returned")
    if not isinstance(schedule, Schedule):
        raise wrong_type("rewrite", "a Schedule", schedule, "pass plan.schedule")
    graph = trace.graph()
    try:
        timeline = simulate(graph, schedule)
    except GraphError as error:
        raise GraphError(
            f"the schedule does not fit this trace ({error}): rewrite the trace that was "
            "solved. remat.solve_step returns it with the plan: remat.rewrite(step.trace, "
            "step.plan.schedule)"
        ) from None
    overwritten = overwritten_copies(graph, schedule, timeline.copies)
    overwriting_runs = {timeline.copies[index].end for index in overwritten}
    writer = _ProgramWriter(trace, schedule, overwriting_runs)
    writer.write()
    return Program(
        model=trace.model,
        device=trace.device,
        placeholders=trace.placeholders,
        forward=tuple(writer.statements["forward"]),
        backward=tuple(writer.statements["backward"]),
        saved=tuple(writer.saved),
        rng_states=tuple(writer.rng_states),
        outputs=writer.outputs(),
        gradients=writer.gradients,
        inputs=trace.inputs,
        result=trace.result,
        stores=trace.stores,
        environment=trace.environment,
        accumulates_gradients=trace.accumulates_gradients,
        outputs_dropped=trace.outputs_dropped,
        predicted_peak_bytes=timeline.peak_bytes,
    )


class _ProgramWriter:
    """Writes the statements of both phases; its state is which tensors have a variable at the
    current run."""

    def __init__(self, trace: Trace, schedule: Schedule, overwriting_runs: Set[int]) -> None:
        self.trace = trace
        self.schedule = schedule
        self._overwriting_runs = overwriting_runs
        self.statements: dict[str, list[Statement]] = {"forward": [], "backward": []}
        self._phase = self.statements["forward"]
        self.saved: dict[str, None] = {}
        self.rng_states: dict[str, None] = {}
        self.gradients: tuple[Gradient, ...] = ()
        self._recomputed = schedule.recomputed(trace.graph())
        self._placeholders = {p.name for p in trace.placeholders}
        self._producer = {r.name: node for node in trace.nodes for r in node.results}
        self._variable_of: dict[str, str] = {}  # tensor -> variable, valid in the current phase
        self._defined: set[str] = set()  # variables
        self._forward_variables: set[str] = (
            set()
        )  # the backward can read these only if they are saved
        self._named_tensors: dict[int, list[str]] = {}  # storage -> tensors that have a variable
        self._seen_operations: set[int] = set()
        self._results = storages_live_at_end(trace)
        self._forward_output: dict[str, str] = {}

    def write(self) -> None:
        """Write the statements of all runs, and the gradients."""
        for run, op in enumerate(self.schedule.runs):
            node = self.trace.operations[op]
            if node is None:
                self._start_backward()
            else:
                self._write_run(node, op, run in self._overwriting_runs)
        self.gradients = tuple(
            g.model_copy(update={"name": self._gradient_name(g)}) for g in self.trace.gradients
        )
        self._drop_unread_variables()

    def outputs(self) -> tuple[Output, ...]:
        """Return the trace's outputs, under the names of their variables in the forward."""
        return tuple(
            o.model_copy(update={"name": self._forward_output[o.name]}) for o in self.trace.outputs
        )

    # -- one run ----------------------------------------------------------------------------

    def _write_run(self, node: Node, op: int, overwrites: bool) -> None:
        is_recomputation = op in self._seen_operations
        self._seen_operations.add(op)
        replays = node.random and op in self._recomputed
        target, args, results = node.target, node.args, node.results
        if is_recomputation and (recompute := BATCH_NORM_RECOMPUTES.get(target)) is not None:
            target, args = recompute.target, tuple(args[i] for i in recompute.arguments)
            results = tuple(r for r in results if r.position < recompute.results)
        args = tuple(self._rename_argument(item) for item in args)
        kwargs = {key: self._rename_argument(item) for key, item in node.kwargs.items()}
        reusable = self.trace.reusable_arguments.get(node.name)
        overwritten = self._read_tensor(reusable) if overwrites and reusable is not None else ""
        if is_recomputation:
            results = tuple(r for r in results if r.storage not in self._results)
        for storage in {r.storage for r in results}:
            for name in self._named_tensors.pop(storage, ()):
                self._variable_of.pop(name, None)
        bindings = tuple(
            Binding(name=self._define_variable(r.name, r.storage), position=r.position)
            for r in results
        )
        if node.target == ACCUMULATE_TARGET:
            self._defined.add(node.name)
            bindings = (Binding(name=node.name),)
        self._append(
            Statement(
                target=target,
                args=args,
                kwargs=kwargs,
                results=bindings,
                rng_action=("replay" if is_recomputation else "save") if replays else "",
                rng_state=self._rng_state_name(node, is_recomputation) if replays else "",
                device=node.results[0].tensor.device if replays else "",
                overwrites=overwritten,
                module=node.module,
                recomputation=is_recomputation,
            )
        )

    def _rng_state_name(self, node: Node, is_recomputation: bool) -> str:
        name = f"rng_{node.name}"
        if not is_recomputation:
            self._defined.add(name)
        elif name in self._forward_variables:
            self.rng_states[name] = None
        return name

    def _start_backward(self) -> None:
        """Switch to the backward: read the outputs in the forward, and forget its views, which are
        written once more where the backward needs them."""
        for output in self.trace.outputs:
            self._forward_output[output.name] = self._read_tensor(output.name)
        for names in self._named_tensors.values():
            for name in [n for n in names if self._producer[n].view]:
                self._variable_of.pop(name, None)
                names.remove(name)
        graph_inputs = [
            p.name for p in self.trace.placeholders if p.kind not in ("tangent", "constant")
        ]
        self._forward_variables = {*self._defined, *graph_inputs}
        self._phase = self.statements["backward"]

    def _gradient_name(self, gradient: Gradient) -> str:
        accumulated = accumulation_operation_name(gradient.placeholder)
        return accumulated if accumulated in self._defined else self._read_tensor(gradient.name)

    # -- variables --------------------------------------------------------------------------

    def _rename_argument(self, argument: Argument) -> Argument:
        return rename_refs(argument, self._read_tensor)

    def _read_tensor(self, name: str) -> str:
        """Return the variable of a tensor at this point; write the views that it needs."""
        if name in self._placeholders:
            variable = name
        else:
            if name not in self._variable_of:
                self._write_view(name)
            variable = self._variable_of[name]
        if variable in self._forward_variables:
            self.saved[variable] = None
        return variable

    def _write_view(self, name: str) -> None:
        node = self._producer[name]
        if not node.view:
            raise GraphError(f"the schedule reads {name} before it is produced")
        args = tuple(self._rename_argument(item) for item in node.args)
        kwargs = {key: self._rename_argument(item) for key, item in node.kwargs.items()}
        bindings = tuple(
            Binding(name=self._define_variable(r.name, r.storage), position=r.position)
            for r in node.results
        )
        self._append(
            Statement(
                target=node.target, args=args, kwargs=kwargs, results=bindings, module=node.module
            )
        )

    def _define_variable(self, name: str, storage: int) -> str:
        """Return a new variable for a copy of a tensor: its name, or `name__2` for the second
        copy."""
        variable, copy = name, 1
        while variable in self._defined:
            copy += 1
            variable = f"{name}__{copy}"
        self._defined.add(variable)
        self._variable_of[name] = variable
        self._named_tensors.setdefault(storage, []).append(name)
        return variable

    def _append(self, statement: Statement) -> None:
        self._phase.append(statement)

    def _drop_unread_variables(self) -> None:
        """Remove unread variables from the results: an element of a tuple is then freed with its
        tuple."""
        outputs = {
            "forward": {*self._forward_output.values(), *self.saved},
            "backward": {g.name for g in self.gradients},
        }
        for phase, statements in self.statements.items():
            read = set(outputs[phase])
            for statement in statements:
                read.update(statement.operand_names)
            self.statements[phase] = [
                s.model_copy(update={"results": tuple(b for b in s.results if b.name in read)})
                for s in statements
            ]


def tensor_of_variable(variable: str, names: Container[str]) -> str:
    """Return the tensor that a variable of a program is a copy of. Later copies of a tensor are
    `name__2`, `name__3`, ...; `names` are all tensors, whose own names may end in this way, too."""
    return variable if variable in names else re.sub(r"__[0-9]+$", "", variable)
