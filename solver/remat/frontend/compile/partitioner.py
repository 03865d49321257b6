"""`Partitioner`: splits the joint graphs of torch.compile into forward and backward by a plan."""

from __future__ import annotations

import logging
import math
import time
import warnings
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from torch import fx
from torch._inductor.custom_graph_pass import CustomPartitionerFn

from remat.choice.candidate_log import CandidateLog
from remat.errors import InfeasibleBudget, RematError, SolverTimeout, TraceError, one_line
from remat.frontend.compile.candidates import (
    MIN_SOLVE_S,
    CandidateSelection,
    GraphSolver,
    graph_offload_limits,
    prepare_host_for_plan,
)
from remat.frontend.compile.compat import min_cut_partition
from remat.frontend.compile.compile_options import COMPILED_PIECES, CompileOptions, read_options
from remat.frontend.compile.fx_utils import (
    ScopedSymbol,
    add_missing_bounds,
    bound_by_current_size,
    copy_fx_graph,
)
from remat.frontend.compile.inductor.fusion_control import InstallFusionChoices
from remat.frontend.compile.inductor.peak_check import PeakVerifier
from remat.frontend.compile.joint_graph import CompiledJointGraph, build_joint_graph
from remat.frontend.compile.kernels.cost_model import KernelCostModel
from remat.frontend.compile.kernels.fusion_groups import sort_by_dependencies
from remat.frontend.compile.kernels.problem import (
    CompileProblem,
    build_problem,
    inductor_baseline_peak_bytes,
    unsplit_step,
)
from remat.frontend.compile.kernels.to_fx import build_graph_modules, plain_graph_modules
from remat.frontend.compile.kernels.variants import Variant, find_variants
from remat.frontend.compile.registry import (
    NO_FEEDBACK,
    CompiledPlan,
    PlannedSplit,
    ReplanFeedback,
    UnsplitStep,
    graph_title,
    register_plan,
    saved_by_other_graphs,
    unregister_plan,
    warn_of_smallest_plan,
)
from remat.frontend.compile.split import CannotSplit, split_joint_graph
from remat.frontend.compile.step_graphs import (
    allocated_share,
    current_compile_id,
    current_object_name,
    external_memory_bytes,
)
from remat.graph import Baseline, Split
from remat.limits.budget import Budget
from remat.limits.limits import Limits, is_smallest_accepted
from remat.limits.options import SPLIT_AUTO, pieces_to_try
from remat.limits.units import format_bytes, format_seconds
from remat.plan_data import SplitFigures
from remat.progress import Clock
from remat.report.plan_report import offload_lines
from remat.strategies import Strategy
from remat.strategies.base import with_limits
from remat.version import VERSION

logger = logging.getLogger("remat")

_CAPTURES_PER_COMPILATION = 4
"""A lower bound of the time of torch.compile for a graph, in times of the capture of its kernels.
torch.compile also generates and compiles their code."""


class _GraphForm(NamedTuple):
    """A joint graph as it is planned: whole, or with its largest operations in pieces.

    `split` is None for the whole graph. `splits` are the operations in pieces, and `obstacle` is
    the reason why the logits are not among them, "" if that is not known.
    """

    module: fx.GraphModule
    split: PlannedSplit | None = None
    splits: tuple[Split, ...] = ()
    obstacle: str = ""

    def in_pieces(self, num_fwd_outputs: int, split: PlannedSplit, *, is_auto: bool) -> _GraphForm:
        """Return the form in `split.pieces` pieces, with a new module. With `is_auto`, the size of
        regions is limited (see `split_joint_graph`). Raises `CannotSplit`."""
        module, splits, obstacle = split_joint_graph(
            self.module, num_fwd_outputs, split.pieces, is_auto=is_auto
        )
        return _GraphForm(module, split, splits, obstacle)


@dataclass(frozen=True)
class _PartitionArguments:
    """The arguments of one call of the partitioner, the unbounded size symbols of the joint graph,
    and the time limit of planning. `static` are the indices of inputs with a fixed address."""

    values: Sequence[object]
    num_fwd_outputs: int
    static: list[int] | None
    unbounded: Sequence[ScopedSymbol]
    clock: Clock


