"""The texts of out-of-memory errors of all versions of torch."""

from __future__ import annotations

import pytest

from remat.errors import DocumentError
from remat.snapshots.error_text import ErrorText, parse_error_text
from remat.snapshots.findings import Kind
from remat.snapshots.why import why

MIB, GIB = 1 << 20, 1 << 30

TEXTS: dict[str, tuple[str, ErrorText]] = {
    "1.13 and 2.0": (
        "CUDA out of memory. Tried to allocate 2.00 GiB (GPU 1; 24.00 GiB total capacity; 20.00 "
        "GiB already allocated; 1.00 GiB free; 22.50 GiB reserved in total by PyTorch) If reserved "
        "memory is >> allocated memory try setting max_split_size_mb to avoid fragmentation.",
        ErrorText(2 * GIB, 1, 24 * GIB, GIB, 20 * GIB, 5 * GIB // 2),
    ),
    "2.1, with its misspelling": (
        "torch.cuda.OutOfMemoryError: CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has a "
        "total capacty of 79.15 GiB of which 8.00 MiB is free. Including non-PyTorch memory, this "
        "process has 79.00 GiB memory in use. Of the allocated memory 70.00 GiB is allocated by "
        "PyTorch, and 8.00 GiB is reserved by PyTorch but unallocated.",
        ErrorText(
            20 * MIB, 0, int(79.15 * GIB), 8 * MIB, 70 * GIB, 8 * GIB, process_bytes=79 * GIB
        ),
    ),
    "2.5, with other processes and a limit": (
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 512 bytes. GPU 3 has a "
        "total capacity of 80.00 GiB of which 1024 bytes is free. Process 12 has 40.00 GiB memory "
        "in use. Process 13 has 30.00 GiB memory in use. Including non-PyTorch memory, this "
        "process has 9.00 GiB memory in use. 10.00 GiB allowed; Of the allocated memory 8.00 GiB "
        "is allocated by PyTorch, and 512.00 KiB is reserved by PyTorch but unallocated.",
        ErrorText(
            512, 3, 80 * GIB, 1024, 8 * GIB, MIB // 2, process_bytes=9 * GIB,
            allowed_bytes=10 * GIB, processes=((12, 40 * GIB), (13, 30 * GIB)),
        ),
    ),
    "2.13, with CUDA graphs, in a log": (
        "[rank0]: Traceback (most recent call last):\n[rank0]:   File \"train.py\", line 1\n"
        "[rank0]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.50 GiB.\n GPU 0 "
        "has a total capacity of 79.18 GiB of which 1.00 GiB is free. Of the allocated memory "
        "60.00 GiB is allocated by PyTorch, with 4.00 GiB allocated in private pools (e.g., CUDA "
        "Graphs), and 12.00 GiB is reserved by PyTorch but unallocated. If reserved",
        ErrorText(
            3 * GIB // 2, 0, int(79.18 * GIB), GIB, 60 * GIB, 12 * GIB,
            private_pool_bytes=4 * GIB,
        ),
    ),
}  # fmt: skip


@pytest.mark.parametrize("version", TEXTS)
def test_all_versions_are_read(version: str) -> None:
    text, expected = TEXTS[version]
    assert parse_error_text(text) == expected


def test_of_several_errors_the_last_one_is_read() -> None:
    first, last = TEXTS["1.13 and 2.0"][0], TEXTS["2.1, with its misspelling"]
    assert parse_error_text(f"{first}\nretried\n{last[0]}") == last[1]


@pytest.mark.parametrize(
    ("version", "kind"),
    [
        ("1.13 and 2.0", Kind.FRAGMENTS),
        ("2.1, with its misspelling", Kind.FRAGMENTS),
        ("2.5, with other processes and a limit", Kind.OTHER_PROCESS),
        ("2.13, with CUDA graphs, in a log", Kind.FRAGMENTS),
    ],
)
def test_the_cause_is_named(version: str, kind: Kind) -> None:
    explanation = why(RuntimeError(TEXTS[version][0]))
    assert explanation.cause is not None
    assert explanation.cause.kind == kind
    assert "watch" in explanation.describe() + " ".join(f.remedy for f in explanation.findings)


@pytest.mark.parametrize(
    "text", ["", "out of memory", "Killed", "Tried to allocate 2 GiB", "out of memory " * 10_000]
)
def test_other_texts_are_refused(text: str) -> None:
    with pytest.raises(DocumentError, match="no out-of-memory error"):
        parse_error_text(text)
