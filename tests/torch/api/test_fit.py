"""`remat.fit`: its prediction and the promises of its options, against training loops that run."""

from __future__ import annotations

import gc
import math
import re
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from benchmarks.software_gpu.families import build
from tests.helpers.doc_snippets import ROOT
from tests.helpers.training.models import WithParts
from torch import nn

import remat
from remat.costs.optimizer_memory import OptimizerMemory
from remat.frontend.memory.meter import LiveStorageMeter, unique_bytes
from remat.passes.outputs import loss_code
from remat.report.fit import Fit, FitOption
from remat.report.training_memory import TrainingMemory
from remat.schedule import Schedule
from remat.solution import Solution
from remat.strategies import Task

FIT_PAGE = ROOT / "docs" / "how-to" / "fit.md"
TOLERANCE = 0.02
QUICK = "remat.Auto(time_limit=5)"
BATCH, TOKENS = 8, 64

Call = tuple[nn.Module, tuple[Any, ...], dict[str, Any]]


def gpt2(batch: int = BATCH) -> Call:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    config = GPT2Config(
        n_layer=4, n_embd=128, n_head=4, vocab_size=512, n_positions=TOKENS, use_cache=False
    )
    ids = torch.randint(512, (batch, TOKENS))
    return GPT2LMHeadModel(config).train(), (), {"input_ids": ids, "labels": ids.clone()}


def trained_peak(
    call: Call,
    optimizer: torch.optim.Optimizer | None,
    *,
    micro_batches: int = 1,
    steps: int = 3,
) -> int:
    """Return the peak in bytes of a training loop."""
    model, args, kwargs = call
    inputs = (t for t in kwargs.values() if isinstance(t, torch.Tensor))
    constants = [*model.parameters(), *model.buffers(), *inputs]
    gc.collect()
    meter = LiveStorageMeter(unique_bytes(constants))
    with meter:
        for _ in range(steps):
            for _ in range(micro_batches):
                output = model(*args, **kwargs)
                loss = output if isinstance(output, torch.Tensor) else output.loss
                (loss / micro_batches).backward()
                del output, loss
            if optimizer is not None:
                optimizer.step()
            model.zero_grad(set_to_none=True)
    return meter.peak_bytes


def fit(call: Call, memory: int | str = "1TiB", **options: Any) -> Fit:
    """Return the answer for a CPU without an optimizer, by default for enough memory."""
    return remat.fit(*call, memory=memory, **{"device": "cpu", "optimizer": "none", **options})


def needed_bytes(call: Call, **options: Any) -> int:
    """Return the bytes that eager mode needs."""
    return fit(call, **options).memory.reserved_bytes


@pytest.fixture(scope="module")
def answer() -> Fit:
    """The answer for 60% of the memory that eager mode needs."""
    memory = int(0.6 * needed_bytes(gpt2(), optimizer="adamw"))
    return fit(
        gpt2(), memory, optimizer="adamw", batch=BATCH, with_batch=gpt2,
        strategy=remat.Auto(time_limit=5), time_limit=math.inf,
    )  # fmt: skip


def option(answer: Fit, name: str) -> FitOption:
    (result,) = [o for o in answer.options if o.name.startswith(name)]
    return result


def meta_layers(width: int, layers: int, rows: int) -> Call:
    """Return linear layers without memory."""
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(width, width) for _ in range(layers)))
        return model, (torch.empty(rows, width),), {}


def test_a_loop_with_enough_memory_needs_no_options() -> None:
    answer = fit(gpt2())
    assert answer.fits
    assert answer.options == ()
    assert "fits      yes," in str(answer)


