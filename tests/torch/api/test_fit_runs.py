"""`remat.fit` for what training loops do already, against loops that run."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest
import torch
from benchmarks.models.workloads import DenoisingLoss
from benchmarks.software_gpu.families import build
from tests.helpers.training.optimizers import Make, of_bitsandbytes, of_torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    apply_activation_checkpointing,
    checkpoint_wrapper,
)
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    checkpoint_sequential,
    create_selective_checkpoint_contexts,
)

import remat
from remat.errors import RematError
from remat.fitting.answer import fit_trace
from remat.frontend.memory.meter import LiveStorageMeter, unique_bytes

TOLERANCE = 0.005

Model = tuple[nn.Module, dict[str, torch.Tensor]]


class Block(nn.Module):
    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.nn.functional.gelu(self.up(self.norm(x))))


class Stack(nn.Module):
    """Six blocks, which `run` calls."""

    def __init__(
        self,
        run: Callable[[nn.ModuleList, torch.Tensor], torch.Tensor],
        make: Callable[[], nn.Module] = Block,
    ) -> None:
        super().__init__()
        self.blocks, self.run = nn.ModuleList(make() for _ in range(6)), run

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.run(self.blocks, x).square().mean()


def stack(
    run: Callable[[Any, torch.Tensor], torch.Tensor], make: Callable[[], nn.Module] = Block
) -> Model:
    torch.manual_seed(0)
    return Stack(run, make), {"x": torch.randn(512, 64)}


def in_turn(blocks: nn.ModuleList, x: torch.Tensor) -> torch.Tensor:
    for block in blocks:
        x = block(x)
    return x


def some(blocks: nn.ModuleList, x: torch.Tensor) -> torch.Tensor:
    for number, block in enumerate(blocks):
        x = checkpoint(block, x, use_reentrant=False) if number < 4 else block(x)
    return x


def nested(blocks: nn.ModuleList, x: torch.Tensor) -> torch.Tensor:
    def pair(first: nn.Module, second: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return second(checkpoint(first, x, use_reentrant=False))

    for number in range(0, 6, 2):
        x = checkpoint(pair, blocks[number], blocks[number + 1], x, use_reentrant=False)
    return x


@dataclass
class Outputs:
    loss: torch.Tensor
    states: list[torch.Tensor]


class WithStates(nn.Module):
    """Eight blocks whose results are outputs as well."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(8))

    def forward(self, x: torch.Tensor) -> Outputs:
        states = [x := block(x) for block in self.blocks]
        return Outputs(x.square().mean(), states)


def with_states() -> Model:
    torch.manual_seed(0)
    return WithStates(), {"x": torch.randn(512, 64)}


def sequential(blocks: nn.ModuleList, x: torch.Tensor) -> torch.Tensor:
    return checkpoint_sequential(list(blocks), 3, x, use_reentrant=False)


class Gated(nn.Module):
    """Three linear layers with a gate: the last one is saved by selective checkpoints, and only an
    addition reads it."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(width, 4 * width), nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.nn.functional.silu(self.gate(x)) * self.up(x))


class ShiftedLoss(nn.Module):
    """A loss as transformers had it before 4.50: local variables refer to the logits, and to wide
    ones, while the loss of a copy is computed."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(512, 64), nn.Linear(64, 512, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        logits = self.head(self.embedding(ids))
        wide = logits.double()
        shifted = wide[:, :-1].contiguous()
        return nn.functional.cross_entropy(shifted.view(-1, 512), ids[:, 1:].reshape(-1)).float()


