"""Accelerate compiles what it prepares, within a budget:

    accelerator = Accelerator(dynamo_plugin=dynamo_plugin("60%"))

Without torch.compile, enable the model before `accelerator.prepare`: remat.enable(model, "60%").
"""

from __future__ import annotations

from typing import Any

from remat.errors import RematError
from remat.frontend.compile.options import read_options

try:
    from accelerate.utils import TorchDynamoPlugin
except ImportError:
    raise RematError("this needs Accelerate: pip install 'remat[accelerate]'") from None

__all__ = ["dynamo_plugin"]


class _Plugin(TorchDynamoPlugin):
    """Accelerate knows no other backends than its own, so it is told that this is Inductor."""

    def to_kwargs(self) -> dict[str, Any]:
        return {**super().to_kwargs(), "backend": "remat"}


def dynamo_plugin(
    budget: int | str, *, dynamic: bool | None = None, regional: bool = False, **options: Any
) -> TorchDynamoPlugin:
    """A plugin for the backend "remat". `**options` are those of `remat.compile`; errors in them
    are raised at once. With `regional`, repeated blocks are compiled one by one, and all other
    modules, too: pass "min" or bytes, as an embedding alone has nothing to run again, and so no
    percentage.
    """
    options = {"budget": budget, **options}
    read_options(options)
    return _Plugin(
        backend="inductor",  # type: ignore[arg-type]
        dynamic=dynamic,  # type: ignore[arg-type]
        use_regional_compilation=regional,
        options=options,
    )