@pytest.mark.slow_cases("adamw-AdamW")
@pytest.mark.parametrize(
    ("name", "make"),
    [
        ("adamw", torch.optim.AdamW),
        pytest.param(
            "adamw-fused", lambda p: torch.optim.AdamW(p, fused=True), marks=pytest.mark.slow
        ),
        pytest.param("sgd", torch.optim.SGD, marks=pytest.mark.slow),
        pytest.param(
            "sgd-momentum", lambda p: torch.optim.SGD(p, momentum=0.9), marks=pytest.mark.slow
        ),
        ("adafactor", torch.optim.Adafactor),
    ],
)
def test_eager_mode_has_the_predicted_peak(
    name: str, make: Callable[..., torch.optim.Optimizer]
) -> None:
    call = gpt2()
    answer = fit(call, optimizer=name)
    peak_bytes = trained_peak(call, make(call[0].parameters()))
    assert answer.memory.peak_bytes == pytest.approx(peak_bytes, rel=0.005)
    assert sum(answer.memory.parts.values()) == answer.memory.peak_bytes


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "tolerance"),
    [("vit", 1e-4), ("swin", 1e-4), ("whisper", 1e-4), ("clip", 0.01), ("unet2d", 1e-4)],
)
def test_convolutions_have_the_predicted_peak(family: str, tolerance: float) -> None:
    """Without the workspaces of the convolutions, which no tensor has on a CPU."""
    model, batch = build(family, "float32", "cpu")
    answer = fit((model, (), batch), optimizer="adamw")
    peak_bytes = trained_peak((model, (), batch), torch.optim.AdamW(model.parameters()))
    assert answer.memory.peak_bytes == pytest.approx(peak_bytes, rel=tolerance)


@pytest.mark.slow
def test_the_first_option_is_the_fastest_that_fits(answer: Fit) -> None:
    assert not answer.fits
    names = {o.name for o in answer.options}
    assert names >= {"plan of remat", "checkpoint each block", "optimizer adamw-8bit"}
    assert any("batches of" in name for name in names)
    assert 'outputs="loss"' in option(answer, "plan that returns the loss only").code
    assert "outputs=" not in option(answer, "plan of remat").code
    assert not any(name.startswith(("FSDP", "expandable")) for name in names)  # not on a CPU
    fitting = [o for o in answer.options if o.fits]
    assert fitting == list(answer.options[: len(fitting)])
    times = [o.step_s for o in fitting if o.step_s is not None]
    assert times == sorted(times)
    for o in answer.options:
        assert o.fits == (o.reserved_bytes <= answer.usable_bytes)


PROMISES = {
    "optimizer adamw-8bit": 0.001,
    "checkpoint each block": TOLERANCE,
    "batches of": TOLERANCE,
    "plan of remat": TOLERANCE,
    "plan that returns the loss only": TOLERANCE,
}


@pytest.mark.slow_cases(*(name for name in PROMISES if name != "checkpoint each block"))
@pytest.mark.parametrize("name", PROMISES)
def test_options_keep_their_promise(answer: Fit, name: str) -> None:
    """A loop with the code of the option has the predicted peak; with a plan, at most that."""
    (promised,) = [o for o in answer.options if re.match(rf"(\d+ )?{name}", o.name)]
    batches = re.match(r"(\d+) batches of (\d+)", promised.name)
    micro_batches, batch = map(int, batches.groups()) if batches else (1, BATCH)
    call = gpt2(batch)
    optimizer = torch.optim.AdamW(call[0].parameters())
    scope = {"remat": remat, "torch": torch, "model": call[0], "optimizer": optimizer}
    if "8bit" in name:
        scope["bitsandbytes"] = pytest.importorskip("bitsandbytes")
    if micro_batches == 1:
        exec(promised.code.replace("reserve=", f"strategy={QUICK}, reserve="), scope)
    peak_bytes = trained_peak(call, scope["optimizer"], micro_batches=micro_batches)
    if "8bit" not in name:
        assert promised.fits
        assert peak_bytes <= answer.usable_bytes
    assert peak_bytes <= (1 + PROMISES[name]) * promised.peak_bytes
    if "plan" not in name:
        assert peak_bytes >= (1 - PROMISES[name]) * promised.peak_bytes
    elif "loss" not in name:
        assert promised.code.startswith("model.config.use_cache = False; ")
    if "checkpoint" in name:
        assert f"`{promised.code.removeprefix('model.')}` of transformers" in FIT_PAGE.read_text()


