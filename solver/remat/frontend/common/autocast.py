"""Autocast by name, for callers that do without torch."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}


def autocast(device: str, dtype: str | None) -> AbstractContextManager[object]:
    """`torch.autocast` for a device such as "cuda:0" and the name of a dtype; None is without.

    Raises `KeyError` for a name that is not in `DTYPES`.
    """
    if dtype is None:
        return nullcontext()
    return torch.autocast(device.partition(":")[0], dtype=DTYPES[dtype])
