"""`Partitioner`: splits the joint graphs of torch.compile into forward and backward by a plan."""

from __future__ import annotations

import time
import warnings
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, NamedTuple

from torch import fx
from torch._inductor.custom_graph_pass import CustomPartitionerFn

from remat.errors import InfeasibleBudget, RematError, SolverTimeout, TraceError, one_line
from remat.frontend.compile import reporting
from remat.frontend.compile.candidates import (
    CandidateSelection,
    GraphSolver,
    PiecesTime,
    StepBaseline,
    explain_infeasible,
    offload_limits,
    prepare_host,
    step_device,
    unsplit_step,
    with_unsplit_step,
)
from remat.frontend.compile.compat import min_cut_partition
from remat.frontend.compile.compile_options import COMPILED_PIECES, CompileOptions, read_options
from remat.frontend.compile.fx_utils import (
    ScopedSymbol,
    add_missing_bounds,
    bound_by_current_size,
    copy_graph,
)
from remat.frontend.compile.inductor.fusion_control import InstallFusionChoices
from remat.frontend.compile.inductor.peak_check import PeakVerifier
from remat.frontend.compile.inductor.probe import fuse_matmul_additions, probe_kernels
from remat.frontend.compile.joint_graph import CompiledJointGraph, build_joint_graph
from remat.frontend.compile.kernels.cost_model import KernelCostModel
from remat.frontend.compile.kernels.fusion_groups import sort_by_dependencies
from remat.frontend.compile.kernels.problem import (
    CompileProblem,
    build_problem,
    inductor_baseline_peak_bytes,
)
from remat.frontend.compile.kernels.to_fx import build_modules, plain_modules
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
)
from remat.frontend.compile.split import CannotSplit, split_joint_graph
from remat.frontend.compile.step_graphs import (
    allocated_share,
    current_compile_id,
    current_object_name,
    external_memory_bytes,
)
from remat.graph import Split
from remat.limits.infeasible import INFEASIBLE_ERROR, plan_or_smallest
from remat.limits.limits import Limits
from remat.limits.pieces import SPLIT_AUTO, pieces_to_try
from remat.plan_data import UNSPLIT_MIN_BYTES_STAT
from remat.strategies import Strategy
from remat.version import VERSION


class _JointInputs(NamedTuple):
    """The other arguments of the partitioner, and the unbounded size symbols of the joint graph."""

    values: Sequence[object]
    num_fwd_outputs: int
    static: list[int] | None
    unbounded: Sequence[ScopedSymbol]


class _PlannedGraph(NamedTuple):
    """The plan of a graph, and the time that the capture of its kernels took."""

    problem: CompileProblem
    compiled: CompiledPlan
    capture_s: float

    @property
    def peak_bytes(self) -> int:
        """The peak of the plan, or of Inductor's own kernels if the graph keeps them."""
        compiled = self.compiled
        return compiled.baseline_bytes if compiled.is_plain else compiled.plan.peak_bytes


