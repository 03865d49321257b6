"""The contents of a capture, and the errors where there is none."""

from __future__ import annotations

import pytest
import torch
from tests.helpers.training.models import FAMILIES, PLAIN, Mlp, Norms, Shared, Tied, WithParts

import remat
from remat.documents.targets import COPY_TARGET
from remat.frontend.capture.eager_kernels.autocast import with_cuda_autocast
from remat.frontend.capture.eager_kernels.cuda_kernels import CUDA_KERNELS, absent_gpu_kernels
from remat.frontend.common.target_gpu import TargetGpu


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


def state_of_torch() -> tuple[object, ...]:
    """Return what a capture changes of torch, while it runs."""
    aten = torch.ops.aten
    operators = {
        *(aten.dropout.default, aten.bernoulli_.float, aten._to_copy.default),
        *CUDA_KERNELS,
        *absent_gpu_kernels(TargetGpu("h100", (9, 0))),
        *(operator for operator, _ in with_cuda_autocast({})),
    }
    return (
        {str(operator): dict(operator.py_kernels) for operator in operators},
        torch._C._dispatch_tls_is_dispatch_key_included(torch._C.DispatchKey.Functionalize),
        torch._C._get_mkldnn_enabled(),
        torch.clear_autocast_cache,
        torch.is_autocast_cache_enabled(),
        torch.is_autocast_enabled("cpu"),
        torch.get_autocast_dtype("cpu"),
        torch.autocast_increment_nesting(),
        torch.autocast_decrement_nesting(),
    )


@pytest.mark.parametrize("device", [None, "h100"])
def test_a_capture_restores_torch(device: str | None) -> None:
    before = state_of_torch()
    remat.trace(Mlp(), torch.randn(4, 32), device=device)
    assert state_of_torch() == before

    class Fails(WithParts, linear=(4, 4)):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            raise ValueError("no", state_of_torch())

    with torch.autocast("cpu", torch.float16), pytest.raises(remat.TraceError, match="no") as error:
        remat.trace(Fails(), torch.randn(4, 4), device=device)
    assert error.value.__cause__ is not None
    assert state_of_torch() == before
    assert error.value.__cause__.args[1][0] != before[0], "the capture registers kernels"


def test_a_block_under_two_names_keeps_its_parameters() -> None:
    model = Shared()
    before = list(model.named_parameters(remove_duplicate=False))
    trace = remat.trace(model, torch.randn(4, 24))
    after = list(model.named_parameters(remove_duplicate=False))
    assert all(a[0] == b[0] and a[1] is b[1] for a, b in zip(before, after, strict=True))
    targets = {p.target: p.aliases for p in trace.placeholders if p.kind == "parameter"}
    assert targets["body.0.0.weight"] == ("body.2.0.weight",)
    assert len(targets) == 4


def test_branches_on_constants_are_captured() -> None:
    class Constant(WithParts, linear=(4, 4)):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            positions = torch.arange(4)
            if (positions.diff() == 1).all() and positions.sum().item() == 6:
                return self.linear(x)
            raise AssertionError("the branch that eager does not take")

    trace = remat.trace(Constant(), torch.randn(2, 4))
    assert any(node.target == "aten.addmm.default" for node in trace.nodes)


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
