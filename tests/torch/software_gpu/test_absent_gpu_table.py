"""The table of traces for an absent GPU: its switches, and the differences that it explains."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from benchmarks.software_gpu.absent_gpu import explain, main

from remat.documents.trace import Trace

_SCALAR = "aten.mul.Tensor mul_2: ('{}', {}, (), 0, 'cuda:0') absent, ('float32', (), (), 0, 'cpu')"
_HISTOGRAM = (
    "aten.{} x: ('float32', {}, (1,), 0, 'cuda:0') absent, ('int32', (4,), (1,), 0, 'cuda:0')"
)


@pytest.mark.parametrize(
    ("family", "text", "is_explained"),
    [
        ("bart", _SCALAR.format("float32", "()"), True),
        ("bart", _SCALAR.format("int64", "()"), False),
        ("bart", _SCALAR.format("float32", "(4,)"), False),
        ("mixtral", _HISTOGRAM.format("histc.default", "(4,)"), True),
        ("mixtral", _HISTOGRAM.format("histc.default", "(8,)"), False),
        ("mixtral", _HISTOGRAM.format("mul.Tensor", "(4,)"), False),
        ("llama", _HISTOGRAM.format("histc.default", "(4,)"), False),
    ],
)
def test_only_listed_differences_are_explained(family: str, text: str, is_explained: bool) -> None:
    text = f"{text} present"
    reasons, unexplained = explain(family, "tensors", [text, "another"])
    assert unexplained == (["another"] if is_explained else [text, "another"])
    assert len(reasons) == is_explained
    assert explain(family, "storages", [text]) == ([], [text])


@pytest.mark.slow
def test_the_trace_for_the_absent_gpu_has_the_switches_of_the_software_gpu(tmp_path: Path) -> None:
    """cuDNN's attention is disabled for both, as its library needs a device."""
    is_cudnn_enabled = torch.backends.cudnn.enabled
    has_cudnn_attention = torch.backends.cuda.cudnn_sdp_enabled()
    try:
        main(["llama", "bfloat16", "--trace", str(tmp_path / "trace.json")])
    finally:
        torch.backends.cudnn.enabled = is_cudnn_enabled
        torch.backends.cuda.enable_cudnn_sdp(has_cudnn_attention)
    targets = {node.target for node in Trace.load(tmp_path / "trace.json").nodes}
    attention = {name for name in targets if "scaled_dot_product" in name and "back" not in name}
    assert attention == {"aten._scaled_dot_product_efficient_attention.default"}