def test_released_outputs_keep_their_promise() -> None:
    """The peak is that of the head's backward, which does not read the logits."""

    class WithLoss(WithParts, layers=lambda: nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 4096))):
        def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
            logits = self.layers(x)
            return {"loss": logits.log_softmax(-1).mean(), "logits": logits}

    call = WithLoss(), (torch.randn(256, 32),), {}

    held_bytes = fit(call).memory.peak_bytes
    too_little = fit(call, held_bytes - 1, strategy=remat.Auto(time_limit=0.1))
    promised = option(too_little, "other outputs released")
    code = promised.code.replace("(...)", "(*args)").removeprefix("loss = ")
    assert code == 'model(*args)["loss"]'
    with LiveStorageMeter(unique_bytes([*call[0].parameters(), *call[1]])) as meter:
        for _ in range(2):
            loss = eval(code, {"model": call[0], "args": call[1]})
            loss.backward()
            call[0].zero_grad()
    assert promised.fits
    assert promised.peak_bytes == pytest.approx(meter.peak_bytes, rel=0.001)
    assert held_bytes - promised.peak_bytes == 256 * 4096 * 4


def test_the_code_takes_the_loss_as_the_model_returns_it() -> None:
    """A tuple, a dict in a list, and the loss alone."""

    class Nested(nn.Module):
        def __init__(self, nest: Callable[[torch.Tensor, torch.Tensor], object]) -> None:
            super().__init__()
            self.layer, self.nest = nn.Linear(4, 4), nest

        def forward(self, x: torch.Tensor) -> object:
            y = self.layer(x)
            return self.nest(y.mean(), y.detach())

    nests: dict[str, Callable[[torch.Tensor, torch.Tensor], object]] = {
        "[0]": lambda loss, y: (loss, y),
        '[1]["loss"]': lambda loss, y: [y, {"logits": y, "loss": loss}],
        "": lambda loss, y: loss,
    }
    for code, nest in nests.items():
        assert loss_code(remat.trace(Nested(nest), (torch.ones(2, 4),))) == code


def test_plain_outputs_have_no_options_for_others() -> None:
    answer = fit(narrow_and_wide(100), 250_000)
    assert not answer.fits
    assert not any("outputs" in o.name or "loss" in o.name for o in answer.options)


def test_the_fused_optimizer_is_an_option_where_its_step_is_the_peak() -> None:
    """A wide model and a batch of one: the optimizer needs more than the backward."""
    call = meta_layers(4096, 8, rows=1)
    eager = fit(call, device="h100", optimizer="adamw")
    assert eager.memory.is_in_optimizer
    assert eager.memory.parts["optimizer step"] == pytest.approx(8 * 4 * 4096**2, rel=0.01)
    answer = remat.fit(*call, device="h100", memory=eager.memory.reserved_bytes - 1)
    first = answer.options[0]
    assert first.name == "optimizer adamw-fused"
    assert first.fits
    assert first.peak_bytes < eager.memory.peak_bytes


def test_blocks_may_be_sequences_of_layers() -> None:
    """Checkpoints around single layers would save nothing."""
    call = narrow_and_wide(1000)
    answer = fit(call, needed_bytes(call) - 1)
    assert option(answer, "checkpoint each block").peak_bytes < 0.8 * needed_bytes(call)


