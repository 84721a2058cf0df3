"""Makes the Python code of PyPI's torchvision importable with a torch without CUDA.

The compiled part of that build is linked with CUDA. Without it the import of torchvision fails,
because it registers fakes of two undefined operators. No model of ours calls them.
"""

import sys
from importlib.abc import MetaPathFinder


class _DefineFirst(MetaPathFinder):
    """A finder that finds nothing, but defines the operators when torchvision is imported.
    `_library` keeps the definitions alive."""

    _library = None

    def find_spec(self, fullname, path=None, target=None):
        if fullname == "torchvision" and self._library is None:
            import torch

            self._library = torch.library.Library("torchvision", "DEF")
            for name in ("nms", "qnms"):
                arguments = "(Tensor dets, Tensor scores, float iou_threshold)"
                self._library.define(f"{name}{arguments} -> Tensor")


sys.meta_path.insert(0, _DefineFirst())
