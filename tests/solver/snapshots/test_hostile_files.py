"""Files that are no snapshots, or try to harm who reads them, are refused."""

from __future__ import annotations

import os
import pickle
import struct
from collections.abc import Callable

import pytest

from remat.errors import DocumentError
from remat.snapshots.read import read_snapshot
from remat.snapshots.unpickle import load_plain_data
from remat.snapshots.why import why

SENTINEL = "REMAT_TEST_SENTINEL"


class _Reduced:
    """An object whose pickle calls a function."""

    def __init__(self, function: Callable[..., object], *args: object) -> None:
        self.call = function, args

    def __reduce__(self) -> tuple[Callable[..., object], tuple[object, ...]]:
        return self.call


class _Stateful:
    def __init__(self) -> None:
        self.state = 1


class _Persistent(pickle.Pickler):
    def persistent_id(self, obj: object) -> str | None:
        return "id" if obj == "persistent" else None


def _persistent() -> bytes:
    import io

    file = io.BytesIO()
    _Persistent(file, 4).dump({"segments": ["persistent"]})
    return file.getvalue()


def _raw(*opcodes: bytes) -> bytes:
    return b"\x80\x04" + b"".join(opcodes) + b"."


def _text(text: str) -> bytes:
    return b"\x8c" + bytes([len(text)]) + text.encode()


def _snapshot(**fields: object) -> bytes:
    return pickle.dumps({"segments": [], "device_traces": [], **fields}, protocol=4)


def _event(**fields: object) -> bytes:
    event = {"action": "alloc", "addr": 1 << 40, "size": 8, "stream": 0, "frames": [], **fields}
    return _snapshot(device_traces=[[event]])


_BLOCK = {"size": 1, "state": "inactive"}
_CALL = _text("os") + _text("system")