@pytest.mark.slow
def test_of_options_that_do_not_fit_the_smallest_is_first() -> None:
    """Also if its time is unknown, as that of a plan for which the memory is too small."""
    call = narrow_and_wide(1000)
    answer = fit(call, needed_bytes(call) // 5, strategy=remat.Auto(time_limit=0.1))
    plan, checkpoints = answer.options
    assert not plan.fits
    assert plan.step_s is None
    assert plan.reserved_bytes < checkpoints.reserved_bytes


@pytest.mark.slow
def test_no_budget_is_solved_twice() -> None:
    """AdamW and its fused form have the same state, so the same budget remains for the step."""
    tasks: list[tuple[int, int | None]] = []

    class Recording(remat.Auto):
        def run(self, task: Task) -> Solution:
            tasks.append((len(task.graph), task.budget_bytes))
            return super().run(task)

    call, adamw = narrow_and_wide(1000), {"optimizer": "adamw"}
    memory = needed_bytes(call, **adamw) // 5
    answer = fit(call, memory, strategy=Recording(time_limit=0.1), **adamw)
    assert not option(answer, "plan of remat").fits
    unsplit, *others = tasks
    assert unsplit not in others


def test_no_memory_is_replayed_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """The allocator's replay takes as long as a solve, for large models."""
    replayed: list[tuple[str, int, Schedule]] = []
    graphs: list[remat.Graph] = []  # each has an identity for as long as it exists
    memory_of = TrainingMemory.of

    def recording(
        trace: remat.Trace, graph: remat.Graph, schedule: Schedule, optimizer: OptimizerMemory
    ) -> TrainingMemory:
        graphs.append(graph)
        replayed.append((optimizer.name, id(graph), schedule))
        return memory_of(trace, graph, schedule, optimizer)

    monkeypatch.setattr(TrainingMemory, "of", recording)
    call, quick = narrow_and_wide(1000), remat.Auto(time_limit=0.1)
    answer = remat.fit(*call, device="h100", memory=1000, strategy=quick)
    assert not answer.fits
    assert replayed
    assert len(replayed) == len(set(replayed))


def test_the_time_limit_ends_the_search_for_options() -> None:
    call = narrow_and_wide(1000)
    answer = fit(call, needed_bytes(call) - 1, time_limit=1e-9)
    assert [o.name for o in answer.options] == ["checkpoint each block"], "it takes no solver"
    assert "the time limit of 1e-09 s ended the search" in answer.notes[0]


def test_each_stage_is_reported() -> None:
    class Reporting(remat.Auto):
        def run(self, task: Task) -> Solution:
            assert task.progress is not None
            task.progress(remat.Progress("cost", 0.0))
            return super().run(task)

    call, reports = narrow_and_wide(1000), list[remat.Progress]()
    fit(
        call, needed_bytes(call) - 1, progress=reports.append, lengths=[500, 1000],
        with_length=narrow_and_wide, strategy=Reporting(time_limit=0.1),
    )  # fmt: skip
    stages = list(dict.fromkeys(report.stage for report in reports))
    stages = [re.sub(r"^(option )\d+ of \d+", r"\1N", stage) for stage in stages]
    assert stages[:3] == ["tracing", "memory of the step", "option N: optimizers"]
    assert "length 500" in stages
    of_solves = [r.stage for r in reports if r.phase == "cost"]
    assert any(re.fullmatch(r"option \d+ of \d+: plan", stage) for stage in of_solves)


@pytest.mark.slow
def test_shards_of_more_gpus_are_smaller() -> None:
    call = meta_layers(4096, 32, rows=1)
    sizes = [option(remat.fit(*call, device="h100", memory=m), "FSDP") for m in
             ("5GiB", "2GiB", "1GiB")]  # fmt: skip
    gpus = [int(o.name.split()[2]) for o in sizes]
    assert gpus == sorted(set(gpus))
    assert all(o.fits for o in sizes)


def test_the_code_of_a_plan_has_the_outputs_that_it_was_made_for() -> None:
    call, dropped = meta_layers(64, 6, rows=4096), {"optimizer": "adamw", "outputs": "dropped"}
    answer = fit(call, int(0.8 * needed_bytes(call, **dropped)), **dropped)
    assert option(answer, "plan of remat").code.endswith('outputs="dropped")')


def test_a_trace_is_refused() -> None:
    trace = remat.trace(nn.Linear(3, 3), (torch.ones(2, 3),))
    with pytest.raises(TypeError, match=r"got a Trace: a trace is what remat\.Client\.fit takes"):
        remat.fit(trace)  # type: ignore[arg-type]


def test_options_that_are_impossible_have_their_reason() -> None:
    call = partial(meta_layers, 512, 4)
    answer = remat.fit(*call(4096), device="h100", memory=1000, batch=4096, with_batch=call)
    reasons = {excluded.name: excluded.reason for excluded in answer.excluded}
    assert reasons.keys() == {"plan of remat", "checkpoints of blocks", "smaller batch", "FSDP"}
    assert "the step of adamw-paged-8bit alone takes" in reasons["plan of remat"]
    assert "optimizer state and libraries take 80.0 MiB" in reasons["smaller batch"]
    assert "each of 1,024 GPUs would reserve" in reasons["FSDP"]
    assert "no plan of remat: the step of" in str(answer)


def test_a_batch_of_one_has_the_bytes_that_the_allocator_reserves() -> None:
    """Segments are larger than the tensors of one sample."""
    call, sgd = partial(meta_layers, 512, 4), {"device": "h100", "optimizer": "sgd"}
    one = fit(call(1), **sgd).memory
    memory = one.peak_bytes  # no divisor of the batch is expected to fit
    answer = fit(call(4096), memory, batch=4096, with_batch=call, **sgd)
    promised = option(answer, "4096 batches of 1")
    assert promised.reserved_bytes > memory
    # Gradients of earlier batches are in memory, too.
    assert promised.reserved_bytes >= one.reserved_bytes
    assert not promised.fits


def test_a_batch_that_cannot_be_captured_is_excluded() -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64))

    def call(batch: int) -> Call:
        return model, (torch.empty(batch, 64),), {}

    answer = fit(call(4096), 40 << 10, batch=4096, with_batch=call)
    assert "more than 1 value per channel" in str(answer)


