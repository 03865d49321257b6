"""Documents are read as they were written; everything else is refused by name."""

from __future__ import annotations

import copy
import functools
import gzip
import json
import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from tests.helpers.programs import recompute_all, traced
from tests.helpers.training.models import FAMILIES, PLAIN, Case
from torch.fx.graph import _illegal_names

import remat
from remat.documents.arguments import Ref
from remat.documents.names import check_variable
from remat.documents.program import Statement
from remat.documents.records import Node
from remat.errors import DocumentError, RematError

CASES = {name: make for name, make in (PLAIN | FAMILIES).items() if name not in ("mlp-bf16", "t5")}
SMALL = ("tied", "norms", "two-heads", "mlp")
EXAMPLES = int(os.environ.get("REMAT_EXAMPLES", "50"))
FUZZ = settings(
    max_examples=EXAMPLES,
    derandomize=True,
    database=None,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)


@functools.cache
def documents(name: str) -> tuple[Case, remat.Trace, remat.Program]:
    """Return a case with its trace, and a program of it that recomputes what it can."""
    torch.manual_seed(0)
    case = CASES[name]()
    trace = traced(case.model, *case.args, **case.kwargs)
    return case, trace, recompute_all(trace)


def tied() -> dict[str, Any]:
    return json.loads(documents("tied")[2].to_json())


def changed(data: dict[str, Any], path: str, value: object) -> str:
    """Return the document's text with one place replaced, such as "forward.0.target"."""
    data = copy.deepcopy(data)
    *parents, last = [int(part) if part.isdecimal() else part for part in path.split(".")]
    place: Any = data
    for part in parents:
        place = place[part]
    place[last] = value
    return json.dumps(data)


# -- round trips ----------------------------------------------------------------------------------


@pytest.mark.slow_cases("vit", "llama", "resnet", "gpt2-mask", "bert", "unet")
@pytest.mark.parametrize("name", CASES)
def test_the_round_trip_is_the_identity(name: str, tmp_path: Path) -> None:
    _, trace, program = documents(name)
    for document in (trace, program):
        kind = type(document)
        assert kind.from_json(document.to_json()) == document
        assert kind.from_json(document.to_json().encode()).to_json() == document.to_json()
        document.save(tmp_path / "plain.json")
        document.save(tmp_path / "packed.json.gz")
        assert kind.load(tmp_path / "plain.json") == document
        assert kind.load(tmp_path / "packed.json.gz") == document
        assert (tmp_path / "packed.json.gz").stat().st_size < len(document.to_json()) / 2


def test_a_plan_of_a_real_model_survives_its_document(tmp_path: Path) -> None:
    _, trace, _ = documents("resnet")
    plan = remat.solve(trace, "90%", remat.Auto(gap=0.02, time_limit=3.0))
    plan.save(tmp_path / "plan.json.gz")
    loaded = remat.Plan.load(tmp_path / "plan.json.gz")
    assert loaded == plan
    assert remat.rewrite(trace, loaded.schedule) == remat.rewrite(trace, plan.schedule)


def test_equal_documents_are_equal_files(tmp_path: Path) -> None:
    """No time stamps inside: a document can be addressed by its bytes."""
    program = documents("tied")[2]
    for name in ("a.gz", "b.gz"):
        program.save(tmp_path / name)
    assert (tmp_path / "a.gz").read_bytes() == (tmp_path / "b.gz").read_bytes()


# -- files that are no documents ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "no JSON document"),
        ("\0", "no JSON document"),
        ("{", "no JSON document"),
        ("null", "found 'NoneType'"),
        ("[]", "found 'list'"),
        ("{}", "found 'None'"),
        (b"\xff\xfe\x00", "no JSON document"),
        (b"\x80\x04\x95pickle", "no JSON document"),
        ('{"format": "remat.plan", "version": 1}', "expected a remat.program document"),
        ('{"format": "remat.program", "version": 1}', "version 1, this remat reads version 2"),
        ('{"format": "remat.program"}', "version None"),
        ('{"format": "remat.program", "format": "remat.program"}', "two values for one key"),
        ("[" * 100_000, "nested too deeply"),
        ('{"a":' * 100_000, "nested too deeply"),
        ('{"format": "remat.program", "version": ' + "9" * 5000 + "}", "no JSON document"),
    ],
)
def test_files_that_are_no_document_are_refused(text: str | bytes, message: str) -> None:
    with pytest.raises(DocumentError, match=message):
        remat.Program.from_json(text)


