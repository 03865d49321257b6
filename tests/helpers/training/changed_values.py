"""Values in a Python module other than the model's, which a training loop may change."""

from __future__ import annotations

import torch

SCALE = 1.0


class Scale:
    """A class that is no module, with a value in the class."""

    factor = 1.0

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.factor


def scaled(x: torch.Tensor) -> torch.Tensor:
    """Return the tensor times `SCALE`, two calls from the model's forward."""
    return _scaled(x)


def _scaled(x: torch.Tensor) -> torch.Tensor:
    return x * SCALE