def narrow_and_wide(length: int) -> Call:
    """Return blocks that are wide inside, and sequences of a length."""
    with torch.device("meta"):
        blocks = [nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 16)) for _ in range(3)]
        return nn.Sequential(*blocks), (torch.empty(2, length, 16),), {}


def answer_of_lengths(memory: int | str, lengths: dict[int, float], traced: list[int]) -> Fit:
    """Return the answer for the longest length, without an optimizer; note the others."""

    def with_length(length: int) -> Call:
        traced.append(length)
        return narrow_and_wide(length)

    call, quick = narrow_and_wide(max(lengths)), remat.Auto(time_limit=0.3)
    return fit(call, memory, lengths=lengths, with_length=with_length, strategy=quick)


@pytest.mark.slow
def test_the_longest_sequences_fit_and_longer_ones_do_not() -> None:
    """Each length has the answer that it has alone, though few of them are traced."""
    lengths = {1000 * n: 20.0 for n in range(1, 6)}
    standalone = {n: answer_of_lengths("1TiB", {n: 1}, []).memory.reserved_bytes for n in lengths}
    assert list(standalone.values()) == sorted(standalone.values())
    traced: list[int] = []
    (everything,) = answer_of_lengths(standalone[5000], lengths, traced).lengths
    assert (everything.length, everything.share, everything.option) == (5000, 1.0, "")
    assert not traced
    answer = answer_of_lengths(standalone[3000], lengths, traced)
    eager, best = answer.lengths
    assert (eager.length, eager.share, eager.option) == (3000, pytest.approx(0.6), "")
    assert (best.length, best.option) == (5000, answer.options[0].name)
    assert "3,000 tokens fit as it is: 60.0% of batches" in str(answer)
    assert len(set(traced)) < 4


