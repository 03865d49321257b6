"""`Estimate`: what a training step takes before any of it has run, and what holds it.

Computed from a `Trace` alone: the sizes of its tensors and the order of its operations.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from math import prod

from remat.costs.roofline import item_bytes
from remat.documents.arguments import Ref
from remat.documents.trace import Trace, trained_parameters
from remat.errors import BudgetError
from remat.graph import Graph
from remat.limits.budget import Budget
from remat.limits.units import format_bytes, format_seconds
from remat.report.tables import align_columns, largest_rows, fold_layer_numbers
from remat.schedule import Schedule
from remat.simulate import Timeline, simulate
from remat.strategies.search.steps.baselines import quick_baseline_schedules

_ROWS = 12
_DROPOUT = "aten.native_dropout_backward.default"  # both ways; see `capture.eager_kernels.dropout`


@dataclass(frozen=True, slots=True)
class ModuleActivations:
    """A module, by path ("" where a value has none), and the activations that it holds at the
    peak."""

    module: str
    size_bytes: int
    values: int


@dataclass(frozen=True)
class Estimate:
    """The peak of a training step in eager mode, forward and backward, and its parts.

    `peak_bytes` is the sum of the parts below it, all as they are at the peak: parameters, buffers
    (constants of the code included), inputs, libraries (cuBLAS), gradients that are done, the
    model's outputs, activations (kept for the backward, or being computed) and gradients passing
    through. `baseline_peak_bytes` is what plans call the peak without recomputation: the same but
    for dropout on the CPU, where eager mode keeps masks as numbers (4 bytes each in float32) and
    a captured step as truth values (1 byte).

    `all_gradient_bytes` are there after the step. `reachable_peak_bytes` is a peak that quick baselines
    reach by recomputation; the solver goes as low or lower. `adam_bytes` is what Adam's two moments
    in float32 add, `reserve_bytes` what was reserved for others; neither is part of the peak.
    `gpu` names the data sheet of the GPU, "" where none is known.
    `activations_by_module` are the modules whose activations are live at the peak, the largest first. `time_s` is
    what the operations take together, without recomputation, by the costs of `cost_source`.

    Not known before a step runs, and not counted: workspaces inside kernels (cuDNN, attention),
    fragmentation of the allocator, and what a loss outside of the model or an optimiser allocates.
    Where a backward formula takes several kernels (that of a power, say), autograd holds what lies
    between them to the end of the formula; this counts it until it was read, as plans do.
    `torch.utils.checkpoint` in the model's own code is looked through, as in every capture: such a
    step really takes less. Other models' peaks, as measured on the CPU, are within 3% of it (GPT-2,
    Llama, BERT, T5, ViT, ResNet, U-Net; five of them within 0.01%).
    """

    model: str
    device: str
    peak_bytes: int
    parameter_bytes: int
    buffer_bytes: int
    input_bytes: int
    library_bytes: int
    gradient_bytes: int
    output_bytes: int
    activation_bytes: int
    activation_gradient_bytes: int
    baseline_peak_bytes: int
    reachable_peak_bytes: int
    all_gradient_bytes: int
    adam_bytes: int
    largest_value: str
    largest_value_bytes: int
    peak_operation: str
    peak_module: str
    is_peak_backward: bool
    time_s: float
    cost_source: str
    activations_by_module: tuple[ModuleActivations, ...]
    reserve_bytes: int = 0
    gpu: str = ""

    @classmethod
    def of(cls, trace: Trace) -> Estimate:
        """The estimate for a trace with costs (any, but for `time_s`)."""
        captured = trace.graph()
        baseline_bytes = simulate(captured, Schedule.keep_all(captured)).peak_bytes
        quick = [
            simulate(captured, schedule).peak_bytes
            for schedule in quick_baseline_schedules(captured, None, lambda: False)
        ]
        eager = _with_eager_masks(trace)
        timeline = _kept(eager)
        graph = eager.graph()
        run = timeline.peak_run
        operation = graph.operations[run]
        value_of = _values(eager, graph)
        gradients = {value_of.get(eager.storage_of[g.name]) for g in eager.gradients}
        outputs = {value_of.get(eager.storage_of[o.name]) for o in eager.outputs}
        parts: dict[str, int] = defaultdict(int)
        activations_by_module: dict[str, list[int]] = defaultdict(list)
        for v in timeline.live(run):
            size = graph.values[v].size_bytes
            maker = graph.operations[graph.producer[v]]
            if v in outputs:
                parts["outputs"] += size
            elif v in gradients:
                parts["gradients"] += size
            elif maker.backward:
                parts["passing"] += size
            else:
                parts["activations"] += size
                activations_by_module[maker.module].append(size)
        largest_rows = max(graph.values, key=lambda value: value.size_bytes)
        owned = _owned_bytes(eager)
        return cls(
            model=trace.model,
            device=trace.device,
            gpu=trace.gpu,
            peak_bytes=timeline.peak_bytes,
            parameter_bytes=owned["parameter"],
            buffer_bytes=owned["buffer"] + owned["constant"],
            input_bytes=owned["input"],
            library_bytes=trace.library_bytes,
            gradient_bytes=parts["gradients"],
            output_bytes=parts["outputs"],
            activation_bytes=parts["activations"],
            activation_gradient_bytes=parts["passing"] + operation.workspace_bytes,
            baseline_peak_bytes=baseline_bytes,
            reachable_peak_bytes=min(quick, default=baseline_bytes),
            all_gradient_bytes=sum(
                graph.values[v].size_bytes for v in gradients - outputs if v is not None
            ),
            adam_bytes=_adam_bytes(trace),
            largest_value=largest_rows.name,
            largest_value_bytes=largest_rows.size_bytes,
            peak_operation=operation.name,
            peak_module=operation.module,
            is_peak_backward=operation.backward,
            time_s=sum(each.cost_s for each in captured.operations),
            cost_source=trace.cost_source,
            activations_by_module=tuple(
                sorted(
                    (
                        ModuleActivations(name, sum(sizes), len(sizes))
                        for name, sizes in activations_by_module.items()
                    ),
                    key=lambda holder: (-holder.size_bytes, holder.module),
                )
            ),
        )

    def fits(self, budget: int | str) -> bool:
        """Whether the step fits without recomputation, and leaves `reserve_bytes`. `budget` is
        bytes, or a string such as "8GiB". Raises `BudgetError`, also for what is no number of bytes
        ("60%", "min")."""
        asked = Budget.parse(budget)
        if asked.share is not None:
            raise BudgetError(
                f"the budget {budget!r} is a share of the peak, which always fits or never does; "
                'pass bytes, such as "8GiB"'
            )
        if asked.size_bytes is None:
            raise BudgetError(f'the budget {budget!r} is no number of bytes; pass "8GiB", say')
        return self.peak_bytes + self.reserve_bytes <= asked.size_bytes

    def describe(self) -> str:
        """A table: the peak, its parts, where it is, who holds it, and what is not part of it."""
        at = "backward" if self.is_peak_backward else "forward"
        module = f", {self.peak_module}" if self.peak_module else ""
        whole = max(1, self.peak_bytes)
        place = f"{self.device} ({self.gpu})" if self.gpu else self.device
        parts = (
            ("parameters", self.parameter_bytes),
            ("buffers", self.buffer_bytes),
            ("inputs", self.input_bytes),
            ("libraries", self.library_bytes),
            ("gradients", self.gradient_bytes),
            ("outputs", self.output_bytes),
            ("activations", self.activation_bytes),
            ("passing gradients", self.activation_gradient_bytes),
        )
        lines = [
            f"estimate  {self.model} on {place}; nothing was run",
            f"peak      {format_bytes(self.peak_bytes)} without recomputation, in "
            f"{self.peak_operation} ({at}{module}); of this",
            *(
                f"          {name:<18}{format_bytes(size):>10}  {size / whole:>6.1%}"
                for name, size in parts
                if size
            ),
            f"largest   {format_bytes(self.largest_value_bytes)}, {self.largest_value}",
            f"less      {self._less()}",
        ]
        if self.device != "cpu":  # where the roofline is that of a data sheet
            lines.append(
                f"time      {format_seconds(self.time_s)} without recomputation, by "
                f"{self.cost_source}; attainable rates, not measured"
            )
        if self.baseline_peak_bytes != self.peak_bytes:
            lines.append(
                f"plans     begin from {format_bytes(self.baseline_peak_bytes)}: on the CPU, eager "
                "mode keeps the masks of dropout in a wider type than they do"
            )
        lines += [
            f"beside    Adam's moments: {format_bytes(self.adam_bytes)} in float32",
            *self._reserve(),
            "unknown   workspaces inside kernels, the allocator's fragmentation, a loss outside of "
            "the model",
        ]
        if self.activations_by_module:
            lines += ["", *self._table()]
        return "\n".join(lines)

    def _reserve(self) -> list[str]:
        if not self.reserve_bytes:
            return []
        both = format_bytes(self.peak_bytes + self.reserve_bytes)
        return [f"reserved  {format_bytes(self.reserve_bytes)}; with the peak {both}"]

    def _less(self) -> str:
        if self.reachable_peak_bytes < self.baseline_peak_bytes:
            return f"{format_bytes(self.reachable_peak_bytes)} or less by recomputation"
        return "no quick way of recomputation lowers it"

    def _table(self) -> list[str]:
        """Activations at the peak by module; layers of the same name but for their number share a
        line."""
        sums: dict[str, list[int]] = defaultdict(lambda: [0, 0])
        for holder in self.activations_by_module:
            found = sums[fold_layer_numbers(holder.module)]
            found[0] += holder.size_bytes
            found[1] += holder.values
        whole = max(1, self.activation_bytes)
        rows = [
            (name, format_bytes(size), f"{size / whole:.1%}", str(values))
            for name, (size, values) in largest_rows(sums, _ROWS)
        ]
        return align_columns([("activations at the peak", "bytes", "share", "values"), *rows])

    def __str__(self) -> str:
        return self.describe()


def eager_peak_bytes(trace: Trace) -> int:
    """The peak of the step in eager mode: `Estimate.peak_bytes` without its parts."""
    return _kept(_with_eager_masks(trace)).peak_bytes


def _kept(trace: Trace) -> Timeline:
    graph = trace.graph()
    return simulate(graph, Schedule.keep_all(graph))


def _with_eager_masks(trace: Trace) -> Trace:
    """The trace with dropout's masks as eager mode keeps them on the CPU: not as bool, but scaled,
    in the type of what they are multiplied with."""
    if trace.device.partition(":")[0] != "cpu":
        return trace
    storages = list(trace.storage_bytes)
    for node in trace.nodes:
        mask = node.args[1] if node.target == _DROPOUT and not node.backward else None
        if isinstance(mask, Ref):
            dropped = node.results[0].tensor
            storages[trace.storage_of[mask.name]] = prod(dropped.shape) * item_bytes(dropped.dtype)
    return trace.replace(storage_bytes=tuple(storages))


def _values(trace: Trace, graph: Graph) -> dict[int, int]:
    """The value of each storage that is no constant memory."""
    index = {value.name: v for v, value in enumerate(graph.values)}
    return {storage: index[name] for name, storage in trace.storage_of.items() if name in index}


def _owned_bytes(trace: Trace) -> dict[str, int]:
    """Bytes that are there before the step, by kind of placeholder; shared storages count once."""
    owned: dict[str, int] = defaultdict(int)
    seen: set[int] = set()
    for placeholder in trace.placeholders:
        if placeholder.kind != "tangent" and placeholder.storage not in seen:
            seen.add(placeholder.storage)
            owned[placeholder.kind] += trace.allocated_bytes(placeholder.storage)
    return owned


def _adam_bytes(trace: Trace) -> int:
    """Two moments in float32 for every element of a parameter that gets a gradient."""
    return sum(8 * prod(p.tensor.shape) for p in trained_parameters(trace))
