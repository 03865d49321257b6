"""Accelerate compiles what it prepares, within a budget:

    accelerator = Accelerator(dynamo_plugin=dynamo_plugin("60%"))

Without torch.compile, enable the model before `accelerator.prepare`: remat.enable(model, "60%").
"""

from __future__ import annotations

from typing import Any

from remat.errors import RematError
from remat.frontend.compile.partition import Partitioner

try:
    from accelerate.utils import TorchDynamoPlugin
except ImportError:
    raise RematError("this needs Accelerate: pip install 'remat[accelerate]'") from None

__all__ = ["dynamo_plugin"]


def dynamo_plugin(
    budget: int | str, *, dynamic: bool | None = None, regional: bool = False, **options: Any
) -> TorchDynamoPlugin:
    """A plugin for Inductor with remat's partitioner. `**options` are those of `remat.Partitioner`;
    with `regional`, repeated blocks are compiled one by one.

    Accelerate knows no other backends than its own, but lets Inductor's options through.
    """
    return TorchDynamoPlugin(
        backend="inductor",  # type: ignore[arg-type]
        dynamic=dynamic,  # type: ignore[arg-type]
        use_regional_compilation=regional,
        options=Partitioner(budget, **options).settings(),
    )
