"""An optimised module behaves like the model in everything that training does with it."""

from __future__ import annotations

import copy
import io
import logging
from itertools import combinations
from operator import itemgetter

import pytest
import torch
from tests.helpers.training.models import FAMILIES, PLAIN, Case, Mlp, Norms, TwoHeads
from tests.helpers.training.recorded_steps import assert_same, eager_step, run_step
from tests.helpers.training.steps import assert_same as same_results
from tests.helpers.training.steps import assert_same_gradients, assert_same_steps, results
from torch import nn

import remat

COSTS = remat.Roofline("cpu")
STRATEGY = remat.Auto(gap=0.05, time_limit=3.0)


def optimized(model: nn.Module, budget: int | str = "90%", *args: object, **kwargs: object):
    return remat.optimize(
        model,
        budget,
        *args,
        costs=COSTS,
        strategy=STRATEGY,
        split="off",
        **kwargs,  # type: ignore[arg-type]
    )


def test_planning_happens_at_the_first_call() -> None:
    model = Mlp()
    gm = optimized(model)
    assert gm.plan is None
    assert gm.forward_graph is None
    gm(torch.randn(64, 32))["loss"].backward()
    assert gm.plan is not None
    assert gm.plan.peak_bytes < gm.plan.baseline_peak_bytes
    assert "torch.ops.aten.addmm.default" in gm.forward_graph.code
    assert "torch.ops.aten.tanh_backward.grad_input" in gm.backward_graph.code


def test_the_optimised_module_is_a_graph_module_with_the_models_state() -> None:
    model = Norms()
    gm = optimized(model)
    assert isinstance(gm, torch.fx.GraphModule)
    assert list(gm.state_dict()) == list(model.state_dict())
    assert all(a is b for a, b in zip(gm.parameters(), model.parameters(), strict=True))
    assert dict(gm.named_buffers()).keys() == dict(model.named_buffers()).keys()
    assert gm.get_submodule("conv.0") is model.conv[0]
    gm.load_state_dict({k: torch.ones_like(v) for k, v in model.state_dict().items()})
    assert all(bool((p == 1).all()) for p in model.parameters())
    assert gm.conv is model.conv


def test_an_optimizer_trains_an_optimised_module() -> None:
    torch.manual_seed(0)
    model = Mlp(dropout=0.0)
    reference = copy.deepcopy(model)
    gm = optimized(model, "min")
    x = torch.randn(64, 32)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2) for m in (reference, gm)]
    for _ in range(5):  # each step starts from the weights of the last one
        assert_same_steps(gm, reference, x, loss=itemgetter("loss"))
        for optimizer in optimizers:
            optimizer.step()


@pytest.mark.slow_cases("resnet")
@pytest.mark.parametrize("name", ["gpt2", "resnet"])
def test_gradient_accumulation_allocates_no_second_copy(name: str) -> None:
    torch.manual_seed(0)
    case = FAMILIES[name]()
    reference = copy.deepcopy(case.model)
    gm = optimized(case.model, "80%")
    for seed in (1, 2, 3):
        eager = run_step(reference, case, seed, zero_grad=False)
        step = run_step(gm, case, seed, zero_grad=False)
    assert_same(step, eager)
    step = run_step(
        gm, case, 4, zero_grad=False
    )  # planned before, so that only the step is metered
    assert gm.program is not None
    assert gm.program.accumulates_gradients
    assert step.peak_bytes <= gm.program.predicted_peak_bytes
    assert step.peak_bytes >= 0.99 * gm.program.predicted_peak_bytes


def test_hooks_and_autograd_grad_see_every_gradient() -> None:
    model = Mlp(dropout=0.0)
    reference = copy.deepcopy(model)
    gm = optimized(model)
    x = torch.randn(64, 32)
    for m in (gm, reference):
        m(x)["loss"].backward()
    seen: dict[str, list[torch.Tensor]] = {"gm": [], "reference": []}
    model.layers[1].weight.register_hook(lambda g: seen["gm"].append(g))
    reference.layers[1].weight.register_hook(lambda g: seen["reference"].append(g))
    for m in (gm, reference):
        m(x)["loss"].backward()  # accumulates
    assert [len(gradients) for gradients in seen.values()] == [1, 1]
    assert torch.equal(seen["gm"][0], seen["reference"][0])
    before = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    wanted = list(model.layers[1].parameters())
    actual = torch.autograd.grad(gm(x)["loss"], wanted)
    expected = torch.autograd.grad(reference(x)["loss"], list(reference.layers[1].parameters()))
    assert all(torch.equal(a, b) for a, b in zip(actual, expected, strict=True))
    after = [p.grad for p in model.parameters() if p.grad is not None]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