HOSTILE: dict[str, bytes] = {
    # Code.
    "calls a function": pickle.dumps(_Reduced(os.putenv, SENTINEL, "1")),
    "calls a function, protocol 0": pickle.dumps(_Reduced(os.putenv, SENTINEL, "1"), protocol=0),
    "calls a function, protocol 2": pickle.dumps(_Reduced(os.putenv, SENTINEL, "1"), protocol=2),
    "calls a function in a list": pickle.dumps({"segments": [_Reduced(eval, "1")]}),
    "an instance": pickle.dumps(_Stateful()),
    "a class": pickle.dumps(dict[str, int]),
    "GLOBAL": _raw(b"cos\nsystem\n", _text("true"), b"\x85R"),
    "STACK_GLOBAL": _raw(_CALL, b"\x93"),
    "INST": _raw(b"(", _text("true"), b"ios\nsystem\n"),
    "OBJ": _raw(b"(cos\nsystem\n", _text("true"), b"o"),
    "NEWOBJ": _raw(b"cbuiltins\nobject\n)\x81"),
    "NEWOBJ_EX": _raw(b"cbuiltins\nobject\n)}\x92"),
    "REDUCE without a name": _raw(b")R"),
    "BUILD": _raw(b"}}b"),
    "EXT1": _raw(b"\x82\x01"),
    "EXT2": _raw(b"\x83\x01\x00"),
    "EXT4": _raw(b"\x84\x01\x00\x00\x00"),
    "PERSID": _raw(b"Pname\n"),
    "BINPERSID": _persistent(),
    "out-of-band buffer": _raw(b"\x97"),
    # Objects that no snapshot has.
    "bytes": _snapshot(segments=[b"x"]),
    "a bytearray": pickle.dumps({"segments": bytearray(b"x" * 300)}, protocol=5),
    "a set": _snapshot(segments={1}),
    "a frozenset": _snapshot(segments=frozenset({1})),
    "a tuple of three": _snapshot(segments=(1, 2, 3)),
    "nested tuples as a key": _raw(b"}(", b"K\x00K\x00\x86" + b"K\x00\x86" * 100_000, b"K\x01u"),
    "an integer of 2 MiB": _raw(b"\x8b" + struct.pack("<i", 1 << 21) + b"\x01" * (1 << 21)),
    "text opcodes": _raw(b"(dS'segments'\n(ls"),
    "DUP": _raw(b"]" + b"2" * 1000),
    "POP": _raw(b"]]0"),
    # Sizes.
    "a memo index of 2 billion": _raw(b"]r\xff\xff\xff\x7f"),
    "a memo index that grows": _raw(b"]" + b"r\x00\x00\x40\x00" * 10),
    "a text of 4 GiB": _raw(b"X\xff\xff\xff\xff"),
    "a text of 16 EiB": _raw(b"\x8d" + b"\xff" * 8),
    "a text of 2 MiB": _raw(b"X" + struct.pack("<I", 1 << 21) + b"a" * (1 << 21)),
    "a million empty dicts": _raw(b"]\x94(" + b"}" * 1_000_000 + b"e"),
    "a million nested lists": _raw(b"]" * 1_000_000 + b"a" * 999_999),
    "a million marks": _raw(b"(" * 1_000_000),
    "a million times None": _raw(b"](" + b"N" * 1_000_000 + b"e"),
    "a million memo entries": _raw(b"]" + b"\x94" * 1_000_000),
    "a list of blocks in many segments": _snapshot(segments=[{"blocks": [_BLOCK] * 5000}] * 5000),
    # Damage.
    "empty": b"",
    "a zip file": b"PK\x03\x04" + b"\0" * 100,
    "JSON": b'{"segments": []}',
    "protocol 9": b"\x80\x09}.",
    "no end": b"\x80\x04}",
    "cut in a text": b"\x80\x04\x8c\x08segm",
    "data after the end": pickle.dumps({"segments": []}) + b"more",
    "two pickles": pickle.dumps({"segments": []}) * 2,
    "no stack": _raw(b""),
    "an unknown memo entry": _raw(b"h\x07"),
    "a key that is a list": _raw(b"}]K\x01s"),
    "items without a mark": _raw(b"}e"),
    # Plain data that is no snapshot.
    "a number": _raw(b"K\x01"),
    "an empty dict": _raw(b"}"),
    "segments that are a dict": _snapshot(segments={}),
    "segments of numbers": _snapshot(segments=[1]),
    "blocks of numbers": _snapshot(segments=[{"blocks": [1]}]),
    "events of numbers": _snapshot(device_traces=[[1]]),
    "no device": _snapshot(),
    "a size below 0": _event(size=-1),
    "a size of 2**60": _event(size=1 << 60),
    "a size that is a float": _event(size=1.5),
    "a size that is a bool": _event(size=True),
    "an address of 72 bits": _event(addr=1 << 70),
    "an address that is missing": _event(addr=None),
    "a frame that is a number": _event(frames=[1]),
    "a line that is a text": _event(frames=[{"filename": "a", "name": "b", "line": "c"}]),
    "traces of 2,000 devices": _snapshot(device_traces=[[]] * 2000),
}  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_files_are_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(SENTINEL, raising=False)
    with pytest.raises(DocumentError) as caught:
        why(HOSTILE[name])
    assert len(str(caught.value)) < 400
    assert SENTINEL not in os.environ


def test_pickles_with_code_work_in_plain_pickle() -> None:
    """The first files of the table are harmful: without the reader they run code."""
    result = pickle.loads(HOSTILE["calls a function"])
    assert result is None
    os.unsetenv(SENTINEL)


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_plain_data_survives(protocol: int) -> None:
    data = {
        "a": [1, -5, 1 << 40, 255, 70_000, 1.5, None, 7, True, "text", "\u00fc" * 300],
        "b": [(0, 0), (1 << 33, 7)],
        "c": {"d": {}, "e": []},
        **{f"key {i}": i for i in range(2000)},
    }
    assert load_plain_data(pickle.dumps(data, protocol=protocol)) == data


def test_every_cut_of_a_snapshot_is_refused() -> None:
    data = _event(frames=[{"filename": "a.py", "name": "f", "line": 3}])
    for end in range(len(data)):
        with pytest.raises(DocumentError):
            read_snapshot(data[:end])


def test_names_cannot_write_to_a_terminal_or_a_page() -> None:
    frames = [
        {"filename": "\x1b[2J<script>alert(1)</script>.py", "name": "f\nforged\u202e", "line": 3}
    ]
    explanation = why(_event(frames=frames))
    text, page = explanation.describe(), explanation.html()
    assert not {"\x1b", "\u202e"} & set(text)
    assert "\nforged" not in text
    assert "<script" not in page
