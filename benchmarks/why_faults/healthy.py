"""Training scripts without a fault, in which nothing may be called a leak.

Each shows a habit that looks like a leak for a while: state that is created late, queues that fill
up, lengths that vary, evaluations between steps.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import nn, optim
from torch.nn import functional

from benchmarks.why_faults.models import (
    TOKENS,
    CachedNet,
    Net,
    PairwiseNet,
    Recurrent,
    batch,
    squares,
)

if TYPE_CHECKING:
    from benchmarks.why_faults.faults import Run

Script = Callable[["Run"], None]
HEALTHY: dict[str, Script] = {}


def healthy(script: Script) -> Script:
    """Add a script with the name of its function."""
    HEALTHY[script.__name__] = script
    return script


def _loop(
    run: Run,
    model: nn.Module,
    optimizer: optim.Optimizer,
    tokens: Callable[[int], int] = lambda step: TOKENS,
) -> None:
    for step in run.steps():
        squares(model(batch(run.device, tokens(step)))).backward()
        optimizer.step()
        optimizer.zero_grad()


@healthy
def adamw(run: Run) -> None:
    model = run.named(Net())
    _loop(run, model, optim.AdamW(model.parameters()))


@healthy
def sgd_without_names(run: Run) -> None:
    model = Net().to(run.device)
    _loop(run, model, optim.SGD(model.parameters(), lr=0.1))


@healthy
def momentum_not_foreach(run: Run) -> None:
    model = run.named(Net())
    _loop(run, model, optim.SGD(model.parameters(), lr=0.1, momentum=0.9, foreach=False))


@healthy
def adafactor(run: Run) -> None:
    model = run.named(Net(2))
    _loop(run, model, optim.Adafactor(model.parameters()))


@healthy
def lengths_that_vary(run: Run) -> None:
    model = run.named(Net())
    _loop(run, model, optim.AdamW(model.parameters()), lambda step: 256 * (1 + step * 7 % 11))


@healthy
def lengths_of_a_curriculum(run: Run) -> None:
    model = run.named(Net())
    _loop(run, model, optim.AdamW(model.parameters()), lambda step: 256 + 64 * step)


@healthy
def accumulated_gradients(run: Run) -> None:
    model = run.named(Net())
    optimizer = optim.AdamW(model.parameters())
    for step in run.steps():
        (squares(model(batch(run.device))) / 4).backward()
        if step % 4 == 3:
            optimizer.step()
            optimizer.zero_grad()


@healthy
def gradients_set_to_zero(run: Run) -> None:
    model = run.named(Net())
    optimizer = optim.AdamW(model.parameters())
    for _ in run.steps():
        squares(model(batch(run.device))).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)


@healthy
def checkpoints(run: Run) -> None:
    model = run.named(Net(8, segment=2))
    _loop(run, model, optim.AdamW(model.parameters()))


@healthy
def autocast(run: Run) -> None:
    model = run.named(Net())
    optimizer = optim.AdamW(model.parameters())
    for _ in run.steps():
        with torch.autocast(run.device, torch.bfloat16):
            loss = squares(model(batch(run.device)))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


@healthy
def evaluation_every_five_steps(run: Run) -> None:
    model = run.named(Net())
    optimizer = optim.AdamW(model.parameters())
    for step in run.steps():
        squares(model(batch(run.device))).backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 5 == 4:
            with torch.no_grad():
                for _ in range(3):
                    squares(model(batch(run.device, 2 * TOKENS)))


@healthy
def losses_as_numbers(run: Run) -> None:
    model = run.named(Net())
    optimizer = optim.AdamW(model.parameters())
    losses: list[float] = []
    for _ in run.steps():
        loss = squares(model(batch(run.device)))
        losses.append(loss.item())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


@healthy
def losses_as_small_tensors(run: Run) -> None:
    model = run.named(Net())
    optimizer = optim.AdamW(model.parameters())
    losses: list[torch.Tensor] = []
    for _ in run.steps():
        loss = squares(model(batch(run.device)))
        losses.append(loss.detach())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


@healthy
def queue_of_eight_outputs(run: Run) -> None:
    model = run.named(Net())
    optimizer = optim.AdamW(model.parameters())
    queue: deque[torch.Tensor] = deque(maxlen=8)
    for _ in run.steps():
        output = model(batch(run.device))
        queue.append(output.detach())
        squares(output).backward()
        optimizer.step()
        optimizer.zero_grad()


@healthy
def batches_prefetched(run: Run) -> None:
    model = run.named(Net())
    optimizer = optim.AdamW(model.parameters())
    waiting: deque[torch.Tensor] = deque()
    for _ in run.steps():
        while len(waiting) < 3:
            waiting.append(torch.empty(TOKENS, 512).to(run.device, non_blocking=True))
        squares(model(waiting.popleft())).backward()
        optimizer.step()
        optimizer.zero_grad()


@healthy
def average_updated_in_place(run: Run) -> None:
    model = run.named(Net())
    average = copy.deepcopy(model).requires_grad_(False)
    optimizer = optim.AdamW(model.parameters())
    for _ in run.steps():
        squares(model(batch(run.device))).backward()
        optimizer.step()
        optimizer.zero_grad()
        torch._foreach_lerp_(list(average.parameters()), list(model.parameters()), 0.01)


@healthy
def two_models_in_turns(run: Run) -> None:
    generator, critic = run.named(Net(2)), run.named(Net(3))
    first, second = optim.Adam(generator.parameters()), optim.Adam(critic.parameters())
    for _ in run.steps():
        squares(critic(generator(batch(run.device)).detach())).backward()
        second.step()
        second.zero_grad()
        squares(critic(generator(batch(run.device)))).backward()
        first.step()
        first.zero_grad()
        critic.zero_grad()


@healthy
def recurrent_and_detached(run: Run) -> None:
    model = run.named(Recurrent())
    optimizer = optim.AdamW(model.parameters())
    state = batch(run.device)
    for _ in run.steps():
        output, state = model(batch(run.device), state.detach())
        squares(output).backward()
        optimizer.step()
        optimizer.zero_grad()


@healthy
def unrolled_in_the_script(run: Run) -> None:
    model = run.named(Recurrent())
    optimizer = optim.AdamW(model.parameters())
    for _ in run.steps():
        state, losses = batch(run.device), []
        for _ in range(6):
            output, state = model(batch(run.device), state)
            losses.append(squares(output))
        torch.stack(losses).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


@healthy
def cache_cleared_for_each_sequence(run: Run) -> None:
    model = run.named(CachedNet())
    for _ in run.steps():
        model.attention.keys = None  # type: ignore[union-attr]
        with torch.no_grad():
            for _ in range(12):
                model(batch(run.device, 128))
    model.attention.keys = None  # type: ignore[union-attr]


@healthy
def layers_unfrozen_one_by_one(run: Run) -> None:
    model = run.named(Net(4))
    model.requires_grad_(False)
    model.head.requires_grad_(True)  # type: ignore[union-attr]
    optimizer = optim.AdamW(model.head.parameters())  # type: ignore[union-attr]
    for step in run.steps():
        if step in (8, 16, 24, 32):
            blocks = model.blocks
            assert isinstance(blocks, nn.ModuleList)
            block = blocks[3 - (step // 8 - 1)].requires_grad_(True)
            optimizer.add_param_group({"params": list(block.parameters())})
        squares(model(batch(run.device))).backward()
        optimizer.step()
        optimizer.zero_grad()


@healthy
def losses_of_classes(run: Run) -> None:
    model = run.named(Net(2, classes=4096))
    optimizer = optim.AdamW(model.parameters())
    for _ in run.steps():
        labels = torch.zeros(TOKENS, dtype=torch.int64, device=run.device)
        functional.cross_entropy(model(batch(run.device)), labels).backward()
        optimizer.step()
        optimizer.zero_grad()


@healthy
def pairs_in_pieces(run: Run) -> None:
    model = run.named(PairwiseNet(8))
    optimizer = optim.AdamW(model.parameters())
    for _ in run.steps():
        model(batch(run.device)).backward()
        optimizer.step()
        optimizer.zero_grad()


@healthy
def inference(run: Run) -> None:
    model = run.named(Net())
    answers: list[float] = []
    with torch.inference_mode():
        for _ in run.steps():
            answers.append(model(batch(run.device)).mean().item())
