"""What the program said of the kernels in its CUDA graphs as it captured them: torch's own registry, read."""

from __future__ import annotations

import sys
from typing import Any, Final

from perfscope.recording.compiled import Annotation, of_annotation

_REGISTRIES: Final = ("torch.cuda.graph_annotations", "torch.cuda._graph_annotations")
"""Where it is from torch 2.14 on, and in 2.12 and 2.13."""
MOST_NODES: Final = 200_000


def annotated_kernels() -> dict[int, Annotation]:
    """Node of a graph -> its module and where it was launched; empty where the program annotates nothing."""
    for name in _REGISTRIES:
        registry: Any = sys.modules.get(name)
        if registry is None:
            continue
        stacks: dict[int, Any] = getattr(registry, "get_kernel_py_stacks", dict)()
        said: dict[int, Any] = dict(registry.get_kernel_annotations())
        found = {}
        for node in list(dict.fromkeys((*said, *stacks)))[:MOST_NODES]:
            annotation = of_annotation(said.get(node, []), str(stacks.get(node, "")))
            if annotation is not None:
                found[int(node)] = annotation
        return found
    return {}