@pytest.mark.parametrize("share", [0.0, 0.3, 0.99])
def test_truncated_documents_are_refused(share: float, tmp_path: Path) -> None:
    program = documents("tied")[2]
    text = program.to_json()
    with pytest.raises(DocumentError):
        remat.Program.from_json(text[: int(share * len(text))])
    packed = gzip.compress(text.encode())
    (tmp_path / "cut.gz").write_bytes(packed[: int(share * len(packed))])
    with pytest.raises(DocumentError):
        remat.Program.load(tmp_path / "cut.gz")


def test_damaged_files_are_refused(tmp_path: Path) -> None:
    packed = bytearray(gzip.compress(documents("tied")[2].to_json().encode()))
    rng = random.Random(0)
    for _ in range(50):
        damaged = bytearray(packed)
        for _ in range(3):
            damaged[rng.randrange(10, len(packed))] ^= 1 << rng.randrange(8)
        (tmp_path / "damaged.gz").write_bytes(damaged)
        with pytest.raises(DocumentError):
            remat.Program.load(tmp_path / "damaged.gz")
    with pytest.raises(DocumentError, match=r"nowhere\.json"):
        remat.Program.load(tmp_path / "nowhere.json")
    with pytest.raises(DocumentError):
        remat.Program.load(tmp_path)


def test_a_file_that_unpacks_without_end_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("remat.documents.base.MAX_BYTES", 1 << 20)
    (tmp_path / "bomb.gz").write_bytes(gzip.compress(b" " * (20 << 20)))
    with pytest.raises(DocumentError, match="too long to be a real document"):
        remat.Program.load(tmp_path / "bomb.gz")


# -- forgeries: refused at the latest by `lower` ------------------------------------------------

