"""Which operators recompute in the backward pass what the forward pass discarded (activation checkpointing).

Three things in a recording show it:

- ``CheckpointFunctionBackward`` (reentrant checkpoints of torch, Megatron, DeepSpeed): work directly in it is forward
  work; the backward that it starts has autograd nodes of its own.
- Saved-tensor hooks (non-reentrant checkpoints) run the forward again inside the first node that needs a tensor of it::

      autograd::engine::evaluate_function: ReluBackward0
        ReluBackward0
          aten::linear, aten::relu …      the forward again, for the saved tensor is unpacked first
          aten::threshold_backward        the node's own work comes after

  A node of torch itself (its name ends in a digit) computes gradients from primitives and never calls an operator such
  as ``aten::linear``: where one is inside, all products up to its end are recomputation.
- Python frames of ``torch/utils/checkpoint.py``, where stacks were recorded.

Code compiled as a whole shows none of them.
"""

from __future__ import annotations

import re
from typing import Final

import numpy as np

from perfscope.analyzers.rank.intervals import Intervals
from perfscope.analyzers.rank.nesting import Nested
from perfscope.trace.distinct import distinct
from perfscope.trace.trace import Bool, Category, Int64, Trace

_NODE: Final = "autograd::engine::evaluate_function: "
_REENTRANT: Final = re.compile(r"^_?Checkpoint\w*Backward$")
_OWN_NODE: Final = re.compile(rf"^{_NODE}(?!Linalg|Cholesky|Triangular|Lu|Svd|Qr|Matmul)\w+(?<!Backward)Backward\d+$")
"""Nodes that torch generates from derivatives.yaml. Not those of linear algebra, whose gradients call ``matmul``, nor
second derivatives, which run forwards."""
_FORWARD: Final = re.compile(
    r"^aten::(linear|matmul|addmm|conv(olution|\w*\dd)|scaled_dot_product_attention|_scaled_dot_product_\w+_attention"
    r"(_for_cpu)?|layer_norm|batch_norm|group_norm|rms_norm|instance_norm|dropout|embedding|lstm|gru)$"
    r"|^flash_attn(_3)?::(_flash_attn_)?(forward|fwd)$"
)
"""Operators that only a forward pass calls."""
_FRAME: Final = re.compile(r"(\S*/)?torch/utils/checkpoint\.py\(\d+\): recompute_fn$")


def recomputed(trace: Trace, operators: Nested, calls: Int64) -> Bool:
    """For each of ``calls`` (indices of ``operators``): whether it is recomputation."""
    result = _in_frames(trace, operators, calls)

    def named(pattern: re.Pattern[str]) -> Bool:
        return trace.names_where(pattern.match)[operators.row]

    reentrant = named(_REENTRANT)
    own_node = named(_OWN_NODE)
    if reentrant.any():
        node = trace.names_where(lambda name: name.startswith(_NODE))[operators.row]
        around = operators.nearest(operators.parent[calls], reentrant | node)
        result |= (around >= 0) & reentrant[around]
    if own_node.any():
        evidence = np.flatnonzero(named(_FORWARD))
        node_of_evidence = operators.nearest(operators.parent[evidence], own_node)
        evidence, node_of_evidence = evidence[node_of_evidence >= 0], node_of_evidence[node_of_evidence >= 0]
        until = np.full(len(operators), np.iinfo(np.int64).min, dtype=np.int64)
        np.maximum.at(until, node_of_evidence, operators.end[evidence])
        node_of_call = operators.nearest(operators.parent[calls], own_node)
        result |= (node_of_call >= 0) & (operators.start[calls] < until[node_of_call])
    return result


def _in_frames(trace: Trace, operators: Nested, calls: Int64) -> Bool:
    result = np.zeros(len(calls), dtype=np.bool_)
    if not (trace.category == Category.PYTHON).any():
        return result
    rows = operators.row[calls]
    frames = trace.rows(Category.PYTHON, named=_FRAME.match)
    for thread in distinct(trace.thread[frames]):
        covered = Intervals.of_rows(trace, frames[trace.thread[frames] == thread])
        here = np.flatnonzero(trace.thread[rows] == thread)
        result[here] = covered.covers(trace.start_ns[rows[here]])
    return result
