"""Lets the Python code of PyPI's torchvision load beside a torch without CUDA.

The compiled part of that build is linked with CUDA. Without it torchvision's import fails, since it
describes two operators that nobody has defined. No model of ours calls them.
"""

import sys
from importlib.abc import MetaPathFinder


class _DefineFirst(MetaPathFinder):
    """Finds nothing; State: `_library` keeps the definitions, made when torchvision is imported."""

    _library = None

    def find_spec(self, fullname, path=None, target=None):
        if fullname == "torchvision" and self._library is None:
            import torch

            self._library = torch.library.Library("torchvision", "DEF")
            for name in ("nms", "qnms"):
                arguments = "(Tensor dets, Tensor scores, float iou_threshold)"
                self._library.define(f"{name}{arguments} -> Tensor")


sys.meta_path.insert(0, _DefineFirst())