NAME = "forward.0.results.0.name"
FORGED: list[tuple[str, object, str]] = [
    *(
        (place, name, "not a plain identifier")
        for place in (NAME, "placeholders.0.name", "forward.0.args.0.ref", "saved.0")
        for name in ("a;import os", "__class__", "lambda", "", "a b", "a\n", "é", "x" * 201)
    ),
    *(
        (place, name, "generated code has another use of it")
        for place in (NAME, "placeholders.0.name", "forward.0.args.0.ref", "saved.0")
        for name in ("self", "torch", "args_list", "args_iter", "device", "next")
    ),
    *(
        ("forward.0.target", target, "not of the form")
        for target in ("os.system", "torch.load", "", "a.b.c.d", "aten.x;y.z", "__main__.a.b")
    ),
    ("forward.0.target", "os.system.default", "namespace os are not allowed"),
    ("forward.0.target", "torch.load.default", "namespace torch are not allowed"),
    ("forward.0.target", "aten.__class__.x", "no operation"),
    ("forward.0.target", "aten.__class__.__init__", "no operation"),
    ("forward.0.target", "aten.mm.__call__", "no operation"),
    ("forward.0.target", "aten.from_file.default", "not allowed"),
    ("forward.0.target", "aten.relu_.default", "mutates its arguments"),
    ("forward.0.target", "remat.anything.default", "none of remat's operations"),
    ("forward.0.target", "remat.accumulate.default", "is for the backward"),
    ("backward.0.target", "remat.accumulate.default", "needs a parameter and a gradient"),
    ("forward.0.target", "x" * 10_000_000, "not of the form"),
    ("forward.0.target", 7, "valid string"),
    ("forward.0.args", {"ref": "x"}, "must be a list"),
    ("forward.0.args.0", {"ref": "x", "and": 1}, "no argument of an operation"),
    ("forward.0.args.0", {"code": "print()"}, "no argument of an operation"),
    ("forward.0.args.0", {"dtype": "load"}, "'load' is no torch dtype"),
    ("forward.0.args.0", {"device": "toaster"}, "no torch device"),
    ("forward.0.args.0", {"ref": "absent"}, "reads absent, which is not defined"),
    ("forward.0.args.0", 10**400, "does not fit into 64 bits"),
    ("forward.0.args.0", "x" * 10_000_000, "10,000,000 characters"),
    ("forward.0.kwargs", {"a=1, b": 1}, "not a plain identifier"),
    ("forward.0.rng_action", "save", "not a plain identifier"),
    ("forward.0.rng_action", "replay", "which is not defined"),
    ("forward.0.results.0.position", 2**63, "less than or equal to"),
    ("forward.0.rng_state", "x" * 10_000_000, "at most 200 characters"),
    ("placeholders.0.target", "a\x00b", "pattern"),
    ("placeholders.0.target", "a.b.c", "has none"),
    ("placeholders.0.target", "", "has none"),
    ("placeholders.0.kind", "secret", "'parameter', 'buffer'"),
    ("placeholders.0.storage", 1.5, "integer"),
    ("model", "x" * 10_000_000, "at most 500 characters"),
    ("unknown", 1, "Extra inputs are not permitted"),
    ("forward.0.unknown", 1, "Extra inputs are not permitted"),
    ("predicted_peak_bytes", -1, "greater than or equal to 0"),
    ("predicted_peak_bytes", float("nan"), "integer"),
    ("predicted_peak_bytes", float("inf"), "integer"),
    ("predicted_peak_bytes", "1", "integer"),
    ("predicted_peak_bytes", None, "integer"),
    ("saved.0", "absent", "absent is not defined"),
    ("outputs.0.name", "absent", "absent is not defined"),
    ("outputs.0.tangent", "absent", "is no tangent"),
    ("gradients.0.name", "absent", "absent is not defined"),
    ("gradients.0.placeholder", "absent", "is not defined"),
    ("forward", [1] * 300_000, "forward.0: Input should be an object"),
    ("unknown", {f"k{i}": 0 for i in range(300_000)}, "has 300000 keys"),
    ("environment.autocast", ["cpu:float32"] * 3 + [4], "valid string"),
    ("inputs", {"kind": "leaf", "leaf": 3}, "placeholders of inputs"),
    ("result", {"kind": "leaf", "leaf": 1}, "are not the outputs"),
    ("result", {"kind": "leaf", "leaf": -1}, "greater than or equal to 0"),
    ("result", {"kind": "value", "value": 1}, "are not the outputs"),
    ("result", {"kind": "dict", "keys": [], "children": [{"kind": "leaf"}]}, "0 keys, 1 items"),
]


@pytest.mark.parametrize(
    ("path", "value", "message"), FORGED, ids=[f"{i}-{p}" for i, (p, _, _) in enumerate(FORGED)]
)
def test_forged_fields_are_refused_by_name(path: str, value: object, message: str) -> None:
    with pytest.raises(RematError, match=message) as caught:
        remat.lower(
            remat.Program.from_json(changed(tied(), path, value)), documents("tied")[0].model
        )
    assert len(str(caught.value)) < 2000


def test_variables_cannot_have_names_used_by_generated_code() -> None:
    """Generated code would call such a variable instead of the function of that name."""
    for name in (*_illegal_names, "self", "args_list", "args_iter"):
        with pytest.raises(ValueError, match="not a plain identifier"):
            check_variable(name)
    call = {"target": "aten.empty.memory_format", "args": [[2]], "kwargs": {"device": None}}
    assert Statement.model_validate_json(json.dumps(call)).kwargs == {"device": None}


def nested(depth: int, kind: str) -> dict[str, Any]:
    structure: dict[str, Any] = {"kind": "leaf"}
    for _ in range(depth):
        structure = {"kind": kind, "keys": [0], "children": [structure]}
    return structure


@pytest.mark.parametrize("depth", [33, 60, 80, 150])
def test_deeply_nested_structures_are_refused(depth: int) -> None:
    assert remat.Program.from_json(changed(tied(), "result", nested(31, "dict")))
    with pytest.raises(DocumentError, match=r"32 deep|recursion limit"):
        remat.Program.from_json(changed(tied(), "result", nested(depth, "dict")))