class Padded(nn.Module):
    """A layer whose result is copied into columns of zeros: autograd saves the result, of which
    the backward reads the shape only."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(3 * width, width)
        self.columns = nn.Buffer(torch.arange(2 * width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        up = self.up(x)
        zeros = up.new_zeros(len(x), 3 * x.shape[1])
        return x + self.down(zeros.index_copy(1, self.columns, up))


def shifted_loss() -> Model:
    torch.manual_seed(0)
    return ShiftedLoss(), {"ids": torch.randint(512, (4, 64))}


_MATMULS = (torch.ops.aten.addmm.default, torch.ops.aten.mm.default)


def every_second_matmul() -> Callable[..., CheckpointPolicy]:
    """Return a policy that saves the result of the first of every two matmuls, as torchtitan."""
    counts = [0, 0]

    def policy(context: Any, func: Any, *args: object, **kwargs: object) -> CheckpointPolicy:
        if func not in _MATMULS:
            return CheckpointPolicy.PREFER_RECOMPUTE
        counts[context.is_recompute] += 1
        is_saved = counts[context.is_recompute] % 2 == 1
        return CheckpointPolicy.MUST_SAVE if is_saved else CheckpointPolicy.PREFER_RECOMPUTE

    return policy


def all_matmuls() -> Any:
    return create_selective_checkpoint_contexts(list(_MATMULS))


def selective(
    blocks: nn.ModuleList,
    x: torch.Tensor,
    *,
    contexts: Callable[[], Any] = lambda: create_selective_checkpoint_contexts(
        every_second_matmul()
    ),
) -> torch.Tensor:
    for block in blocks:
        x = checkpoint(block, x, use_reentrant=False, context_fn=contexts)
    return x


def wrapped(select: Callable[[int], bool] = lambda number: True) -> Model:
    model, batch = stack(in_turn)
    assert isinstance(model, Stack)
    chosen = {id(block) for number, block in enumerate(model.blocks, 1) if select(number)}
    apply_activation_checkpointing(
        model,
        checkpoint_wrapper_fn=partial(checkpoint_wrapper),
        check_fn=lambda module: id(module) in chosen,
    )
    return model, batch


def without(name: str) -> Model:
    """Return a family without its mask, on whose values transformers branches in eager mode."""
    model, batch = build(name, "float32", "cpu")
    batch.pop("attention_mask", None)
    return model, batch


def family(name: str, *, use_reentrant: bool = False) -> Model:
    model, batch = without(name)
    if isinstance(model, DenoisingLoss):
        model.unet.enable_gradient_checkpointing()
    else:
        enable = getattr(model, "activation_checkpointing_enable", None)
        enable = enable or model.gradient_checkpointing_enable  # of transformers before 5
        enable({"use_reentrant": use_reentrant})
    return model, batch


@dataclass(frozen=True)
class Run:
    """A loop; the model and the options that `remat.fit` takes, by default the loop's model."""

    make: Callable[[], Model]
    described: Callable[[], Model] | None = None
    options: dict[str, Any] = field(default_factory=dict)
    tolerance: float = TOLERANCE


# Tolerances above the default: of nested checkpoints the outermost counts; a reentrant one keeps
# the result of its region and its gradient; and a variable of BERT's code keeps the output of a
# dropout alive while its block is recomputed.
RUNS = {
    "some blocks": Run(partial(stack, some)),
    "nested": Run(partial(stack, nested), tolerance=0.25),
    "sequential": Run(partial(stack, sequential)),
    "selective": Run(partial(stack, selective)),
    "wrapped": Run(wrapped),
    "wrapped, in words": Run(wrapped, partial(stack, in_turn), {"checkpoint": "blocks"}),
    "every second": Run(
        partial(wrapped, lambda number: number % 2 == 0),
        partial(stack, in_turn),
        {"checkpoint": "every:2"},
    ),
    "selective, in words": Run(
        partial(stack, selective), partial(stack, in_turn), {"checkpoint": "selective"}
    ),
    "selective, gated": Run(partial(stack, selective, Gated)),
    "selective, gated, in words": Run(
        partial(stack, selective, Gated),
        partial(stack, in_turn, Gated),
        {"checkpoint": "selective"},
    ),
    "all matmuls": Run(partial(stack, partial(selective, contexts=all_matmuls))),
    "local variables": Run(shifted_loss),
    "saved for their shapes": Run(partial(stack, in_turn, Padded)),
    "saved for their shapes, checkpoints": Run(partial(stack, some, Padded)),
    "none": Run(partial(stack, in_turn), partial(stack, some), {"checkpoint": "none"}),
    "accumulated": Run(partial(stack, in_turn), options={"accumulate": 3}),
    "accumulated with checkpoints": Run(partial(stack, some), options={"accumulate": 3}),
    "gradients kept": Run(partial(stack, in_turn), options={"keeps_gradients": True}),
    "outputs kept": Run(with_states, options={"keeps_outputs": True}),
    "outputs kept, accumulated": Run(with_states, options={"keeps_outputs": True, "accumulate": 2}),
    "GPT-2, outputs kept": Run(partial(family, "gpt2"), options={"keeps_outputs": True}),
    "GPT-2": Run(partial(family, "gpt2")),
    "Llama": Run(partial(family, "llama")),
    "Llama, in words": Run(
        partial(family, "llama"), partial(without, "llama"), {"checkpoint": "blocks"}
    ),
    "GPT-2, reentrant": Run(partial(family, "gpt2", use_reentrant=True), tolerance=0.02),
    "BERT": Run(partial(family, "bert"), tolerance=0.025),
    "T5": Run(partial(family, "t5")),
    "ViT": Run(partial(family, "vit")),
    "U-Net": Run(partial(family, "unet2d")),
}