class _PlannedForm(NamedTuple):
    """The plan of a form, and the time that the capture of its kernels took."""

    form: _GraphForm
    problem: CompileProblem
    compiled: CompiledPlan
    capture_s: float

    @property
    def peak_bytes(self) -> int:
        """The peak of the plan, or of Inductor's own kernels if the graph keeps them."""
        compiled = self.compiled
        return compiled.baseline_bytes if compiled.is_plain else compiled.plan.peak_bytes


class PlanRound(NamedTuple):
    """One of the plans that the backend "remat" tries for a graph.

    The graphs of one `group` share the budget; without the backend there is none. `feedback` comes
    from the earlier plans of the graph; `number` counts the plans, this one included. With
    `split`, the largest operations run in pieces. `unbounded`, which all plans of the graph share,
    are the size symbols that had no upper bound before the first one. `log` has the candidates of
    all plans of the graph.
    """

    group: object = None
    feedback: ReplanFeedback = NO_FEEDBACK
    number: int = 1
    split: PlannedSplit | None = None
    unbounded: list[ScopedSymbol] | None = None
    log: CandidateLog | None = None


class Partitioner(CustomPartitionerFn):
    """Plans each step that torch.compile traces within a budget, for code that sets Inductor's
    options itself:

        torch.compile(model, options=remat.Partitioner("60%").settings())

    It takes the options of `torch.compile(backend="remat")`. The backend also replans a graph whose
    kernels need more memory than planned, or whose budget needs pieces (`split="auto"`); with a
    partitioner alone this is an error.
    """

    _has_fused_costs = True
    """False to time each operation as a kernel of its own: a comparison for benchmarks."""

    def __init__(self, budget: int | str, **options: Any) -> None:
        compile_options, inductor_options = read_options({"budget": budget, **options})
        if inductor_options:
            raise ValueError(
                f"{next(iter(inductor_options))} is an option of Inductor: pass it to torch.compile"
            )
        pieces = pieces_to_try(compile_options.split)
        split = PlannedSplit(pieces[0]) if len(pieces) == 1 else None
        self._initialize(compile_options, PlanRound(split=split))

    def _initialize(self, options: CompileOptions, plan_round: PlanRound) -> None:
        """Set the options, the round, and the empty results of a new partitioner."""
        self.options = options
        self.round = plan_round
        self.split = plan_round.split
        """The pieces of the latest plan; None if its operations stay whole. For "min", they may
        differ from those that are requested."""
        self.unsplit: UnsplitStep | None = None
        """The latest graph's step without pieces, once it was built."""
        self.module = self.compile_id = ""
        self.compiled: CompiledPlan | None = None
        """The latest plan."""

    @classmethod
    def of_backend(cls, options: CompileOptions, plan_round: PlanRound) -> Partitioner:
        """Create the partitioner of one graph for the backend "remat"."""
        partitioner = cls.__new__(cls)
        partitioner._initialize(options, plan_round)
        return partitioner

    @property
    def title(self) -> str:
        """The name of the latest graph in log lines and errors."""
        return graph_title(self.module, self.compile_id)

    def __deepcopy__(self, _: object) -> Partitioner:
        return self  # Inductor copies its options to log them, and torch's symbols are not copyable

    def settings(self) -> dict[str, Any]:
        """Return the options of Inductor that install this partitioner and make Inductor generate
        the planned kernels."""
        return {
            "custom_partitioner_fn": self,
            "reorder_for_peak_memory": False,
            "allow_buffer_reuse": False,  # Inductor would keep dead buffers for later ones
            "_pre_fusion_custom_pass": InstallFusionChoices(),
            "_post_fusion_custom_pass": PeakVerifier(self.uuid()),
        }

    def __call__(
        self,
        gm: fx.GraphModule,
        joint_inputs: Sequence[object],
        *,
        num_fwd_outputs: int,
        static_lifetime_input_indices: list[int] | None = None,
        **_: Any,
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        static = static_lifetime_input_indices
        # Planning modifies the graph, and may fail afterwards.
        original = fx.GraphModule(gm, copy_fx_graph(gm.graph)) if self.options.fallback else gm
        try:
            return self._partition(gm, joint_inputs, num_fwd_outputs, static)
        except Exception as error:
            if isinstance(error, RematError) and not isinstance(error, TraceError):
                raise  # about the budget or the solver, not about the graph
            reason = f"remat cannot plan {self.title}: {one_line(error)}"
            if not self.options.fallback:
                raise TraceError(
                    f"{reason}; please report it, or pass fallback=True: torch's own partitioner "
                    "then takes this graph, outside of the budget"
                ) from error
            warnings.warn(
                f"{reason}; torch's own partitioner partitions this graph, outside of the budget. "
                "Please report it",
                stacklevel=2,
            )
            return min_cut_partition(original, joint_inputs, num_fwd_outputs, static)

    def _partition(
        self,
        gm: fx.GraphModule,
        joint_inputs: Sequence[object],
        num_fwd_outputs: int,
        static: list[int] | None,
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        """Plan a joint graph, register the plan, and return the forward and backward graphs of its
        schedule; Inductor's own where the plan keeps these. Modifies `gm`."""
        limit_s = self.options.planning_s
        clock = Clock.of(math.inf if limit_s is None else limit_s)
        self.module, self.compile_id = current_object_name(), current_compile_id()
        operations = _num_fx_operations(gm)
        feedback = self.round.feedback
        reduced = f", reduced by {format_bytes(feedback.excess_bytes)}"
        not_in_place = f", {len(feedback.separate_buffers)} values not in place"
        logger.info(
            "%s: planning %d operations within %s%s%s",
            self.title,
            operations,
            self.options.limits.budget.requested,
            reduced if feedback.excess_bytes else "",
            not_in_place if feedback.separate_buffers else "",
        )
        unbounded = add_missing_bounds(gm.graph.find_nodes(op="placeholder"))
        if self.round.unbounded is not None:
            self.round.unbounded.extend(unbounded)
            unbounded = self.round.unbounded
        inputs = _PartitionArguments(joint_inputs, num_fwd_outputs, static, unbounded, clock)
        form = self._requested_form(gm, inputs)
        if self._may_select_pieces():
            whole = fx.GraphModule(gm, copy_fx_graph(gm.graph))  # planning modifies the graph
            planned = self._smallest_plan_with_pieces(self._plan_form(form, inputs), whole, inputs)
        else:
            planned = self._plan_form(form, inputs)
        compiled, self.split = planned.compiled, planned.form.split
        self._log_solved(compiled)
        if compiled.is_plain:
            graph_modules = plain_graph_modules(planned.problem, compiled)
        else:
            graph_modules = build_graph_modules(
                planned.problem,
                compiled,
                num_fwd_outputs,
                static or (),
                inductor=self.options.inductor,
            )
        compiled.operations = operations
        compiled.planned_s = clock.elapsed_s
        register_plan(compiled)
        self.compiled = compiled
        return graph_modules

    def _log_solved(self, compiled: CompiledPlan) -> None:
        """Log the peak and time of a plan, or that the graph keeps Inductor's own kernels."""
        plan = compiled.plan
        if compiled.is_plain:
            logger.info(
                "%s: keeps Inductor's own kernels, as under plain torch.compile: peak %s",
                self.title,
                format_bytes(compiled.baseline_bytes),
            )
            return
        logger.info(
            "%s: solved in %s: peak %s instead of %s, budget %s; time %+.2f%%, %d recomputations%s",
            self.title,
            format_seconds(float(plan.solve.get("total_s", 0.0))),
            format_bytes(plan.peak_bytes),
            format_bytes(compiled.baseline_bytes),
            format_bytes(plan.budget_bytes),
            100 * plan.overhead,
            sum(plan.schedule.recomputed(plan.graph).values()),
            "".join(f"; {line}" for line in offload_lines(plan)),
        )

    # -- the graph whole and in pieces ------------------------------------------------------------

    def _requested_form(self, gm: fx.GraphModule, inputs: _PartitionArguments) -> _GraphForm:
        """Return the form with the requested pieces; whole if none are requested, or where the
        graph cannot be split and need not be. Sets `unsplit`, the step without pieces, if pieces
        are requested."""
        split = self.round.split
        self.split, self.unsplit = split, split and split.unsplit
        whole = _GraphForm(gm)
        if split is None:
            return whole
        if self.unsplit is None:
            unsplit = fx.GraphModule(gm, copy_fx_graph(gm.graph))
            joint = self._joint_graph(unsplit, inputs)
            ((joint, groups), *_) = find_variants(joint, baseline_only=True)
            cost_model = KernelCostModel(joint, fused=self._has_fused_costs)
            self.unsplit = unsplit_step(
                build_problem(joint, groups, cost_model, self.options.outputs)
            )
        try:
            is_auto = self.options.split == SPLIT_AUTO
            return whole.in_pieces(inputs.num_fwd_outputs, split, is_auto=is_auto)
        except CannotSplit as error:
            if split.unsplit is not None:
                raise  # the graph does not fit without
            logger.info("%s: not split: %s", self.title, one_line(error))
            self.split = None
            return whole

    def _may_select_pieces(self) -> bool:
        """True if the backend plans for "min" with `split="auto"`, in the graph's first plan. Not
        in later ones: the kernels of the plan in pieces exceeded the peak of the plan without."""
        options = self.options
        is_first = self.round.group is not None and self.split is None and self.round.number == 1
        return is_first and options.limits.budget.is_min and options.split == SPLIT_AUTO

    def _smallest_plan_with_pieces(
        self, planned: _PlannedForm, whole: fx.GraphModule, inputs: _PartitionArguments
    ) -> _PlannedForm:
        """Return the plan with the smallest peak: `planned`, or one of the graph `whole` with its
        largest operations in pieces.

        The captures in pieces may take the time limit of the strategy plus the expected time of
        compiling the whole graph. Each solve may take half of the time limit.
        """
        smallest, whole_bytes = planned, planned.peak_bytes
        num_operations = _num_fx_operations(whole)
        time_limit_s = getattr(self.options.strategy, "time_limit", 0.0)
        strategy = with_limits(self.options.strategy, time_limit=max(MIN_SOLVE_S, time_limit_s / 2))
        captures_s = time_limit_s + _CAPTURES_PER_COMPILATION * planned.capture_s
        started_s, solves_s = time.perf_counter(), 0.0
        for pieces in COMPILED_PIECES:
            split = PlannedSplit(pieces, self.unsplit, whole_bytes)
            try:
                form = _GraphForm(whole).in_pieces(inputs.num_fwd_outputs, split, is_auto=True)
            except CannotSplit as error:
                logger.info("%s: not split: %s", self.title, one_line(error))
                break
            elapsed_s = time.perf_counter() - started_s - solves_s
            capture_s = planned.capture_s * _num_fx_operations(form.module) / max(1, num_operations)
            # Without Inductor a capture is quick; Inductor schedules the kernels of a capture.
            if self.options.inductor and elapsed_s + capture_s > captures_s:
                logger.info(
                    "%s: no time to plan the largest operations in %d pieces; pass split=%d, or a "
                    "larger time_limit, to plan with them",
                    self.title,
                    pieces,
                    pieces,
                )
                break
            with suppress(InfeasibleBudget, SolverTimeout):
                attempt_started_s = time.perf_counter()
                in_pieces = self._plan_form(form, inputs, strategy)
                solves_s += time.perf_counter() - attempt_started_s - in_pieces.capture_s
                if in_pieces.peak_bytes < smallest.peak_bytes:
                    smallest = in_pieces
        if smallest.form.split is not None:
            logger.info(
                "%s: the largest operations in %d pieces: peak %s, without pieces %s",
                self.title,
                smallest.form.split.pieces,
                format_bytes(smallest.peak_bytes),
                format_bytes(whole_bytes),
            )
            smallest.compiled.limit_bytes = whole_bytes
        return smallest

    # -- the plan of one form ---------------------------------------------------------------------

    def _plan_form(
        self, form: _GraphForm, inputs: _PartitionArguments, strategy: Strategy | None = None
    ) -> _PlannedForm:
        """Plan a form of the joint graph within the budget; without the backend, for the smallest
        peak if nothing fits and `options.infeasible` accepts that. `strategy` overrides
        `options.strategy`. Raises `InfeasibleBudget`."""
        capture_started_s = time.perf_counter()
        options = self.options
        joint = self._joint_graph(form.module, inputs)
        # The third plan of a graph keeps the kernels that Inductor generates without a plan.
        variants = find_variants(joint, baseline_only=self.round.number > 2)
        if form.split is not None:
            # Inductor may run one kernel for all pieces first; then all pieces are live at once.
            variants = [
                (joint, sort_by_dependencies(joint, groups, in_graph_order=True))
                for joint, groups in variants
            ]
        num_backward = sum(group.is_backward for group in variants[0][1])
        capture_s = time.perf_counter() - capture_started_s
        logger.info(
            "%s: %d %s in the forward, %d in the backward, captured in %s",
            self.title,
            len(variants[0][1]) - num_backward,
            "Inductor kernels" if options.inductor else "operations",
            num_backward,
            format_seconds(capture_s),
        )
        cost_model = KernelCostModel(joint, fused=self._has_fused_costs)
        is_fused = options.inductor and self._has_fused_costs
        solver = GraphSolver(
            strategy or options.strategy,
            None if strategy or options.planning_s is None else inputs.clock,
            options.progress,
            cost_source=f"of {'kernels' if is_fused else 'operations'}, measured",
        )

        def plan(limits: Limits) -> tuple[CompileProblem, CompiledPlan]:
            return self._plan_variants(form, variants, cost_model, inputs.unbounded, solver, limits)

        # The backend tries pieces before it takes the smallest peak.
        takes_smallest = self.round.group is None and is_smallest_accepted(options.infeasible)
        if not takes_smallest or options.limits.budget.is_min:
            return _PlannedForm(form, *plan(options.limits), capture_s)
        with suppress(InfeasibleBudget):
            return _PlannedForm(form, *plan(options.limits), capture_s)
        problem, compiled = plan(options.limits.with_budget(Budget.parse("min")))
        compiled.infeasible_limits = options.limits
        if not options.inductor:  # else once the kernels are verified
            warn_of_smallest_plan(compiled)
        return _PlannedForm(form, problem, compiled, capture_s)

    def _plan_variants(
        self,
        form: _GraphForm,
        variants: Sequence[Variant],
        cost_model: KernelCostModel,
        unbounded: Sequence[ScopedSymbol],
        solver: GraphSolver,
        limits: Limits,
    ) -> tuple[CompileProblem, CompiledPlan]:
        """Return the best variant's problem and plan, for the upper bounds of its sizes.

        `unbounded` are the symbols of sizes that had no bound. If there are any and the budget is
        in bytes, the bounds that remat added are lowered to the sizes of this call where larger
        ones do not fit.
        """

        def selection() -> CandidateSelection:
            problems = [
                build_problem(joint, groups, cost_model, self.options.outputs)
                for joint, groups in variants
            ]
            return self._candidate_selection(form, problems, solver, limits)

        if unbounded and limits.budget.size_bytes is not None:
            with suppress(InfeasibleBudget):
                return self._compiled_plan(form, selection())
            bound_by_current_size(unbounded)
        bounded = selection()
        try:
            return self._compiled_plan(form, bounded)
        except InfeasibleBudget as error:
            raise bounded.explained(error, self.title, form.obstacle) from error

    def _candidate_selection(
        self, form: _GraphForm, problems: list[CompileProblem], solver: GraphSolver, limits: Limits
    ) -> CandidateSelection:
        """Return the selection among the candidates for a graph. The first of the `problems`, one
        for each variant, is the step that torch.compile would run: the baseline. Sets `unsplit` if
        the form is whole."""
        joint = problems[0].joint
        plain_bytes = None
        if form.split is None:
            self.unsplit = unsplit_step(problems[0])
            if joint.plain_halves is not None:  # else 100% needs a plan
                plain_bytes = inductor_baseline_peak_bytes(problems[0])
        unsplit = self.unsplit
        assert unsplit is not None
        if form.split is not None:
            baseline = Baseline(unsplit.peak_bytes, unsplit.time_s)
            problems = [
                replace(p, graph=replace(p.graph, unsplit=baseline, splits=form.splits))
                for p in problems
            ]
        others, feedback = saved_by_other_graphs(self.round.group), self.round.feedback
        external_bytes = others.saved_bytes
        if limits.budget.size_bytes is not None:
            external_bytes += external_memory_bytes(joint, self.options.model, others.saved_bytes)
        return CandidateSelection(
            problems,
            solver,
            replace(limits, external_bytes=external_bytes, excess_bytes=feedback.excess_bytes),
            unsplit._replace(peak_bytes=unsplit.peak_bytes + others.baseline_saved_bytes),
            feedback,
            plain_bytes,
            graph_offload_limits(self.options.offload, joint, others.host_bytes),
            self.round.log or CandidateLog(),
        )

    def _compiled_plan(
        self, form: _GraphForm, selection: CandidateSelection
    ) -> tuple[CompileProblem, CompiledPlan]:
        """Select a candidate, and return its problem and its plan. Without the backend, pins host
        memory for its offloaded tensors."""
        problem, plan, is_plain = selection.select()
        joint, unsplit = problem.joint, self.unsplit
        assert unsplit is not None
        if self.round.group is None:  # the backend calls it once the kernels of a plan are verified
            prepare_host_for_plan(plan, joint.device)
        if form.split is not None and form.split.unsplit_min_bytes is not None:
            figures = SplitFigures(unsplit_min_bytes=form.split.unsplit_min_bytes)
            plan = replace(plan, split=figures)
        limits, available_bytes = selection.limits, selection.available_bytes
        budget_bytes = None if available_bytes is None else available_bytes + limits.excess_bytes
        is_replanned = self.round.group is not None and not is_plain
        return problem, CompiledPlan(
            plan=plan,
            budget_bytes=budget_bytes,
            limit_bytes=(
                selection.plain_bytes if budget_bytes is None and is_replanned else budget_bytes
            ),
            module=self.module,
            compile_id=self.compile_id,
            baseline_bytes=unsplit.peak_bytes,
            external_bytes=limits.external_bytes,
            primals_bytes=joint.primals_bytes,
            batch_copy_bytes=joint.batch_copy_bytes,
            group=self.round.group,
            rounds=self.round.number,
            baseline_saved_bytes=unsplit.saved_bytes,
            is_plain=is_plain,
        )

    def _joint_graph(self, gm: fx.GraphModule, inputs: _PartitionArguments) -> CompiledJointGraph:
        """Build the planned joint graph from AOTAutograd's `gm`, which is modified."""
        return build_joint_graph(
            gm,
            inputs.values,
            inputs.num_fwd_outputs,
            inputs.static,
            self.options.outputs,
            inductor=self.options.inductor,
        )

    def discard_plan(self) -> None:
        """Remove the latest plan, if there is one, from the registry: its code does not run."""
        if self.compiled is not None:
            unregister_plan(self.compiled)

    def planned_split(self) -> PlannedSplit | None:
        """Return the requested pieces with the unsplit step; None if no pieces were requested, or
        the latest plan has none."""
        if self.round.split is None or self.split is None:
            return None
        return self.split._replace(unsplit=self.unsplit)

    def uuid(self) -> str:
        """Return the key of this partitioner in torch's caches: everything that decides a plan."""
        others = saved_by_other_graphs(self.round.group)
        excess_bytes, separate_buffers, *flags = self.round.feedback
        feedback = (excess_bytes, *sorted(separate_buffers), *flags)
        pieces = 0 if self.round.split is None else self.round.split.pieces
        is_alone = self.round.group is None
        key = (self.options, self._has_fused_costs, *feedback, others, is_alone, pieces)
        allocated = allocated_share(self.options.limits.budget.size_bytes)
        return f"remat {VERSION} {key!r} {allocated}"


def _num_fx_operations(gm: fx.GraphModule) -> int:
    """Return the number of operator calls in an fx graph."""
    return sum(node.op == "call_function" for node in gm.graph.nodes)
