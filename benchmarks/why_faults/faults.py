"""Training scripts with one fault each.

A fault is a function; `is_fixed` applies the remedy that `remat why` names for its kind, and
nothing else. A comment `# planted: NAME` marks the line that allocates what the fault keeps, or the
line of the script that calls the model that does.
"""

from __future__ import annotations

import copy
import gc
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import nn, optim
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from benchmarks.why_faults.models import (
    TOKENS,
    CachedNet,
    Net,
    PairwiseNet,
    Recurrent,
    TwoTowers,
    batch,
    squares,
)
from remat.frontend.api.watch import Watch
from remat.snapshots.explain import Explanation
from remat.snapshots.findings import Kind

MIB = 1 << 20


@dataclass(slots=True)
class Run:
    """How a fault runs: its device, the number of steps, and whether the remedy is applied.
    `explanation` is that of the end of the last step, while the script's variables are alive."""

    watch: Watch
    device: str
    step_count: int
    is_fixed: bool
    file: str | None = None
    explanation: Explanation | None = None

    def steps(self) -> Iterator[int]:
        """Yield the numbers of the steps, and then explain the recording."""
        yield from range(self.step_count)
        if self.file is not None:
            self.watch.save(self.file)
        self.explanation = self.watch.explain()

    def named(self, model: nn.Module) -> nn.Module:
        """Move a model to the device, and record its modules."""
        model = model.to(self.device)
        self.watch.add(model)
        return model


@dataclass(frozen=True, slots=True)
class Fault:
    """A fault, and what `remat why` must say of it: the kind, the module ("" if no module is to be
    named), and a word of the remedy. `memory_bytes` is the memory of the GPU. `is_on_cpu`: the
    fault also runs with the CPU's meter. `fixed_environment` are variables of the fixed run."""

    name: str
    script: Callable[[Run], None]
    kind: Kind
    module: str
    remedy: str
    memory_bytes: int
    is_on_cpu: bool
    environment: dict[str, str] = field(default_factory=dict)
    fixed_environment: dict[str, str] = field(default_factory=dict)


FAULTS: dict[str, Fault] = {}

Script = Callable[[Run], None]


def fault(
    kind: Kind,
    remedy: str,
    module: str = "",
    memory: int = 640,
    *,
    cpu: bool = False,
    environment: dict[str, str] | None = None,
    fixed_environment: dict[str, str] | None = None,
) -> Callable[[Script], Script]:
    """Add a fault with the name of its function. `memory` is in MiB."""

    def add(script: Script) -> Script:
        FAULTS[script.__name__] = Fault(
            script.__name__,
            script,
            kind,
            module,
            remedy,
            memory * MIB,
            cpu,
            environment or {},
            environment if fixed_environment is None and environment else (fixed_environment or {}),
        )
        return script

    return add


def planted_lines(name: str) -> set[tuple[str, int]]:
    """Return the files and lines that are marked for a fault."""
    lines: set[tuple[str, int]] = set()
    for path in Path(__file__).parent.glob("*.py"):
        for number, line in enumerate(path.read_text().splitlines(), 1):
            if re.search(rf"# planted: .*\b{name}\b", line):
                lines.add((str(path), number))
    return lines


def _trained(run: Run, model: nn.Module, **options: object) -> tuple[nn.Module, optim.Optimizer]:
    model = run.named(model)
    return model, optim.AdamW(model.parameters(), **options)  # type: ignore[arg-type]


# -- leaks ----------------------------------------------------------------------------------------


@fault(Kind.KEPT_TENSORS, ".item()", "head", 480, cpu=True)
def outputs_in_a_list(run: Run) -> None:
    model, optimizer = _trained(run, Net())
    outputs: list[object] = []
    for _ in run.steps():
        output = model(batch(run.device))  # planted: outputs_in_a_list
        outputs.append(output.mean().item() if run.is_fixed else output)
        squares(output).backward()
        optimizer.step()
        optimizer.zero_grad()


