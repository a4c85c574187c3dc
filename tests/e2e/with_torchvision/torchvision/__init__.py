"""The torchvision that comes next on the path, also where its compiled operators cannot be loaded,
as without CUDA.

It wants two of them declared before it can be imported. What resizes and normalises images is
PyTorch's.
"""

import sys
from importlib.machinery import PathFinder
from pathlib import Path

import torch

_elsewhere = [
    path for path in sys.path if Path(path).resolve() != Path(__file__).parents[1].resolve()
]
_real = PathFinder.find_spec("torchvision", _elsewhere)
if _real is None or _real.origin is None or _real.loader is None:
    raise ModuleNotFoundError("No module named 'torchvision'", name="torchvision")
try:
    torch.ops.load_library(Path(_real.origin).with_name("_C.so"))
except OSError:
    _operators = torch.library.Library("torchvision", "DEF")
    for _name in ("nms", "qnms"):
        _operators.define(f"{_name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
__path__ = list(_real.submodule_search_locations or ())
_real.loader.exec_module(sys.modules[__name__])
