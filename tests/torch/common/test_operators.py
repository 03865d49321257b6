"""Only functional torch operations can be called by name, and arguments survive their encoding."""

from __future__ import annotations

import pytest
import torch
from torch._ops import OpOverload

from remat.documents import arguments
from remat.documents.arguments import Literal, Ref
from remat.errors import DocumentError, TraceError
from remat.frontend.common import operators
from remat.frontend.common.operators import (
    argument_from_torch,
    argument_to_torch,
    register_operator,
    resolve_operator,
)


@pytest.mark.parametrize(
    "target", ["aten.add.Tensor", "aten.mm.default", "aten.copy_.default", "prims.iota.default"]
)
def test_supported_operations_are_resolved_by_name(target: str) -> None:
    operator = resolve_operator(target)
    assert isinstance(operator, OpOverload)
    assert str(operator) == target


@pytest.mark.parametrize(
    ("target", "reason"),
    [
        ("aten.add_.Tensor", "mutates its arguments"),
        ("aten.add.out", "mutates its arguments"),
        ("aten.resize_.default", "mutates its arguments"),
        ("aten.from_file.default", "not allowed"),
        ("aten.save.default", "not allowed"),
        ("aten.manual_seed.default", "not allowed"),
        ("os.system.default", "namespace os"),
        ("inductor.anything.default", "namespace inductor"),
        ("remat.nothing.default", "none of remat's"),
        ("aten.no_such_operation.default", "has no operation"),
        ("aten.add.no_such_overload", "has no operation"),
        ("aten.add.overloads", "has no operation"),
        ("aten.name.default", "has no operation"),
        ("aten.add", "not of the form"),
        ("aten.add.Tensor.x", "not of the form"),
        ("aten.__class__.mro", "has no operation"),
        ("__main__.a.b", "not of the form"),
        ("aten.add.Tensor; import os", "not of the form"),
    ],
)
def test_everything_else_is_refused_by_name(target: str, reason: str) -> None:
    with pytest.raises(DocumentError, match=reason):
        resolve_operator(target)


def test_remats_own_operators_are_registered_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operators, "REMAT_OPERATIONS", {})

    def twice(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    register_operator("remat.twice.default", twice)
    assert register_operator("remat.twice.default", twice) is twice
    assert resolve_operator("remat.twice.default") is twice
    with pytest.raises(ValueError, match="registered already"):
        register_operator("remat.twice.default", print)
    with pytest.raises(ValueError, match="namespace remat"):
        register_operator("aten.twice.default", twice)


CONSTANTS = [
    None,
    True,
    3,
    0.5,
    float("inf"),
    1 + 2j,
    "tanh",
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.device("cpu"),
    torch.device("cuda:1"),
    torch.strided,
    torch.preserve_format,
    torch.channels_last,
    [1, [2, 3], torch.int64],
]


@pytest.mark.parametrize("value", CONSTANTS, ids=str)
def test_constant_arguments_survive_json(value: object) -> None:
    argument = argument_from_torch(value)
    decoded = arguments.decode_argument(arguments.encode_argument(argument))
    assert decoded == argument
    assert argument_to_torch(decoded, {}) == value
    assert type(argument_to_torch(decoded, {})) is type(value)


def test_tensor_arguments_are_encoded_by_name() -> None:
    x = torch.ones(2)
    argument = argument_from_torch((x, 1), lambda value: Ref("x"))
    assert argument == (Ref("x"), 1)
    decoded = argument_to_torch(argument, {"x": x})
    assert isinstance(decoded, list)
    assert decoded[0] is x


def test_arguments_without_an_encoding_are_refused_by_name() -> None:
    with pytest.raises(TraceError, match="Generator"):
        argument_from_torch(torch.Generator())
    with pytest.raises(DocumentError, match="no tensor x"):
        argument_to_torch(Ref("x"), {})


@pytest.mark.parametrize(
    ("kind", "text"),
    [("dtype", "load"), ("dtype", "nope"), ("layout", "float32"), ("device", "disk"), ("os", "x")],
)
def test_wrong_literals_are_refused(kind: str, text: str) -> None:
    with pytest.raises(DocumentError, match="is no torch"):
        argument_to_torch(Literal(kind, text), {})