@fault(Kind.KEPT_GRAPHS, "no_grad", "blocks", cpu=True)
def losses_summed_with_their_graphs(run: Run) -> None:
    model = run.named(Net(2))
    total = torch.zeros((), device=run.device)
    for _ in run.steps():
        with torch.set_grad_enabled(not run.is_fixed):
            loss = squares(model(batch(run.device)))  # planted: losses_summed_with_their_graphs
            total = total + loss


@fault(Kind.KEPT_GRAPHS, "retain_graph", "blocks", cpu=True)
def retained_graphs(run: Run) -> None:
    model, optimizer = _trained(run, Net(2))
    losses: list[torch.Tensor] = []
    for _ in run.steps():
        loss = squares(model(batch(run.device)))  # planted: retained_graphs
        loss.backward(retain_graph=not run.is_fixed)
        losses.append(loss)
        optimizer.step()
        optimizer.zero_grad()


@fault(Kind.KEPT_GRAPHS, "detach", "Recurrent", memory=240, cpu=True)
def state_not_detached(run: Run) -> None:
    model = run.named(Recurrent())
    state = batch(run.device)
    for _ in run.steps():
        output, state = model(batch(run.device), state)  # planted: state_not_detached
        squares(output).backward(retain_graph=True)
        if run.is_fixed:
            state = state.detach()
        model.zero_grad()


@fault(Kind.KEPT_TENSORS, "cpu()", "blocks.1", 400)
def hook_that_stores(run: Run) -> None:
    model, optimizer = _trained(run, Net(3))
    features: list[torch.Tensor] = []

    def store(module: nn.Module, args: object, output: torch.Tensor) -> None:
        features.append(output.detach().cpu() if run.is_fixed else output)

    model.blocks[1].register_forward_hook(store)  # type: ignore[index, union-attr]
    for _ in run.steps():
        squares(model(batch(run.device))).backward()  # planted: hook_that_stores
        optimizer.step()
        optimizer.zero_grad()


@fault(Kind.GROWING_BUFFER, "Limit the buffer", "attention", 400, cpu=True)
def cache_that_grows(run: Run) -> None:
    model, optimizer = _trained(run, CachedNet(2 if run.is_fixed else 0))
    for _ in run.steps():
        squares(model(batch(run.device))).backward()
        optimizer.step()
        optimizer.zero_grad()


@fault(Kind.KEPT_TENSORS, ".item()", memory=360, cpu=True)
def predictions_on_the_device(run: Run) -> None:
    model, optimizer = _trained(run, Net(2))
    predictions: list[object] = []
    for _ in run.steps():
        output = model(batch(run.device))
        squares(output).backward()
        with torch.no_grad():
            probabilities = output.softmax(-1)  # planted: predictions_on_the_device
        predictions.append(probabilities.mean().item() if run.is_fixed else probabilities)
        optimizer.step()
        optimizer.zero_grad()


@fault(Kind.KEPT_TENSORS, "clear", cpu=True)
def gradients_in_a_list(run: Run) -> None:
    model, optimizer = _trained(run, Net(2))
    history: list[list[torch.Tensor]] = []
    for _ in run.steps():
        squares(model(batch(run.device))).backward()
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        history.append([gradient.clone() for gradient in gradients])  # planted: gradients_in_a_list
        del gradients
        if run.is_fixed:
            history.clear()
        optimizer.step()
        optimizer.zero_grad()


@fault(Kind.KEPT_TENSORS, "clear", memory=420)
def batches_that_stay(run: Run) -> None:
    model, optimizer = _trained(run, Net(2))
    queue: list[torch.Tensor] = []
    for _ in run.steps():
        queue.append(torch.empty(2 * TOKENS, 512).to(run.device))  # planted: batches_that_stay
        squares(model(queue[-1][:TOKENS])).backward()
        if run.is_fixed:
            queue.clear()
        optimizer.step()
        optimizer.zero_grad()