def test_deeply_nested_arguments_are_refused() -> None:
    argument: object = 0
    for _ in range(40):
        argument = [argument]
    with pytest.raises(DocumentError, match="16 deep"):
        remat.Program.from_json(changed(tied(), "forward.0.args.0", argument))


@pytest.mark.parametrize(
    "name",
    ["os:system", "builtins:eval", "builtins:type", "builtins:object.__class__", "no.such:Type",
     "json", ":", "", "subprocess:Popen", "torch.nn:Linear", "remat.errors:RematError"],
)  # fmt: skip
@pytest.mark.parametrize("kind", ["object", "namedtuple", "dict"])
def test_output_types_are_data_types_only(name: str, kind: str) -> None:
    if kind == "dict" and not name:
        return  # a plain dict
    structure = {"kind": kind, "type": name, "keys": ["args"], "children": [{"kind": "leaf"}]}
    program = remat.Program.from_json(changed(tied(), "result", structure))
    with pytest.raises(DocumentError, match="not a dataclass, named tuple or dict"):
        remat.lower(program, documents("tied")[0].model)


@pytest.mark.parametrize("data", ["!!!", "AAA", "AAAA", "é"])
def test_damaged_constants_are_refused(data: str) -> None:
    case, _, program = documents("two-heads")
    index = next(i for i, p in enumerate(program.placeholders) if p.kind == "constant")
    text = changed(json.loads(program.to_json()), f"placeholders.{index}.data", data)
    with pytest.raises(DocumentError, match="is damaged"):
        remat.lower(remat.Program.from_json(text), case.model)


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("storage_bytes.0", -1, "greater than or equal to 0"),
        ("storage_bytes.0", 2**62, "less than 4611686018427387904"),
        ("storage_bytes.0", float("inf"), "integer"),
        ("storage_bytes", [], "does not exist"),
        ("nodes.0.cost_s", -1.0, "greater than or equal to 0"),
        ("nodes.0.cost_s", float("nan"), "finite"),
        ("nodes.0.workspace_bytes", -1, "greater than or equal to 0"),
        ("nodes.0.view", "yes", "boolean"),
        ("nodes.0.args.0", {"ref": "loss_that_is_not_there"}, "before it is defined"),
        ("nodes.0.results.0.storage", 0, "wrongly marked as view"),
        ("placeholders.1.name", "backward_start", "defined twice"),
        ("gradients.0.name", "absent", "is not defined"),
        ("outputs.0.tangent", "absent", "is no tangent"),
    ],
)
def test_forged_traces_are_refused(path: str, value: object, message: str) -> None:
    data = json.loads(documents("mlp")[1].to_json())
    first = next(i for i, node in enumerate(data["nodes"]) if not node["view"])
    path = path.replace("nodes.0", f"nodes.{first}")
    with pytest.raises(DocumentError, match=message):
        remat.Trace.from_json(changed(data, path, value))


def test_the_text_of_a_document_is_short() -> None:
    """Its JSON has everything; a document has thousands of parts."""
    _, trace, program = documents("mlp")
    texts = [text for document in (trace, program) for text in (repr(document), str(document))]
    texts.append(repr(remat.Program.from_json(program.to_json())))
    assert max(map(len, texts)) < 400
    backward = sum(node.backward for node in trace.nodes if not node.view)
    assert f"backward_operations={backward}" in repr(trace)
    assert f"forward_statements={len(program.forward)}" in repr(program)


def test_cycles_and_duplicates_are_refused() -> None:
    data = json.loads(documents("mlp")[1].to_json())
    backwards = data | {"nodes": data["nodes"][::-1]}
    with pytest.raises(DocumentError, match="before it is defined"):
        remat.Trace.from_json(json.dumps(backwards))
    twice = data | {"nodes": [data["nodes"][0], *data["nodes"]]}
    with pytest.raises(DocumentError, match=r"owner|twice"):
        remat.Trace.from_json(json.dumps(twice))
    program = json.loads(documents("mlp")[2].to_json())
    for key in ("placeholders", "saved"):
        doubled = program | {key: [*program[key], program[key][0]]}
        with pytest.raises(DocumentError, match=r"same name|twice"):
            remat.Program.from_json(json.dumps(doubled))