@pytest.mark.slow
def test_retain_graph_runs_the_backward_twice() -> None:
    torch.manual_seed(0)
    model = Mlp()
    gm = optimized(model, "min")
    x = torch.randn(64, 32)
    loss = gm(x)["loss"]
    loss.backward(retain_graph=True)
    first = results(model, loss)
    model.zero_grad()
    loss.backward()
    assert len(first.gradients) == 6
    same_results(results(model, loss), first)
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()


def test_double_backward_is_refused() -> None:
    gm = optimized(Mlp())
    with pytest.raises(remat.GuardError, match="create_graph=True"):
        gm(torch.randn(64, 32))["loss"].backward(create_graph=True)


@pytest.mark.slow
def test_two_forwards_may_precede_their_backwards() -> None:
    torch.manual_seed(0)
    case = FAMILIES["resnet"]()
    reference = copy.deepcopy(case.model)
    gm = optimized(case.model, "80%")
    other = {**case.kwargs, "pixel_values": torch.randn_like(case.kwargs["pixel_values"])}
    for m in (gm, reference):
        a, b = m(**case.kwargs).loss, m(**other).loss
        (b * 2).backward()
        a.backward()
    assert_same_gradients(case.model, reference)


@pytest.mark.slow
def test_dropout_is_replayed_whatever_the_generator_did_since() -> None:
    """A generator that has advanced does not matter, and neither does the first step's seed."""
    torch.manual_seed(0)
    model = Mlp(dropout=0.5)
    reference = copy.deepcopy(model)
    gm = optimized(model, "min")
    x = torch.randn(64, 32)
    gm(x)
    assert any(s.rng_action == "replay" for s in gm.program.backward)
    for seed in (11, 12, 13):
        for m in (gm, reference):
            m.zero_grad()
            torch.manual_seed(seed)
            loss = m(x)["loss"]
            torch.rand(1000)  # other code samples between forward and backward
            loss.backward()
        assert_same_gradients(model, reference)


def test_evaluation_and_no_grad_run_the_original_model() -> None:
    model = Mlp()
    gm = optimized(model)
    x = torch.randn(64, 32)
    gm(x)
    gm.eval()
    assert not model.training
    assert not model.layers[0].training
    assert torch.equal(gm(x)["hidden"], model(x)["hidden"])
    gm.train()
    assert model.training
    torch.manual_seed(1)
    with torch.no_grad():
        loss = gm(x)["loss"]
    assert not loss.requires_grad
    torch.manual_seed(1)
    assert torch.equal(loss, model(x)["loss"].detach())


def test_a_submodule_in_evaluation_mode_is_replanned() -> None:
    """Its dropout is off; the plan for training would apply it."""
    torch.manual_seed(0)
    case = PLAIN["mlp"]()
    reference = copy.deepcopy(case.model)
    gm = optimized(case.model, "90%", case.args, case.kwargs)
    for training in (True, False, True):
        case.model.dropout.train(training)
        reference.dropout.train(training)
        assert_same(run_step(gm, case), run_step(reference, case), tolerance=0.0)
        exceptions = () if training else ("dropout",)
        assert gm.program.environment.training_exceptions == exceptions


def test_another_dtype_is_replanned() -> None:
    torch.manual_seed(0)
    model = Mlp()
    reference = copy.deepcopy(model)
    gm = optimized(model, "90%", (torch.randn(64, 32),))
    for name in ("float32", "float64", "bfloat16", "float64"):
        dtype = getattr(torch, name)
        gm.to(dtype)
        reference.to(dtype)
        case = Case(model, (torch.randn(64, 32, dtype=dtype),), loss=lambda out: out["loss"])
        assert_same(run_step(gm, case), run_step(reference, case), tolerance=0.0)
        assert {p.tensor.dtype for p in gm.program.placeholders} == {name}


def test_a_model_in_eval_mode_can_be_planned() -> None:
    """For fine-tuning with frozen statistics."""
    torch.manual_seed(0)
    case = PLAIN["norms"]()
    case.model.eval()
    reference = copy.deepcopy(case.model)
    gm = optimized(case.model, "min", case.args)
    assert_same(run_step(gm, case), run_step(reference, case))


@pytest.mark.slow
def test_new_shapes_are_replanned_and_logged(caplog: pytest.LogCaptureFixture) -> None:
    torch.manual_seed(0)
    model = Mlp(dropout=0.0)
    reference = copy.deepcopy(model)
    gm = optimized(model, "min")
    with caplog.at_level(logging.INFO, logger="remat"):
        for rows in (64, 96, 64, 96, 64):  # now 64 may use the budget of 96
            assert_same_steps(gm, reference, torch.randn(rows, 32), loss=itemgetter("loss"))
    replans = [r for r in caplog.records if "replanned" in r.getMessage()]
    assert [r.getMessage().split(":")[0] for r in replans] == ["inputs changed"] * 2
    assert all(r.levelno == logging.INFO for r in caplog.records)  # nothing is wrong