@fault(Kind.KEPT_BY_BACKWARD, "Clear the list", memory=480, cpu=True)
def gradients_kept(run: Run) -> None:
    model, optimizer = _trained(run, Net(2))
    history: list[list[torch.Tensor | None]] = []
    for _ in run.steps():
        squares(model(batch(run.device))).backward()  # planted: gradients_kept
        history.append([p.grad for p in model.parameters()])
        if run.is_fixed:
            history.clear()
        optimizer.step()
        optimizer.zero_grad()


@fault(Kind.KEPT_GRAPHS, "detach", "blocks", 1000, cpu=True)
def penalties_with_their_graphs(run: Run) -> None:
    model = run.named(Net(2))
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    penalties: list[torch.Tensor] = []
    for _ in run.steps():
        x = batch(run.device).requires_grad_()
        loss = squares(model(x))  # planted: penalties_with_their_graphs
        (gradient,) = torch.autograd.grad(loss, x, create_graph=True)
        penalty = gradient.square().sum()
        penalties.append(penalty.detach() if run.is_fixed else penalty)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


# -- memory of earlier steps ----------------------------------------------------------------------


@fault(Kind.FAILED_STEP, "traceback", memory=440)
def exception_in_a_notebook(run: Run) -> None:
    model, optimizer = _trained(run, Net())
    last: BaseException | None = None
    for step in run.steps():
        try:
            output = model(batch(run.device))  # planted: exception_in_a_notebook
            if step == 3:
                raise ValueError("a batch without labels")
            squares(output).backward()
            optimizer.step()
            optimizer.zero_grad()
        except ValueError as error:
            last = None if run.is_fixed else error  # as sys.last_value in a notebook
            if run.is_fixed:
                output = None
                gc.collect()
    assert run.is_fixed or last is not None


@fault(Kind.OLD_OPTIMIZER, "Delete the old optimizer", memory=520)
def optimizer_created_twice(run: Run) -> None:
    model, optimizer = _trained(run, Net())
    schedulers: list[object] = [optimizer]
    for step in run.steps():
        if step in (4, 8):
            if run.is_fixed:
                schedulers.clear()
                del optimizer
            optimizer = optim.AdamW(model.parameters(), lr=1e-4)
            schedulers.append(optimizer)
        squares(model(batch(run.device))).backward()
        optimizer.step()  # planted: optimizer_created_twice
        optimizer.zero_grad()


@fault(Kind.GRADIENTS_NOT_FREED, "requires_grad_(False)", "tower", memory=330)
def gradients_of_a_frozen_tower(run: Run) -> None:
    model = run.named(TwoTowers())
    if run.is_fixed:
        model.tower.requires_grad_(False)  # type: ignore[union-attr]
    optimizer = optim.AdamW(model.net.parameters())  # type: ignore[union-attr]
    for step in run.steps():
        tokens = TOKENS * 9 // 8 if step >= 6 else TOKENS
        squares(model(batch(run.device, tokens))).backward()
        optimizer.step()
        optimizer.zero_grad()


@fault(Kind.GRADIENTS_NOT_FREED, "set_to_none=True", memory=445)
def gradients_that_stay(run: Run) -> None:
    model, optimizer = _trained(run, Net())
    for step in run.steps():
        tokens = TOKENS * 17 // 16 if step >= 6 else TOKENS
        squares(model(batch(run.device, tokens))).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=run.is_fixed)


# -- before the first step ------------------------------------------------------------------------


@fault(Kind.SECOND_MODEL, "CPU", memory=384)
def average_on_the_device(run: Run) -> None:
    model, optimizer = _trained(run, Net())
    average = copy.deepcopy(model)  # planted: average_on_the_device
    if run.is_fixed:
        average = average.to("cpu")
    for _ in run.steps():
        squares(model(batch(run.device))).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert average is not model


@fault(Kind.SECOND_MODEL, "CPU", memory=384)
def reference_model(run: Run) -> None:
    model, optimizer = _trained(run, Net())
    reference = Net().to("cpu" if run.is_fixed else run.device)  # planted: reference_model
    for _ in run.steps():
        squares(model(batch(run.device))).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert reference is not model


