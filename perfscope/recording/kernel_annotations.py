"""Torch's annotations of the kernels in CUDA graphs, among a folder's files: pickles of ``get_kernel_annotations()``.

``{node: [{"name": "attention", …}]}``, under the name that torch's own ``_annotate_cuda_graph_trace`` looks for beside
the folders of the steps: ``kernel_annotations_rank0_….pkl``.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Final

_STEP: Final = re.compile(r"(?:step|iteration|iter)[-_.]?\d+$")
"""A folder of one step's traces, beside which the annotations of the whole run lie."""
_NAME: Final = re.compile(r"kernel_annotations_rank(\d{1,7})(?:[_.-].*)?\.(?:pkl|pickle)$")


def find(files: Iterable[Path]) -> dict[int, Path]:
    """Rank -> its annotations, by name; of several the last."""
    return {int(match[1]): path for path in files if (match := _NAME.match(path.name))}


def beside(folder: Path, files: Iterable[Path]) -> dict[int, Path]:
    """Those among a folder's files; of a folder that is one step's those beside it, too."""
    above = folder.parent.iterdir() if _STEP.match(folder.name) else ()
    return find(sorted(above)) | find(files)