def loop_peak(
    model: nn.Module,
    batch: dict[str, torch.Tensor],
    make: Make,
    *,
    accumulate: int = 1,
    keeps_gradients: bool = False,
    keeps_outputs: bool = False,
) -> int:
    """Return the peak in bytes of three steps with an optimizer."""
    optimizers = make(list(model.parameters()))
    gc.collect()
    state_bytes = sum(  # Adagrad has a state before the first step
        t.nbytes for o in optimizers for s in o.state.values() for t in s.values() if t.ndim
    )
    meter = LiveStorageMeter(
        state_bytes + unique_bytes([*model.parameters(), *model.buffers(), *batch.values()])
    )
    with meter:
        for _ in range(3):
            for _ in range(accumulate):
                output = model(**batch)
                loss = output if isinstance(output, torch.Tensor) else output.loss
                (loss / accumulate).backward()
                if not keeps_outputs:
                    del output, loss
            for optimizer in optimizers:
                optimizer.step()
            for optimizer in optimizers:
                optimizer.zero_grad(set_to_none=not keeps_gradients)
    return meter.peak_bytes


@pytest.mark.slow_cases(
    "U-Net", "T5", "GPT-2, reentrant", "GPT-2", "GPT-2, outputs kept", "BERT", "Llama, in words"
)
@pytest.mark.parametrize("name", RUNS)
def test_the_peak_of_a_run_is_predicted(name: str) -> None:
    run = RUNS[name]
    model, batch = (run.described or run.make)()
    answer = remat.fit(model, (), batch, device="cpu", memory="1TiB", **run.options)
    model, batch = run.make()
    options = {key: value for key, value in run.options.items() if key != "checkpoint"}
    peak_bytes = loop_peak(model, batch, OPTIMIZERS_ON_CPU["adamw"], **options)
    assert answer.memory.peak_bytes == pytest.approx(peak_bytes, rel=run.tolerance)