# -- fuzz -----------------------------------------------------------------------------------------

JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.integers(-2, 9)
    | st.floats()
    | st.text(max_size=8)
    | st.sampled_from(["aten.mm.default", "float32", "leaf", "tangent", "save", "cuda:9", "sub"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["ref", "dtype", "device", "float", "kind", "x"]), inner, max_size=2
        )
    ),
    max_leaves=4,
)


def places(data: object) -> Iterator[tuple[Any, Any]]:
    """Yield every (container, key) of a JSON value."""
    if isinstance(data, (dict, list)):
        keys = list(data) if isinstance(data, dict) else range(len(data))
        for key in keys:
            yield data, key
            yield from places(data[key])


def mutate(data: st.DataObject, document: dict[str, Any]) -> None:
    """Delete something, replace it, take the value of another place, or swap list items."""
    all_places = list(places(document))
    container, key = all_places[data.draw(st.integers(0, len(all_places) - 1), "place")]
    kind = data.draw(st.sampled_from(["delete", "replace", "move", "swap"]), "kind")
    if kind == "delete":
        del container[key]
    elif kind == "replace":
        container[key] = data.draw(JSON, "value")
    elif kind == "move":
        other, name = all_places[data.draw(st.integers(0, len(all_places) - 1), "from")]
        container[key] = copy.deepcopy(other[name])
    elif isinstance(container, list):
        at = data.draw(st.integers(0, len(container) - 1), "with")
        container[key], container[at] = container[at], container[key]


@pytest.mark.slow
@FUZZ
@hypothesis.given(st.sampled_from(SMALL), st.data())
def test_a_mutated_program_is_valid_or_refused(name: str, data: st.DataObject) -> None:
    case, _, program = documents(name)
    document = json.loads(program.to_json())
    for _ in range(data.draw(st.integers(1, 2))):
        mutate(data, document)
    try:
        read = remat.Program.from_json(json.dumps(document))
    except DocumentError:
        return
    assert remat.Program.from_json(read.to_json()) == read
    try:
        remat.lower(read, case.model)
    except RematError:
        return


@FUZZ
@hypothesis.given(st.sampled_from(SMALL), st.data())
def test_a_mutated_trace_is_valid_or_refused(name: str, data: st.DataObject) -> None:
    document = json.loads(documents(name)[1].to_json())
    mutate(data, document)
    try:
        read = remat.Trace.from_json(json.dumps(document))
    except DocumentError:
        return
    assert remat.Trace.from_json(read.to_json()) == read


@FUZZ
@hypothesis.given(st.text(max_size=40) | st.binary(max_size=40))
def test_noise_is_refused(text: str | bytes) -> None:
    for kind in (remat.Trace, remat.Program, remat.Plan):
        with pytest.raises(DocumentError):
            kind.from_json(text)


# -- files ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["step.json", "step.json.gz"])
def test_an_interrupted_write_leaves_the_old_file(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, new = documents("tied")[2], documents("mlp")[2]
    old.save(tmp_path / name)

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    real = Path.open

    def half(path: Path, mode: str) -> None:
        """Write a file that exists but is still empty."""
        real(path, mode).close()
        raise KeyboardInterrupt

    for where in ("replace", "write"):
        with monkeypatch.context() as patch:
            if where == "replace":
                patch.setattr(Path, "replace", interrupted)
            else:
                patch.setattr(Path, "open", half)
            with pytest.raises(KeyboardInterrupt):
                new.save(tmp_path / name)
        assert remat.Program.load(tmp_path / name) == old
        assert [path.name for path in tmp_path.iterdir()] == [name]


def test_a_copy_with_other_arguments_has_their_operand_names() -> None:
    node = Node(name="n", target="aten.add.Tensor", args=(Ref("a"), Ref("b")))
    assert node.operand_names == ("a", "b")
    assert node.model_copy(update={"cost_s": 1.0}).operand_names == ("a", "b")
    assert node.model_copy(update={"args": (Ref("c"),)}).operand_names == ("c",)
    assert node.model_copy(update={"kwargs": {"out": Ref("d")}}).operand_names == ("a", "b", "d")