@fault(Kind.RESIDENT_DATA, "CPU's memory")
def data_on_the_device(run: Run) -> None:
    model, optimizer = _trained(run, Net())
    data = [torch.empty(TOKENS, 512) for _ in range(80)]
    if not run.is_fixed:
        data = [item.to(run.device) for item in data]  # planted: data_on_the_device
    for _, item in zip(run.steps(), data, strict=False):
        squares(model(item.to(run.device))).backward()
        optimizer.step()
        optimizer.zero_grad()


# -- the step -------------------------------------------------------------------------------------


@fault(Kind.EVALUATION, "no_grad", memory=400)
def evaluation_with_gradients(run: Run) -> None:
    model, optimizer = _trained(run, Net())
    for step in run.steps():
        squares(model(batch(run.device, TOKENS // 2))).backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 4 == 3:
            with torch.set_grad_enabled(not run.is_fixed):
                squares(model(batch(run.device, 2 * TOKENS)))  # planted: evaluation_with_gradients


@fault(Kind.LARGER_BATCH, "Limit a batch", memory=480)
def one_larger_batch(run: Run) -> None:
    model, optimizer = _trained(run, Net())
    for step in run.steps():
        tokens = 2 * TOKENS if step == 7 and not run.is_fixed else TOKENS
        x = torch.empty(tokens, 512, device=run.device)  # planted: one_larger_batch
        squares(model(x)).backward()
        optimizer.step()
        optimizer.zero_grad()


@fault(Kind.SEVERAL_FORWARDS, "backward() for each", memory=700)
def losses_of_micro_batches_summed(run: Run) -> None:
    model, optimizer = _trained(run, Net())
    for _ in run.steps():
        losses: list[torch.Tensor] = []
        for _ in range(4):
            loss = squares(model(batch(run.device)))  # planted: losses_of_micro_batches_summed
            if run.is_fixed:
                (loss / 4).backward()
            else:
                losses.append(loss)
        if losses:
            torch.stack(losses).mean().backward()
        optimizer.step()
        optimizer.zero_grad()


@fault(Kind.ONE_LINE, "in pieces", "PairwiseNet", memory=256)
def tensor_of_all_pairs(run: Run) -> None:
    model, optimizer = _trained(run, PairwiseNet(16 if run.is_fixed else 1))
    for _ in run.steps():
        model(batch(run.device)).backward()
        optimizer.step()
        optimizer.zero_grad()


@fault(Kind.LOSS, "chunks", memory=760)
def logits_in_float32(run: Run) -> None:
    model = run.named(Net(1, classes=32768).to(torch.bfloat16))
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    for _ in run.steps():
        x = batch(run.device).bfloat16()
        labels = torch.zeros(TOKENS, dtype=torch.int64, device=run.device)
        if run.is_fixed:
            hidden = model._run_blocks(x, 0, 1)  # type: ignore[operator]
            for part, some in zip(hidden.chunk(8), labels.chunk(8), strict=True):
                loss = checkpoint(
                    lambda h, y: functional.cross_entropy(model.head(h).float(), y),  # type: ignore[operator]
                    part,
                    some,
                    use_reentrant=False,
                )
                (loss / 8).backward(retain_graph=True)
        else:
            logits = model(x)
            logits = logits.float()  # planted: logits_in_float32
            loss = functional.cross_entropy(logits, labels)  # planted: logits_in_float32
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()


@fault(Kind.RECOMPUTATION, "smaller regions", "blocks", memory=500)
def checkpoints_too_long(run: Run) -> None:
    model = run.named(Net(8, segment=1 if run.is_fixed else 8))
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    for _ in run.steps():
        squares(model(batch(run.device))).backward()
        optimizer.step()
        optimizer.zero_grad()


@fault(Kind.OPTIMIZER_STEP, "foreach=False", memory=600)
def peak_in_the_optimizer(run: Run) -> None:
    model, optimizer = _trained(run, Net(14), **({"foreach": False} if run.is_fixed else {}))
    for _ in run.steps():
        squares(model(batch(run.device, 64))).backward()
        optimizer.step()  # planted: peak_in_the_optimizer
        optimizer.zero_grad()


@fault(Kind.OPTIMIZER_STATE, "SGD with momentum", memory=600)
def state_that_does_not_fit(run: Run) -> None:
    model = run.named(Net(18))
    optimizer: optim.Optimizer = optim.AdamW(model.parameters(), foreach=False)
    if run.is_fixed:
        optimizer = optim.SGD(model.parameters(), lr=0.1, momentum=0.9, foreach=False)
    for _ in run.steps():
        squares(model(batch(run.device, 64))).backward()
        optimizer.step()  # planted: state_that_does_not_fit
        optimizer.zero_grad()


@fault(Kind.STEP, "gradient accumulation", "blocks", memory=480)
def batch_too_large(run: Run) -> None:
    model, optimizer = _trained(run, Net(4))
    parts = 4 if run.is_fixed else 1
    for _ in run.steps():
        for _ in range(parts):
            x = batch(run.device, 2 * TOKENS // parts)
            squares(model(x)).backward()  # planted: batch_too_large
        optimizer.step()
        optimizer.zero_grad()


# -- the allocator and the device -----------------------------------------------------------------


@fault(
    Kind.FRAGMENTS,
    "expandable_segments",
    memory=340,
    fixed_environment={"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"},
)
def lengths_that_grow(run: Run) -> None:
    # A tensor that stays is placed in the segment of a longer one that was freed: the rest of that
    # segment is too short for the next, longer tensor.
    stored: list[torch.Tensor] = []
    for step in range(8):
        torch.empty((10 + step // 2) * MIB, device=run.device)  # planted: lengths_that_grow
        stored.append(torch.empty(25 * MIB // 4, device=run.device))
    for step in run.steps():
        size = (15 + min(step, 4)) * MIB
        length = torch.empty(size, device=run.device)  # planted: lengths_that_grow
        del length


@fault(
    Kind.OTHER_PROCESS,
    "End the other process",
    memory=640,
    environment={"REMAT_SOFTWARE_GPU_OTHER_BYTES": str(320 * MIB)},
    fixed_environment={"REMAT_SOFTWARE_GPU_OTHER_BYTES": "0"},
)
def another_process(run: Run) -> None:
    model, optimizer = _trained(run, Net())
    for _ in run.steps():
        squares(model(batch(run.device))).backward()
        optimizer.step()
        optimizer.zero_grad()


@fault(Kind.OTHER_STREAM, "record_stream", memory=450)
def buffers_of_a_side_stream(run: Run) -> None:
    model, optimizer = _trained(run, Net())
    side = torch.cuda.current_stream() if run.is_fixed else torch.cuda.Stream()
    with torch.cuda.stream(side):
        staging: list[torch.Tensor] = []
        for _ in range(12):
            staging.append(torch.empty(9 * MIB, dtype=torch.uint8, device=run.device))
            staging.append(torch.empty(3 * MIB // 2, dtype=torch.uint8, device=run.device))
        side.synchronize()
        del staging[::2]  # the small ones stay, and with them the segments of the side stream
    for _ in run.steps():
        squares(model(batch(run.device))).backward()
        optimizer.step()
        optimizer.zero_grad()


@fault(Kind.OTHER_POOL, "pools", memory=500)
def memory_of_another_pool(run: Run) -> None:
    model, optimizer = _trained(run, Net())
    pool = torch.cuda.MemPool()
    with torch.cuda.use_mem_pool(pool):
        tensors = [torch.empty(40 * MIB, dtype=torch.uint8, device=run.device) for _ in range(4)]
        del tensors
    if run.is_fixed:
        del pool
    for _ in run.steps():
        squares(model(batch(run.device))).backward()
        optimizer.step()
        optimizer.zero_grad()
