"""Runs a script (``FILE ...``) or a module (``-m MODULE ...``) that imports torchvision.

PyPI has torchvision for CUDA only, whose operators do not load beside a torch for CPUs. The programs need none of them:
it lies in a folder where nothing else finds it, and the two operators that it describes at its import are declared.
"""

import runpy
import sys
from pathlib import Path

import torch

sys.path.append(str(Path(sys.prefix) / "torchvision"))
declared = torch.library.Library("torchvision", "FRAGMENT")
for name in ("nms", "qnms"):
    declared.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
del sys.argv[0]
if sys.argv[0] == "-m":
    del sys.argv[0]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
else:
    sys.path.insert(0, str(Path(sys.argv[0]).parent))
    runpy.run_path(sys.argv[0], run_name="__main__")