@pytest.mark.slow
def test_the_best_option_may_fit_some_lengths_only() -> None:
    lengths = {1000 * n: 20.0 for n in range(1, 6)}
    eager_bytes = answer_of_lengths("1TiB", {5000: 1}, []).memory.reserved_bytes
    memory = int(0.2 * eager_bytes)  # pieces of the operations of 4,000 tokens fit
    answer = answer_of_lengths(memory, lengths, [])
    assert not any(o.fits for o in answer.options)
    eager, best = answer.lengths
    assert (eager.length, eager.share) == (None, 0.0)
    assert "no length fits as it is" in str(answer)
    assert (best.length, best.share) == (4000, pytest.approx(0.8))
    assert best.option == answer_of_lengths(memory, {4000: 1}, []).options[0].name


def test_wrong_arguments_are_refused() -> None:
    model, x = nn.Linear(8, 8), torch.randn(2, 8)
    with pytest.raises(remat.BudgetError, match="the memory '60%' is not a number of bytes"):
        remat.fit(model, (x,), memory="60%")
    with pytest.raises(remat.RematError, match="optimizer 'lamb' is not known; use one of adamw"):
        remat.fit(model, (x,), optimizer="lamb")
    for memory in (3.5, True, 0, "0", [1]):
        with pytest.raises(remat.BudgetError, match="pass what torch's allocator may reserve"):
            remat.fit(model, (x,), memory=memory)  # type: ignore[arg-type]
    for batch in (0, -1, 2.0, True):
        with pytest.raises(remat.RematError, match="pass the batch size of the example inputs"):
            remat.fit(model, (x,), batch=batch)  # type: ignore[arg-type]
    for time_limit in (0, -1.0, "12", True, math.nan):
        with pytest.raises(remat.RematError, match="pass seconds above 0"):
            remat.fit(model, (x,), time_limit=time_limit)  # type: ignore[arg-type]
    with pytest.raises(remat.RematError, match="lengths need with_length"):
        remat.fit(model, (x,), device="cpu", lengths=[2])
    with pytest.raises(remat.RematError, match=r"no example input .* of that size .*\[2, 8\]"):
        remat.fit(model, (x,), device="cpu", lengths=[4, 16], with_length=lambda n: (model, (x,)))


def test_cuda_without_a_gpu_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    model, x = nn.Linear(8, 8), torch.randn(2, 8)
    answer = remat.fit(model, (x,), device="cuda")
    assert "'cuda' is taken as h200; name another GPU" in str(answer)
    assert not remat.fit(model, (x,), device="h200").notes


def test_the_memory_of_an_absent_gpu_does_not_depend_on_this_machine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It is in its data sheet. A machine with another GPU plans for the one that is named."""
    call = meta_layers(64, 1, rows=8)
    absent = remat.fit(*call, device="h100")
    assert 77 * 2**30 < absent.usable_bytes < 79 * 2**30
    assert "h100" in str(absent)
    monkeypatch.setattr("remat.frontend.api.fit.free_bytes", lambda device: 24 << 30)
    assert remat.fit(*call, device="h100").usable_bytes == absent.usable_bytes


def test_a_model_that_is_in_memory_already_counts_once(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = nn.Linear(1024, 1024), torch.randn(8, 1024)
    monkeypatch.setattr("remat.frontend.api.fit.free_bytes", lambda device: 0)
    model_bytes = sum(p.nbytes for p in model.parameters())
    assert remat.fit(model, (x,), device="cpu").usable_bytes == model_bytes


def test_the_code_is_for_the_model() -> None:
    """A plain module has no method for checkpoints, and a function may return a call without
    keyword arguments."""

    class Block(WithParts, wide=(64, 512), narrow=(512, 64)):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.narrow(torch.nn.functional.gelu(self.wide(x)))

    call = nn.Sequential(*(Block() for _ in range(6))), (torch.randn(512, 64),), {}
    answer = fit(
        call, needed_bytes(call) - 1, batch=512,
        with_batch=lambda size: (call[0], (torch.randn(size, 64),)),
    )  # fmt: skip
    assert "torch.utils.checkpoint" in option(answer, "checkpoint each block").code
    assert "use_cache" not in option(answer, "plan of remat").code
    assert any("batches of" in o.name for o in answer.options)
