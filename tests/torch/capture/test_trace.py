"""The contents of a capture, and the errors where there is none."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest
import torch
from tests.helpers.training.models import FAMILIES, PLAIN, Mlp, Norms, Shared, Tied, WithParts
from torch import nn

import remat
from remat.documents.targets import COPY_TARGET
from remat.errors import TraceError
from remat.frontend.capture.model import forward_checks


@pytest.mark.parametrize("name", PLAIN)
def test_a_trace_survives_its_document(name: str) -> None:
    case = PLAIN[name]()
    trace = remat.trace(case.model, case.args, case.kwargs)
    assert remat.Trace.from_json(trace.to_json()) == trace


def test_operations_know_their_modules() -> None:
    trace = remat.trace(Mlp(), torch.randn(4, 32))
    modules = {node.module for node in trace.nodes}
    assert {"layers.1", "layers.3", "dropout"} <= modules
    assert any(node.backward and node.module == "layers.2" for node in trace.nodes)


def test_tied_weights_are_one_placeholder() -> None:
    trace = remat.trace(Tied(), torch.randn(4, 24))
    (weight,) = [p for p in trace.placeholders if p.kind == "parameter"]
    assert weight.target == "first.weight"
    assert weight.aliases == ("second.weight",)


def test_mutated_buffers_are_written_once_in_the_forward() -> None:
    trace = remat.trace(Norms(), torch.randn(2, 3, 8, 8))
    writes = [node for node in trace.nodes if node.target == COPY_TARGET]
    assert len(writes) == 8  # mean, variance and count of two norms, and two buffers of its own
    assert not any(node.backward or node.recomputable for node in writes)


@pytest.mark.slow
def test_only_the_loss_of_a_loss_model_is_differentiated() -> None:
    case = FAMILIES["gpt2"]()
    trace = remat.trace(case.model, kwargs_of(case))
    assert [(o.differentiable, bool(o.tangent)) for o in trace.outputs] == [
        (True, True),
        (True, False),
    ]
    everything = remat.trace(case.model, kwargs_of(case), differentiate="all")
    assert all(o.tangent for o in everything.outputs)


def kwargs_of(case: object) -> dict[str, torch.Tensor]:
    return case.kwargs  # type: ignore[attr-defined]


def test_attention_is_captured_as_eager_mode_runs_it() -> None:
    """Without an explicit mask where eager mode needs none."""
    from tests.helpers.training.models import gpt2

    case = gpt2(dropout=0.0)
    trace = remat.trace(case.model, case.kwargs)
    flash = [n for n in trace.nodes if "flash_attention_for_cpu.default" in n.target]
    assert len(flash) == 2
    assert not any("attn_mask" in node.kwargs for node in flash)


def test_a_capture_changes_no_state_of_the_model() -> None:
    model = Norms()
    before = {k: v.clone() for k, v in model.state_dict().items()}
    generator = torch.get_rng_state()
    remat.trace(model, torch.randn(2, 3, 8, 8, generator=torch.Generator()))
    assert torch.equal(generator, torch.get_rng_state())
    for name, value in model.state_dict().items():
        assert type(value) is torch.Tensor
        assert torch.equal(value, before[name])
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


BRANCH = """
from statistics import median

from torch import nn


