"""A plugin with which Accelerate compiles the models that it prepares within a budget:

    accelerator = Accelerator(dynamo_plugin=dynamo_plugin("60%"))

Without torch.compile, enable the model before `accelerator.prepare`: remat.enable(model, "60%").
"""

from __future__ import annotations

from typing import Any

from remat.errors import RematError
from remat.frontend.compile.compile_options import read_options

try:
    from accelerate.utils import TorchDynamoPlugin
except ImportError:
    raise RematError("this needs Accelerate: pip install 'remat[accelerate]'") from None

__all__ = ["dynamo_plugin"]


class _RematDynamoPlugin(TorchDynamoPlugin):
    """Plugin that declares the backend "inductor", because Accelerate accepts only the backends of
    its own list, and passes "remat" to torch.compile."""

    def to_kwargs(self) -> dict[str, Any]:
        """Return the arguments of torch.compile, with the backend "remat"."""
        return {**super().to_kwargs(), "backend": "remat"}


def dynamo_plugin(
    budget: int | str, *, dynamic: bool | None = None, regional: bool = False, **options: Any
) -> TorchDynamoPlugin:
    """Return an Accelerate plugin that compiles with the backend "remat".

    `**options` are those of `remat.compile`; errors in them are raised immediately. With
    `regional`, each repeated block and each other module is compiled separately. Pass "min" or
    bytes then: a percentage has no meaning for modules without anything to recompute, such as an
    embedding.
    """
    options = {"budget": budget, **options}
    read_options(options)
    return _RematDynamoPlugin(
        backend="inductor",  # type: ignore[arg-type]
        dynamic=dynamic,  # type: ignore[arg-type]
        use_regional_compilation=regional,
        options=options,
    )