def test_the_log_says_what_changed(caplog: pytest.LogCaptureFixture) -> None:
    x = torch.randn(8, 16)
    gm = remat.optimize(nn.Sequential(nn.Linear(16, 16), nn.ReLU()), "100%", x)
    with caplog.at_level(logging.INFO, logger="remat"):
        with torch.autocast("cpu", torch.bfloat16):
            gm(x)
        gm(x).sum().backward()
        gm(x)
    messages = [r.getMessage() for r in caplog.records if "replanned" in r.getMessage()]
    assert [m.split(":")[0] for m in messages] == [
        "autocast changed", "accumulation of gradients changed",
    ]  # fmt: skip


def test_a_replaced_module_is_replanned() -> None:
    """In sizes that were planned before, and in others."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
    gm = optimized(model, "100%")
    for part in (nn.ReLU(), nn.Tanh(), nn.GELU()):
        model[1] = part
        for rows in (4, 6, 9):
            case = Case(model, (torch.randn(rows, 8),), loss=lambda out: out.square().sum())
            assert_same(run_step(gm, case), eager_step(case), tolerance=0.0)


def test_other_sizes_reuse_the_plan(caplog: pytest.LogCaptureFixture) -> None:
    model = Mlp(dropout=0.0)
    gm = optimized(model, "95%", (torch.randn(64, 32),))
    budget_bytes = gm.plan.budget_bytes
    gm = optimized(model, budget_bytes, (torch.randn(64, 32),))
    schedule = gm.plan.schedule
    with caplog.at_level(logging.INFO, logger="remat"):
        gm(torch.randn(63, 32))["loss"].backward()
        assert "by the schedule solved for other sizes" in caplog.text
        assert gm.plan.schedule == schedule
        assert gm.plan.peak_bytes < budget_bytes
        gm.zero_grad()
        gm(torch.randn(8, 32))["loss"].backward()
        assert "nothing needs to be recomputed" in caplog.text
        assert gm.plan.overhead == 0
    gm.zero_grad()
    with pytest.raises(remat.InfeasibleBudget):
        gm(torch.randn(4096, 32))


@pytest.mark.slow
def test_changed_modes_and_values_are_replanned() -> None:
    """Autocast, a frozen parameter, a Python value, an input that now requires a gradient."""
    torch.manual_seed(0)
    model = Mlp(dropout=0.0)
    reference = copy.deepcopy(model)
    gm = optimized(model)
    programs = []

    def compare(autocast: torch.dtype | None = None, grad: bool = False, **kwargs: float) -> None:
        x = torch.randn(64, 32, requires_grad=grad)
        case = Case(model, (x,), kwargs, loss=lambda out: out["loss"], autocast=autocast)
        actual, eager = run_step(gm, case), run_step(reference, case)
        assert_same(actual, eager, tolerance=0.0)
        assert len(actual.input_gradients) == grad
        programs.append(gm.program)

    compare()
    compare(scale=3.0)
    for m in (model, reference):
        m.layers[2].requires_grad_(False)
        m.layers[0].requires_grad_(True)
    compare()
    compare(autocast=torch.bfloat16)
    compare(grad=True)
    assert all(a != b for a, b in combinations(programs, 2))
    compare(autocast=torch.bfloat16)
    assert programs[-1] is programs[3]


def test_a_gradient_at_an_unplanned_output_is_refused() -> None:
    gm = optimized(Mlp())
    out = gm(torch.randn(64, 32))
    with pytest.raises(remat.GuardError, match=r"'hidden'.*differentiate='hidden', or \"all\""):
        (out["loss"] + out["hidden"].sum()).backward()


def test_outputs_may_be_unused() -> None:
    torch.manual_seed(0)
    model = TwoHeads()
    reference = copy.deepcopy(model)
    gm = optimized(model, "100%")
    x = torch.randn(64, 16)
    assert_same_steps(gm, reference, x, loss=lambda out: out.second.square().sum(), tolerance=1e-6)


@pytest.mark.slow
def test_deepcopy_and_pickle_keep_the_plan() -> None:
    torch.manual_seed(0)
    case = PLAIN["mlp"]()
    gm = optimized(case.model, "min", case.args, case.kwargs)
    eager = eager_step(case)
    twin = copy.deepcopy(gm)
    assert twin.plan == gm.plan
    assert all(a is not b for a, b in zip(twin.parameters(), gm.parameters(), strict=True))
    assert_same(run_step(twin, case), eager)
    file = io.BytesIO()
    torch.save(gm, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    assert loaded.plan is not None
    assert loaded.plan.schedule == gm.plan.schedule
    assert_same(run_step(loaded, case), eager)


def test_a_saved_program_runs_in_a_later_process(tmp_path) -> None:
    torch.manual_seed(0)
    case = PLAIN["norms"]()
    eager = eager_step(case)
    gm = optimized(copy.deepcopy(case.model), "min", case.args)
    gm.program.save(tmp_path / "step.json.gz")
    program = remat.Program.load(tmp_path / "step.json.gz")
    assert program == gm.program
    lowered = remat.lower(program, case.model)
    assert_same(run_step(lowered, case), eager)


@pytest.mark.slow
def test_a_lowered_program_checks_its_calls() -> None:
    model = Mlp()
    gm = optimized(model, "70%", (torch.randn(64, 32),))
    lowered = remat.lower(gm.program, model)
    with pytest.raises(remat.GuardError, match=r"shape \(65, 32\) instead of \(64, 32\)"):
        lowered(torch.randn(65, 32))
    with pytest.raises(remat.GuardError, match="dtype float64 instead of float32"):
        lowered(torch.randn(64, 32, dtype=torch.float64))
    with pytest.raises(remat.GuardError, match="dtype float64 instead of float32"):
        remat.lower(gm.program, copy.deepcopy(model).double())
    with pytest.raises(remat.GuardError, match="structure or in a Python value"):
        lowered(torch.randn(64, 32), scale=2.0)
    with (
        pytest.raises(
            remat.GuardError, match=r"bfloat16.*, the program was made with autocast off"
        ),
        torch.autocast("cpu", dtype=torch.bfloat16),
    ):
        lowered(torch.randn(64, 32))
    model.dropout.eval()
    with pytest.raises(remat.GuardError, match="training flags"):
        lowered(torch.randn(64, 32))
    with pytest.raises(remat.GuardError, match="this Linear has none"):
        remat.lower(gm.program, nn.Linear(2, 2))
    with pytest.raises(remat.GuardError, match="shape"):
        remat.lower(gm.program, Mlp(width=33))


def test_tied_weights_must_be_tied() -> None:
    case = PLAIN["tied"]()
    gm = optimized(case.model, "100%", case.args)
    untied = copy.deepcopy(case.model)
    untied.second.weight = nn.Parameter(torch.randn(24, 24))  # type: ignore[union-attr]
    with pytest.raises(remat.GuardError, match="tied"):
        remat.lower(gm.program, untied)


def test_to_converts_the_original_model() -> None:
    model = Mlp(dropout=0.0)
    gm = optimized(model)
    assert gm.to(torch.float64) is gm
    assert all(p.dtype == torch.float64 for p in model.parameters())
    out = gm(torch.randn(64, 32, dtype=torch.float64))
    assert out["loss"].dtype == torch.float64


@pytest.mark.slow
def test_a_custom_output_type_of_the_model_is_kept() -> None:
    case = FAMILIES["bert"]()
    gm = optimized(case.model, "90%")
    out = gm(**case.kwargs)
    assert type(out).__name__ == "MaskedLMOutput"
    assert out.loss is out["loss"]
    assert gm.config is case.model.config


@pytest.mark.parametrize(
    "budget", [True, -5, 0, "8 parsecs", "", "-3GiB", "0%", None, float("nan")]
)
def test_invalid_budgets_are_refused(budget: object) -> None:
    with pytest.raises(remat.BudgetError):
        remat.optimize(Mlp(), budget)  # type: ignore[arg-type]


@pytest.mark.slow
def test_an_infeasible_budget_names_the_smallest() -> None:
    with pytest.raises(remat.InfeasibleBudget) as caught:
        optimized(Mlp(), 1000, (torch.randn(64, 32),))
    smallest = caught.value.min_feasible_bytes
    assert smallest is not None
    gm = optimized(Mlp(), smallest, (torch.randn(64, 32),))
    assert gm.plan.peak_bytes <= smallest


@pytest.mark.slow
def test_auto_is_the_free_memory_of_the_device() -> None:
    for word in ("auto", " AUTO "):
        gm = optimized(Mlp(), word, (torch.randn(64, 32),))
        assert gm.plan.overhead == 0


def test_optimising_twice_is_refused() -> None:
    with pytest.raises(remat.TraceError, match="optimised already"):
        optimized(optimized(Mlp()))


def test_batched_gradients_are_refused() -> None:
    gm = optimized(Mlp())
    loss = gm(torch.randn(64, 32))["loss"]
    parameters = [p for p in gm.parameters() if p.requires_grad]
    with pytest.raises(remat.GuardError, match="is_grads_batched=True"):
        torch.autograd.grad(loss, parameters, torch.ones(2), is_grads_batched=True)