class Branch(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        y = self.linear(x)
        return y * median([y.sum(), y.max()])
"""


@pytest.mark.parametrize("folder", ["project", "remat", "torch", "remat/torch", "site-packages"])
def test_errors_name_the_users_line_in_a_folder_of_any_name(folder: str, tmp_path: Path) -> None:
    """The line is found by where torch, remat and Python are installed, not by a word in its
    path."""
    file = tmp_path / folder / "branch.py"
    file.parent.mkdir(parents=True)
    file.write_text(BRANCH)
    module = runpy.run_path(str(file))
    with pytest.raises(remat.TraceError) as caught:
        remat.trace(module["Branch"](), torch.randn(2, 4))
    assert f"captured at {file}:14 (in forward: return y * median" in str(caught.value)


def test_a_block_under_two_names_keeps_its_parameters() -> None:
    model = Shared()
    before = list(model.named_parameters(remove_duplicate=False))
    trace = remat.trace(model, torch.randn(4, 24))
    after = list(model.named_parameters(remove_duplicate=False))
    assert all(a[0] == b[0] and a[1] is b[1] for a, b in zip(before, after, strict=True))
    targets = {p.target: p.aliases for p in trace.placeholders if p.kind == "parameter"}
    assert targets["body.0.0.weight"] == ("body.2.0.weight",)
    assert len(targets) == 4


def test_attributes_added_by_a_forward_are_removed_after_a_failed_capture() -> None:
    class Remembers(WithParts, linear=(4, 4)):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if "seen" not in self._buffers:
                self.register_buffer("seen", x.detach().mean())
            return (self.linear(x) - self.seen).sum()

    model = Remembers()
    with pytest.raises(remat.TraceError, match="the forward of the model registers a buffer"):
        remat.trace(model, torch.randn(2, 4))
    assert not dict(model.named_buffers())
    assert model(torch.randn(2, 4)).requires_grad


class Branch(WithParts, linear=(4, 4)):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.sum() > 0:
            return self.linear(x)
        return -self.linear(x)


def test_data_dependent_control_flow_is_refused_with_its_line() -> None:
    with pytest.raises(remat.TraceError, match=r"test_trace.py:\d+ .*if x.sum\(\) > 0.*Remedy"):
        remat.trace(Branch(), torch.randn(2, 4))


def test_branches_on_constants_are_captured() -> None:
    class Constant(WithParts, linear=(4, 4)):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            positions = torch.arange(4)
            if (positions.diff() == 1).all() and positions.sum().item() == 6:
                return self.linear(x)
            raise AssertionError("the branch that eager does not take")

    trace = remat.trace(Constant(), torch.randn(2, 4))
    assert any(node.target == "aten.addmm.default" for node in trace.nodes)


def test_a_branch_on_a_modified_constant_is_data_dependent() -> None:
    class Changed(WithParts, linear=(4, 4)):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            flags = torch.zeros(4)
            flags[:2].copy_(x[0, :2])
            return self.linear(x) if flags.sum() > 0 else -self.linear(x)

    with pytest.raises(remat.TraceError, match="depends on tensor values"):
        remat.trace(Changed(), torch.randn(2, 4))


def test_a_cache_in_the_outputs_is_refused_with_a_remedy() -> None:
    case = FAMILIES["gpt2"]()
    case.model.config.use_cache = True  # type: ignore[union-attr]
    with pytest.raises(remat.TraceError, match="use_cache=False"):
        remat.trace(case.model, case.kwargs)


def test_a_model_without_gradients_is_refused() -> None:
    with pytest.raises(remat.TraceError, match="no parameter of Mlp"):
        remat.trace(Mlp().requires_grad_(False), torch.randn(4, 32))

    class Detached(WithParts, linear=(4, 4)):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.linear(x).detach()

    with pytest.raises(remat.TraceError, match="no output of the model depends"):
        remat.trace(Detached(), torch.randn(4, 4))


@pytest.mark.parametrize(
    ("inputs", "kwargs", "message"),
    [
        ((), None, "do not fit Mlp.forward"),
        ((torch.zeros(2, 32), 1.0, 2.0), None, "too many positional"),
        ((torch.zeros(2, 32),), {"colour": 1}, "colour"),
        ("text", None, "must be a tuple"),
        ((torch.zeros(2, 33),), None, "cannot be captured"),
        ((torch.zeros(2, 32), object()), None, "is a object, which cannot be traced"),
    ],
)
def test_inputs_that_the_forward_does_not_accept_are_refused(
    inputs: object, kwargs: object, message: str
) -> None:
    with pytest.raises(remat.TraceError, match=message):
        remat.trace(Mlp(), inputs, kwargs)  # type: ignore[arg-type]


def test_an_object_that_is_no_module_is_refused() -> None:
    with pytest.raises(remat.TraceError, match=r"expected a torch.nn.Module"):
        remat.trace(lambda x: x, torch.zeros(1))  # type: ignore[arg-type]


def test_a_buffer_of_another_shape_is_refused() -> None:
    class Grows(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)
            self.register_buffer("seen", torch.zeros(0, 4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.seen = torch.cat([self.seen, x.detach()])
            return self.linear(x).sum()

    model = Grows()
    with pytest.raises(remat.TraceError, match="replaces its buffer 'seen'"):
        remat.trace(model, torch.randn(2, 4))
    assert model.seen.shape == (0, 4)


def test_a_large_constant_is_refused() -> None:
    table = torch.randn(600, 600)

    class Holds(WithParts, linear=(600, 600)):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (self.linear(x) * table[0]).sum()

    with pytest.raises(remat.TraceError, match=r"register it as a buffer"):
        remat.trace(Holds(), torch.randn(2, 600))


def test_a_failed_capture_restores_the_model() -> None:
    """The model stores no value of the capture for its next call."""

    class Caching(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 8)
            self.mask = torch.ones(2, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if self.mask.shape[0] < x.shape[0]:
                self.mask = torch.tril(torch.ones(x.shape[0], x.shape[0]))
            return self.layer(self.mask[: x.shape[0], : x.shape[0]] @ x)

    model = Caching()
    before = model.mask
    with pytest.raises(remat.TraceError):
        remat.trace(model, (torch.randn(4, 8),))
    assert model.mask is before
    model(torch.randn(4, 8)).sum().backward()
    assert type(model.mask) is torch.Tensor


class Grouped(WithParts, linear=(16, 16)):
    """Code as in mixtures of experts: where the model is compiled, it avoids an operation that has
    no fake kernel for float32."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y, weight = self.linear(x), self.linear.weight
        if torch.compiler.is_compiling():
            return (y @ weight).sum()
        rows = torch.tensor([16], dtype=torch.int32)
        return torch.nn.functional.grouped_mm(y, weight[None], offs=rows).sum()


def test_an_operation_without_a_fake_kernel_is_captured_as_compiled_code_calls_it() -> None:
    torch.manual_seed(0)
    model, x = Grouped(), torch.randn(16, 16)
    traced = remat.trace(model, x)
    assert not torch.compiler.is_compiling()
    assert {"aten.mm.default"} <= {node.target for node in traced.nodes}
    gm = remat.optimize(model, "100%", x, costs="cpu")
    torch.testing.assert_close(gm(x), model(x))


def test_an_error_of_the_model_is_an_error_even_if_compiled_code_would_not_raise_it() -> None:
    class Strict(WithParts, linear=(4, 4)):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if torch.compiler.is_compiling():
                return self.linear(x).sum()
            raise ValueError("an odd number of rows")

    with pytest.raises(remat.TraceError, match="an odd number of rows"):
        remat.trace(Strict(), torch.zeros(3, 4))


def test_the_error_of_a_failed_capture_is_that_of_eager_code() -> None:
    class Broken(WithParts, linear=(8, 8)):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            raise ValueError("compiled" if torch.compiler.is_compiling() else "eager")

    with pytest.raises(remat.TraceError, match="ValueError: eager"):
        remat.trace(Broken(), torch.zeros(4, 8))


class _TokenLoop(nn.Module):
    def __init__(self, steps: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        self.steps = steps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(self.steps):
            x = x * self.weight
        return x.sum()


def test_a_loop_over_too_many_steps_ends_with_its_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forward_checks, "MAX_CALLS", 50)
    assert remat.trace(_TokenLoop(49), torch.randn(2)).nodes  # and one sum
    with pytest.raises(TraceError, match=r"more than 50 operations .*test_trace\.py:\d+ \(in forw"):
        remat.trace(_TokenLoop(50), torch.randn(2))