class Partitioner(CustomPartitionerFn):
    """Plans each step that torch.compile traces within a budget, for code that sets Inductor's
    options itself:

        torch.compile(model, options=remat.Partitioner("60%").settings())

    Options are those of `torch.compile(backend="remat")`. The backend also replans a graph whose
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
        self._initialize(compile_options, split=split)

    def _initialize(
        self,
        options: CompileOptions,
        group: object = None,
        feedback: ReplanFeedback = NO_FEEDBACK,
        rounds: int = 1,
        split: PlannedSplit | None = None,
    ) -> None:
        self.options = options
        self.group = group
        self.feedback = feedback
        self.rounds = rounds
        self.split = split
        """The pieces of the largest operations; None if they stay whole."""
        self.requested_split = split
        """The pieces that the backend requests. For "min", the plan may have other pieces."""
        self.splits: tuple[Split, ...] = ()
        self.obstacle = ""
        """Why the logits are not split, if that is known."""
        self.unsplit: UnsplitStep | None = None if split is None else split.unsplit
        """The step without pieces, once it was built."""
        self.module = self.compile_id = ""
        self.unbounded: list[ScopedSymbol] | None = None
        """Symbols that had no upper bound before the first round, shared by all rounds; None if
        there is a single round."""
        self.compiled: CompiledPlan | None = None
        """The latest plan."""

    @classmethod
    def of_backend(
        cls,
        options: CompileOptions,
        group: object,
        feedback: ReplanFeedback = NO_FEEDBACK,
        rounds: int = 1,
        split: PlannedSplit | None = None,
    ) -> Partitioner:
        """Create the partitioner of one graph for the backend "remat".

        The graphs of one `group` share the budget. `feedback` is that of the earlier plans of this
        graph; `rounds` counts the plans, the next one included. With `split`, the largest
        operations run in pieces.
        """
        partitioner = cls.__new__(cls)
        partitioner._initialize(options, group, feedback, rounds, split)
        return partitioner

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
        original = fx.GraphModule(gm, copy_graph(gm.graph)) if self.options.fallback else gm
        try:
            return self._partition(gm, joint_inputs, num_fwd_outputs, static)
        except Exception as error:
            if isinstance(error, RematError) and not isinstance(error, TraceError):
                raise  # about the budget or the solver, not about the graph
            title = graph_title(self.module, self.compile_id)
            reason = f"remat cannot plan {title}: {one_line(error)}"
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
        """Plan a joint graph and split it into the forward and backward of the schedule."""
        started_s = time.perf_counter()
        self.module, self.compile_id = current_object_name(), current_compile_id()
        title = graph_title(self.module, self.compile_id)
        operations = _num_operations(gm)
        budget = self.options.limits.budget
        reporting.log_planning_start(title, operations, budget.requested, self.feedback)
        inductor = self.options.inductor
        unbounded = add_missing_bounds(gm.graph.find_nodes(op="placeholder"))
        if self.unbounded is not None:
            self.unbounded += unbounded
            unbounded = self.unbounded
        if self.split is not None:
            if self.unsplit is None:
                unsplit = fx.GraphModule(gm, copy_graph(gm.graph))
                self.unsplit = self._build_unsplit_step(
                    self._joint_graph(unsplit, joint_inputs, num_fwd_outputs, static)
                )
            try:
                gm, self.splits, self.obstacle = split_joint_graph(
                    gm, num_fwd_outputs, self.split.pieces
                )
            except CannotSplit as error:
                if self.split.unsplit is not None:
                    raise  # the graph does not fit without
                reporting.log_not_split(title, one_line(error))
                self.split = None
        is_piecewise = self._may_select_pieces()
        whole = fx.GraphModule(gm, copy_graph(gm.graph)) if is_piecewise else gm
        inputs = _JointInputs(joint_inputs, num_fwd_outputs, static, unbounded)
        planned = self._plan_graph(gm, inputs, started_s)
        if is_piecewise:
            planned = self._smallest_with_pieces(planned, whole, inputs, started_s)
        problem, compiled, _ = planned
        reporting.log_solved(compiled)
        if compiled.is_plain:
            halves = plain_modules(problem, compiled)
        else:
            halves = build_modules(
                problem, compiled, num_fwd_outputs, static or (), inductor=inductor
            )
        compiled.operations = operations
        compiled.planned_s = time.perf_counter() - started_s
        register_plan(compiled)
        self.compiled = compiled
        return halves

    def _plan_graph(
        self,
        gm: fx.GraphModule,
        inputs: _JointInputs,
        started_s: float,
        strategy: Strategy | None = None,
    ) -> _PlannedGraph:
        """Plan a joint graph, whole or in pieces. `strategy` overrides `options.strategy`."""
        capture_started_s = time.perf_counter()
        joint = self._joint_graph(gm, inputs.values, inputs.num_fwd_outputs, inputs.static)
        # The third plan of a graph keeps the kernels that Inductor generates without a plan.
        variants = find_variants(joint, baseline_only=self.rounds > 2)
        if self.split is not None:
            # Inductor may run one kernel for all pieces first; then all pieces are live at once.
            variants = [
                (joint, sort_by_dependencies(joint, groups, in_graph_order=True))
                for joint, groups in variants
            ]
        num_backward = sum(group.is_backward for group in variants[0][1])
        num_forward = len(variants[0][1]) - num_backward
        capture_s = time.perf_counter() - capture_started_s
        reporting.log_kernels(
            graph_title(self.module, self.compile_id),
            num_forward,
            num_backward,
            capture_s,
            inductor=self.options.inductor,
        )
        cost_model = KernelCostModel(joint, fused=self._has_fused_costs)
        limits = self.options.limits
        problem, compiled = plan_or_smallest(
            lambda budget: self._plan(
                variants,
                cost_model,
                inputs.unbounded,
                started_s,
                limits.with_budget(budget),
                strategy,
            ),
            limits.budget,
            # The backend tries pieces before it takes the smallest peak.
            self.options.infeasible if self.group is None else INFEASIBLE_ERROR,
            peak_bytes=lambda planned: planned[1].planned_bytes + limits.reserve_bytes,
        )
        return _PlannedGraph(problem, compiled, capture_s)

    def _may_select_pieces(self) -> bool:
        """True if the plan for "min" may have pieces. Not in later rounds: the kernels of the plan
        in pieces exceeded the peak of the plan without."""
        options = self.options
        is_first = self.group is not None and self.split is None and self.rounds == 1
        return is_first and options.limits.budget.is_min and options.split == SPLIT_AUTO

    def _smallest_with_pieces(
        self, planned: _PlannedGraph, whole: fx.GraphModule, inputs: _JointInputs, started_s: float
    ) -> _PlannedGraph:
        """Return the plan with the smallest peak: `planned`, or one with the largest operations in
        pieces. Numbers of pieces are tried while `PiecesTime` lasts."""
        title = graph_title(self.module, self.compile_id)
        smallest, selection = planned, (self.split, self.splits, self.obstacle)
        whole_bytes = planned.peak_bytes
        num_operations = _num_operations(whole)
        strategy, capture_s = self.options.strategy, planned.capture_s
        pieces_time = PiecesTime(strategy, time.perf_counter(), capture_s, num_operations)
        solves_s = 0.0
        for pieces in COMPILED_PIECES:
            try:
                split, self.splits, self.obstacle = split_joint_graph(
                    whole, inputs.num_fwd_outputs, pieces
                )
            except CannotSplit as error:
                reporting.log_not_split(title, one_line(error))
                break
            is_quick = not self.options.inductor  # Inductor schedules the kernels of a capture
            if not (is_quick or pieces_time.is_enough(_num_operations(split), solves_s)):
                reporting.log_no_time_for_pieces(title, pieces)
                break
            self.split = PlannedSplit(pieces, self.unsplit, whole_bytes)
            with suppress(InfeasibleBudget, SolverTimeout):
                attempt_started_s = time.perf_counter()
                in_pieces = self._plan_graph(
                    split, inputs, started_s, pieces_time.limited_strategy()
                )
                solves_s += time.perf_counter() - attempt_started_s - in_pieces.capture_s
                if in_pieces.peak_bytes < smallest.peak_bytes:
                    smallest = in_pieces
                    selection = (self.split, self.splits, self.obstacle)
        self.split, self.splits, self.obstacle = selection
        if smallest is not planned and self.split is not None:
            peak_bytes = smallest.peak_bytes
            reporting.log_smaller_in_pieces(title, self.split.pieces, peak_bytes, whole_bytes)
            if self.unbounded is not None:
                smallest.compiled.limit_bytes = whole_bytes
        return smallest

    def _joint_graph(
        self,
        gm: fx.GraphModule,
        joint_inputs: Sequence[object],
        num_fwd_outputs: int,
        static: list[int] | None,
    ) -> CompiledJointGraph:
        inductor = self.options.inductor
        return build_joint_graph(
            gm,
            joint_inputs,
            num_fwd_outputs,
            static,
            probe_kernels if inductor else None,
            fuse_matmul_additions if inductor else None,
            self.options.outputs,
        )

    def _build_unsplit_step(self, joint: CompiledJointGraph) -> UnsplitStep:
        """Return the step of a joint graph, without recomputation."""
        ((joint, groups), *_) = find_variants(joint, baseline_only=True)
        cost_model = KernelCostModel(joint, fused=self._has_fused_costs)
        return unsplit_step(build_problem(joint, groups, cost_model, self.options.outputs))

    def _plan(
        self,
        variants: list[Variant],
        cost_model: KernelCostModel,
        unbounded: Sequence[ScopedSymbol],
        started_s: float,
        limits: Limits,
        strategy: Strategy | None = None,
    ) -> tuple[CompileProblem, CompiledPlan]:
        """Plan the best variant for the upper bounds of its sizes.

        If sizes had no bound and the budget is in bytes, the bounds that remat added are lowered to
        the sizes of this call where larger ones do not fit.
        """
        is_fused = self.options.inductor and self._has_fused_costs
        solver = GraphSolver(
            strategy or self.options.strategy,
            None if strategy else self.options.planning_s,
            started_s,
            self.options.progress,
            cost_source=f"of {'kernels' if is_fused else 'operations'}, measured",
        )

        def problems() -> list[CompileProblem]:
            outputs = self.options.outputs
            built = [
                build_problem(joint, groups, cost_model, outputs) for joint, groups in variants
            ]
            if self.split is None:
                self.unsplit = unsplit_step(built[0])
                return built
            return [with_unsplit_step(problem, self.unsplit, self.splits) for problem in built]

        if unbounded and limits.budget.size_bytes is not None:
            with suppress(InfeasibleBudget):
                return self._plan_problems(problems(), solver, limits)
            bound_by_current_size(unbounded)
        bounded = problems()
        title = graph_title(self.module, self.compile_id)
        with explain_infeasible(bounded[0].graph, title, self.obstacle):
            return self._plan_problems(bounded, solver, limits)

    def _plan_problems(
        self, problems: Sequence[CompileProblem], solver: GraphSolver, limits: Limits
    ) -> tuple[CompileProblem, CompiledPlan]:
        """Select the best candidate for a graph. The first problem is the step that torch.compile
        would run: the baseline."""
        joint = problems[0].joint
        plain_bytes = None
        if joint.plain_halves is not None and self.split is None:  # else 100% needs a plan
            plain_bytes = inductor_baseline_peak_bytes(problems[0])
        assert self.unsplit is not None
        baseline_bytes = self.unsplit.peak_bytes
        others = saved_by_other_graphs(self.group)
        baseline = StepBaseline(
            peak_bytes=baseline_bytes + others.baseline_saved_bytes,
            saved_bytes=self.unsplit.saved_bytes,
        )
        external_bytes = others.saved_bytes
        if limits.budget.size_bytes is not None:
            external_bytes += external_memory_bytes(joint, self.options.model, others.saved_bytes)
        excess_bytes = self.feedback.excess_bytes
        limits = replace(limits, external_bytes=external_bytes, excess_bytes=excess_bytes)
        problem, plan, is_plain = CandidateSelection(
            problems,
            solver,
            limits,
            baseline,
            self.feedback,
            plain_bytes,
            offload_limits(self.options.offload, joint, others.host_bytes),
        ).select()
        if self.group is None:  # the backend calls it once the kernels of a plan are verified
            prepare_host(plan, step_device(joint))
        if self.split is not None and self.split.unsplit_min_bytes is not None:
            smallest = {UNSPLIT_MIN_BYTES_STAT: self.split.unsplit_min_bytes}
            plan = replace(plan, stats={**plan.stats, **smallest})
        available_bytes = limits.available_bytes(baseline.peak_bytes)
        budget_bytes = None if available_bytes is None else available_bytes + excess_bytes
        is_replanned = self.unbounded is not None and not is_plain
        return problem, CompiledPlan(
            plan=plan,
            budget_bytes=budget_bytes,
            limit_bytes=plain_bytes if budget_bytes is None and is_replanned else budget_bytes,
            module=self.module,
            compile_id=self.compile_id,
            baseline_bytes=baseline_bytes,
            external_bytes=external_bytes,
            primals_bytes=joint.primals_bytes,
            batch_copy_bytes=joint.batch_copy_bytes,
            group=self.group,
            rounds=self.rounds,
            baseline_saved_bytes=baseline.saved_bytes,
            is_plain=is_plain,
        )

    def discard_plan(self) -> None:
        """Remove the latest plan from the registry: its code does not run."""
        if self.compiled is not None:
            unregister_plan(self.compiled)

    def planned_split(self) -> PlannedSplit | None:
        """Return the requested pieces with the unsplit step; None if no pieces were requested, or
        the latest plan has none."""
        if self.requested_split is None or self.split is None:
            return None
        return self.split._replace(unsplit=self.unsplit)

    def uuid(self) -> str:
        """Return the key of this partitioner in torch's caches: everything that decides a plan."""
        others = saved_by_other_graphs(self.group)
        excess_bytes, separate_buffers, *flags = self.feedback
        feedback = (excess_bytes, *sorted(separate_buffers), *flags)
        pieces = 0 if self.requested_split is None else self.requested_split.pieces
        key = (self.options, self._has_fused_costs, *feedback, others, self.group is None, pieces)
        allocated = allocated_share(self.options.limits.budget.size_bytes)
        return f"remat {VERSION} {key!r} {allocated}"


def _num_operations(gm: fx.GraphModule) -> int:
    return sum(node.op == "call_function" for node in gm.graph.nodes)