class Words(nn.Module):
    """An embedding, blocks and a head. With few words, the peak is in the optimizer's step."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.blocks = nn.Embedding(500, 64), nn.Sequential(Block(), Block())
        self.head = nn.Linear(64, 500, bias=False)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        logits = self.head(self.blocks(self.embedding(words)))
        return nn.functional.cross_entropy(logits.flatten(0, 1), words.flatten())


OPTIMIZERS_ON_CPU = {
    **of_torch(foreach=False, embedding_shapes=[(500, 64)]),
    **of_bitsandbytes(),
}


@pytest.mark.filterwarnings("ignore:Paged optimizers are not supported on CPU")
@pytest.mark.parametrize("words", [4, 256])
@pytest.mark.parametrize("name", OPTIMIZERS_ON_CPU)
def test_the_peak_with_an_optimizer_is_predicted(name: str, words: int) -> None:
    torch.manual_seed(0)
    batch = {"words": torch.randint(0, 500, (1, words))}
    answer = remat.fit(Words(), (), batch, device="cpu", memory="1TiB", optimizer=name)
    peak_bytes = loop_peak(Words(), batch, OPTIMIZERS_ON_CPU[name])
    assert answer.memory.peak_bytes == pytest.approx(peak_bytes, rel=TOLERANCE)


def test_a_loop_that_keeps_outputs_may_release_them() -> None:
    model, batch = with_states()
    retained = remat.fit(model, (), batch, device="cpu", memory="1TiB", keeps_outputs=True)
    assert "outputs live until the next ones exist" in str(retained)
    released = remat.fit(model, (), batch, device="cpu", memory="1TiB")
    assert released.memory.peak_bytes < 0.99 * retained.memory.peak_bytes
    memory = retained.memory.peak_bytes - 1
    answer = remat.fit(model, (), batch, device="cpu", memory=memory, keeps_outputs=True)
    options = {option.name: option for option in answer.options}
    option = options["outputs of the step before released"]
    assert option.fits
    assert option.peak_bytes == released.memory.peak_bytes
    assert option.code == "del outputs, loss after optimizer.step()"
    assert options["plan of remat"].fits
    assert options["plan of remat"].code.endswith(option.code)


@pytest.mark.parametrize("checkpoint", ["every", "every:0", "every:x", "every:-1", "all", "", 2])
def test_an_unknown_checkpoint_is_an_error(checkpoint: Any) -> None:
    model, batch = stack(in_turn)
    with pytest.raises(RematError, match=r"the checkpoint is .*'every:2'"):
        remat.fit(model, (), batch, device="cpu", checkpoint=checkpoint)


@pytest.mark.parametrize("accumulate", [0, -1, 1.5, True, "8"])
def test_an_impossible_number_of_batches_is_an_error(accumulate: Any) -> None:
    model, batch = stack(in_turn)
    with pytest.raises(RematError, match="accumulate is"):
        remat.fit(model, (), batch, device="cpu", accumulate=accumulate)


def test_checkpoints_of_blocks_need_blocks() -> None:
    with pytest.raises(RematError, match="no repeated blocks to checkpoint"):
        remat.fit(Block(), (torch.ones(2, 64),), device="cpu", checkpoint="blocks")


def test_no_block_to_checkpoint_is_an_error() -> None:
    model, batch = stack(in_turn)
    with pytest.raises(RematError, match="the model has 6 repeated blocks"):
        remat.fit(model, (), batch, device="cpu", checkpoint="every:7")


def test_the_answer_names_what_the_loop_does() -> None:
    model, batch = stack(some)
    answer = remat.fit(model, (), batch, device="h100", accumulate=8, keeps_gradients=True)
    assert answer.checkpoint_count == 4
    loop = "4 checkpoints (as written), gradients of 8 batches accumulated, gradients never freed"
    assert f"loop      {loop}" in str(answer)


def test_options_of_a_checkpointed_loop_are_compared_with_it() -> None:
    """A plan of the same step may be faster than the loop with its checkpoints."""
    model, batch = wrapped()
    needed = remat.fit(model, (), batch, device="cpu", memory="1TiB")
    memory = needed.memory.peak_bytes - 1
    answer = remat.fit(model, (), batch, device="cpu", memory=memory, optimizer="adamw")
    names = [option.name for option in answer.options]
    assert not any("checkpoint" in name for name in names)
    assert any("no smaller than with the present checkpoints" in o.reason for o in answer.excluded)
    plan = next(option for option in answer.options if option.name.startswith("plan of remat"))
    assert plan.fits
    assert plan.step_s is not None
    assert plan.step_s <= answer.step_s


def counting_contexts() -> Any:
    CALLS.append(1)
    return create_selective_checkpoint_contexts(every_second_matmul())


def reading_contexts() -> Any:
    def policy(context: Any, func: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        is_large = func is torch.ops.aten.gelu.default and float(args[0].abs().max()) > 1e9
        return CheckpointPolicy.MUST_SAVE if is_large else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


CALLS: list[int] = []


@pytest.mark.parametrize("contexts", [counting_contexts, reading_contexts])
def test_policies_that_a_capture_cannot_run_stop_no_plan(contexts: Callable[[], Any]) -> None:
    """A plan does not depend on them; an answer says that they are not known."""
    model, batch = stack(partial(selective, contexts=contexts))
    planned = remat.optimize(model, "60%", (), batch, costs=remat.Roofline("cpu"))
    assert torch.equal(planned(**batch), model(**batch))
    answer = remat.fit(model, (), batch, device="cpu")
    assert answer.checkpoint_count == 6
    assert any("the policy of a selective checkpoint" in note for note in answer.notes)


def test_a_model_that_cannot_be_captured_is_tried_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the policy of a selective checkpoint is a reason for a second capture."""
    captures: list[nn.Module] = []

    def capture(model: nn.Module, *args: Any, **options: Any) -> remat.Trace:
        captures.append(model)
        return remat.trace(model, *args, **options)

    monkeypatch.setattr("remat.frontend.api.fit.capture", capture)
    model, batch = stack(lambda blocks, x: some(blocks, x) * float(x.sum()))
    with pytest.raises(remat.TraceError):
        remat.fit(model, (), batch, device="cpu")
    assert captures == [model]


def test_an_estimate_names_the_checkpoints_that_it_leaves_out() -> None:
    model, batch = stack(some)
    estimate = remat.estimate(model, (), batch)
    assert estimate.checkpoint_count == 4
    assert "4 checkpoints in the model's code: remat.fit includes them" in str(estimate)
    assert "checkpoints" not in str(remat.estimate(stack(in_turn)[0], (), batch))


def test_checkpoints_of_the_backward_are_ignored() -> None:
    """Such a document is no trace of ours, and has an answer nevertheless."""
    model, batch = stack(in_turn)
    trace = remat.trace(model, (), batch, device="h100")
    nodes = tuple(node.model_copy(update={"checkpoint": 1}) for node in trace.nodes)
    answer = fit_trace(trace.replace(nodes=nodes), "adamw")
    assert answer.checkpoint_count == 1
