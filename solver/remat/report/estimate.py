"""`Estimate`: the memory of a training step, predicted before it runs.

It is computed from a `Trace` alone: the sizes of its tensors and the order of its operations.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from math import prod

from remat.documents.trace import Trace, accumulated_gradient_bytes, trained_parameters
from remat.errors import BudgetError
from remat.graph import Value
from remat.limits.budget import Budget
from remat.limits.units import format_bytes, format_seconds
from remat.report.eager_step import eager_graph, value_of_storage, with_eager_masks
from remat.report.report import (
    Described,
    Fact,
    Report,
    Table,
    facts_of_lines,
    facts_of_parts,
    fold_layer_numbers,
    largest_rows,
)
from remat.schedule import Schedule
from remat.simulate import simulate
from remat.strategies.baselines.quick import quick_baseline_schedules

_MAX_ROWS = 12


@dataclass(frozen=True, slots=True)
class ModuleActivations:
    """The bytes and the number of the activations of a module that are live at the peak. `module`
    is its path, or "" for values without a module."""

    module: str
    size_bytes: int
    value_count: int


@dataclass(frozen=True)
class Estimate(Described):
    """The peak of a training step in eager mode, forward and backward, and its parts.

    `peak_bytes` is the sum of what is live at the peak: parameters, buffers (and constants of the
    code), inputs, libraries (cuBLAS), finished gradients of parameters, the model's outputs,
    activations (saved for the backward, or being computed) and gradients of activations. If the
    step accumulates gradients, the existing `.grad` tensors are gradients of parameters, too.
    `baseline_peak_bytes` is the peak without recomputation in the sense of plans. It differs for
    dropout on the CPU, whose mask is a float tensor in eager mode (4 bytes per element in float32)
    and a boolean mask in a captured step (1 byte), and for products, whose saved factors autograd
    retains until both gradients are computed, where a plan frees each once it was read, and for
    the gradients of a tensor that is used several times, which autograd adds in place.

    `all_gradient_bytes` are the gradients that exist after the step. `reachable_peak_bytes` is a
    peak that quick baselines reach by recomputation; the solver reaches it, or a lower one.
    `adam_bytes` are Adam's two moments in float32, `reserve_bytes` the bytes that are reserved for
    other uses; neither is part of the peak. `gpu` names the data sheet of the GPU, or is "".
    `activations_by_module` lists the modules with live activations at the peak, largest first.
    `time_s` is the total time of the operations without recomputation, by the costs of
    `cost_source`.

    On CUDA the workspaces of torch's kernels count, as their formulas give them
    (`remat.costs.workspaces`). Not counted, because unknown before the step runs: cuDNN's
    workspaces, fragmentation of the allocator, allocations of an optimizer or of a loss outside the
    model, and tensors that local variables of the model's code keep alive after their last use (2%
    of a small U-Net's peak). A sum in the backward of a custom function that the model itself
    calls, outside of all submodules, is taken for one of autograd's.
    If a backward formula runs several kernels (that of a power, for example), autograd retains
    their intermediates to the end of the formula; the estimate, like plans, counts each until it
    was read. The `checkpoint_count` calls of `torch.utils.checkpoint` in the model's code are left
    out: the real peak of such a step is lower, and `remat.fit` predicts it.

    Measured on the CPU, the peaks of GPT-2, Llama, BERT, T5, ViT, ResNet and U-Net are within 3% of
    the estimate, five of them within 0.01%.
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
    checkpoint_count: int = 0

    @classmethod
    def of(cls, trace: Trace) -> Estimate:
        """Return the estimate for a trace with costs, which matter for `time_s` only."""
        captured = trace.graph()
        baseline_bytes = simulate(captured, Schedule.keep_all(captured)).peak_bytes
        baseline_peaks = [
            simulate(captured, schedule).peak_bytes
            for schedule in quick_baseline_schedules(captured)
        ]
        eager = with_eager_masks(trace)
        graph = eager_graph(eager)
        timeline = simulate(graph, Schedule.keep_all(graph))
        run = timeline.peak_run
        operation = graph.operations[run]
        value_of = value_of_storage(eager, graph)
        gradients = {value_of.get(eager.storage_of[g.name]) for g in eager.gradients}
        outputs = {value_of.get(eager.storage_of[o.name]) for o in eager.outputs}
        parts: dict[str, int] = defaultdict(int)
        sizes_by_module: dict[str, list[int]] = defaultdict(list)
        freed = {copy.value for copy in timeline.copies if copy.end == run}
        overwritten = freed.intersection(operation.overwrites)
        for v in sorted({*timeline.live(run)} - overwritten):
            size = graph.values[v].size_bytes
            producer = graph.operations[graph.producer[v]]
            if v in outputs:
                parts["outputs"] += size
            elif v in gradients:
                parts["gradients"] += size
            elif producer.backward:
                parts["activation gradients"] += size
            else:
                parts["activations"] += size
                sizes_by_module[producer.module].append(size)
        largest = max(graph.values, key=lambda value: value.size_bytes, default=Value("", 0))
        placeholder_bytes = eager.placeholder_bytes()
        if eager.accumulates_gradients:
            parts["gradients"] += accumulated_gradient_bytes(eager)
        return cls(
            model=trace.model,
            device=trace.device,
            gpu=trace.gpu,
            peak_bytes=timeline.peak_bytes,
            parameter_bytes=placeholder_bytes["parameter"],
            buffer_bytes=placeholder_bytes["buffer"] + placeholder_bytes["constant"],
            input_bytes=placeholder_bytes["input"],
            library_bytes=trace.library_bytes,
            gradient_bytes=parts["gradients"],
            output_bytes=parts["outputs"],
            activation_bytes=parts["activations"],
            activation_gradient_bytes=parts["activation gradients"] + operation.workspace_bytes,
            baseline_peak_bytes=baseline_bytes,
            reachable_peak_bytes=min(baseline_peaks, default=baseline_bytes),
            all_gradient_bytes=sum(
                graph.values[v].size_bytes for v in gradients - outputs if v is not None
            ),
            adam_bytes=_adam_bytes(trace),
            largest_value=largest.name,
            largest_value_bytes=largest.size_bytes,
            peak_operation=operation.name,
            peak_module=operation.module,
            is_peak_backward=operation.backward,
            time_s=sum(operation.cost_s for operation in captured.operations),
            cost_source=trace.cost_source,
            checkpoint_count=len({node.checkpoint for node in trace.nodes if node.checkpoint}),
            activations_by_module=tuple(
                sorted(
                    (
                        ModuleActivations(name, sum(sizes), len(sizes))
                        for name, sizes in sizes_by_module.items()
                    ),
                    key=lambda activations: (-activations.size_bytes, activations.module),
                )
            ),
        )

    def fits(self, budget: int | str) -> bool:
        """Return True if the step fits without recomputation and leaves `reserve_bytes` free.

        `budget` is bytes, or a string such as "8GiB". Raises `BudgetError`, also for a budget that
        is no number of bytes ("60%", "min").
        """
        parsed = Budget.parse(budget)
        if parsed.share is not None:
            raise BudgetError(
                f"the budget {budget!r} is a share of the peak, which always fits or never does; "
                'pass bytes, such as "8GiB"'
            )
        if parsed.size_bytes is None:
            raise BudgetError(
                f'the budget {budget!r} is no number of bytes; pass bytes, such as "8GiB"'
            )
        return self.peak_bytes + self.reserve_bytes <= parsed.size_bytes

    def report(self) -> Report:
        """Return the peak, its parts and its operation, the modules with the most activations
        there, and what is not part of the peak."""
        phase = "backward" if self.is_peak_backward else "forward"
        module = f", {self.peak_module}" if self.peak_module else ""
        device = f"{self.device} ({self.gpu})" if self.gpu else self.device
        parts_bytes = {
            "parameters": self.parameter_bytes,
            "buffers": self.buffer_bytes,
            "inputs": self.input_bytes,
            "libraries": self.library_bytes,
            "gradients": self.gradient_bytes,
            "outputs": self.output_bytes,
            "activations": self.activation_bytes,
            "activation gradients": self.activation_gradient_bytes,
        }
        reachable = "no lower peak by a quick baseline; the solver may reach one"
        if self.reachable_peak_bytes < self.baseline_peak_bytes:
            reachable = f"{format_bytes(self.reachable_peak_bytes)} or less by recomputation"
        place = f"{self.peak_operation} ({phase}{module})"
        facts = [
            Fact("estimate", f"{self.model} on {device}; nothing was run"),
            Fact(
                "peak",
                f"{format_bytes(self.peak_bytes)} without recomputation, in {place}; of this",
            ),
            *facts_of_parts(parts_bytes, self.peak_bytes),
            Fact(
                "largest",
                f"{format_bytes(self.largest_value_bytes)}, {self.largest_value or 'no value'}",
            ),
            Fact("reachable", reachable),
        ]
        if self.device != "cpu":  # there is no data sheet of the CPU
            text = (
                f"{format_seconds(self.time_s)} without recomputation, by {self.cost_source}; "
                "attainable rates, not measured"
            )
            facts.append(Fact("time", text))
        if self.baseline_peak_bytes != self.peak_bytes:
            text = (
                f"start from {format_bytes(self.baseline_peak_bytes)}: they free the operands of a "
                "product earlier than autograd,"
            )
            more = "and allocate each sum of gradients; if there is dropout on the CPU, its masks "
            facts += facts_of_lines("plans", [text, f"{more}are smaller"])
        moments = f"{format_bytes(self.adam_bytes)} more for Adam's moments in float32"
        facts.append(Fact("optimizer", moments))
        if self.reserve_bytes:
            total = format_bytes(self.peak_bytes + self.reserve_bytes)
            reserved = f"{format_bytes(self.reserve_bytes)}; with the peak {total}"
            facts.append(Fact("reserved", reserved))
        # Only cuDNN knows its workspaces.
        unknown = "workspaces inside kernels" if self.device == "cpu" else "cuDNN's workspaces"
        excluded = [f"{unknown}, the allocator's fragmentation, a loss outside the model"]
        if self.checkpoint_count:
            count = f"{self.checkpoint_count:,} checkpoints in the model's code"
            excluded.append(f"{count}: remat.fit includes them")
        facts += facts_of_lines("excluded", excluded)
        return Report(facts, self._activation_table() if self.activations_by_module else "")

    def _activation_table(self) -> Table:
        """Return a table of the activations at the peak by module. Layers that differ only in their
        number share a line."""
        sums: dict[str, list[int]] = defaultdict(lambda: [0, 0])
        for activations in self.activations_by_module:
            module_sums = sums[fold_layer_numbers(activations.module)]
            module_sums[0] += activations.size_bytes
            module_sums[1] += activations.value_count
        total = max(1, self.activation_bytes)
        rows = [
            (name, format_bytes(size), f"{size / total:.1%}", str(value_count))
            for name, (size, value_count) in largest_rows(sums, _MAX_ROWS)
        ]
        return Table([("activations at the peak", "bytes", "share", "values"), *rows])


def _adam_bytes(trace: Trace) -> int:
    """Return the bytes of Adam's state: two moments in float32 for each element of a trained
    parameter."""
    return sum(8 * prod(p.tensor.shape) for p in trained_parameters(trace))
