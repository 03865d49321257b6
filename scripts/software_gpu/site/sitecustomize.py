"""Right results on the software GPU in each Python process that inherits this folder's path.

Python imports this module when it starts. Where REMAT_SOFTWARE_GPU is `numbers`, the kernels of
CUDA tensors are replaced as soon as the process has imported torch.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import os
import sys
from collections.abc import Sequence
from types import ModuleType


class _EnableAfterTorch(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds torch as the other finders do, and replaces its kernels after the import."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Return torch's specification with this object as its loader."""
        if name != "torch":
            return None
        sys.meta_path.remove(self)
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            self.loader, spec.loader = spec.loader, self
        return spec

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        """Create the module as its own loader does."""
        return self.loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        """Import torch, then turn right results on."""
        module.__spec__.loader = module.__loader__ = self.loader  # type: ignore[union-attr]
        self.loader.exec_module(module)
        if module.version.cuda is not None:
            from scripts.software_gpu.numbers import enable

            enable()


if os.environ.get("REMAT_SOFTWARE_GPU") == "numbers":
    sys.meta_path.insert(0, _EnableAfterTorch())
