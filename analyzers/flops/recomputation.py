"""Which operators compute again in the backward pass what the forward pass threw away (activation checkpointing).

Three traces of it, whichever a recording holds:

- ``CheckpointFunctionBackward`` (reentrant checkpoints of torch, Megatron, DeepSpeed): what runs directly in it is
  forward work; the backward that it starts has autograd nodes of its own.
- Saved-tensor hooks (non-reentrant checkpoints) run the forward again inside the first node that needs a tensor of it::

      autograd::engine::evaluate_function: ReluBackward0
        ReluBackward0
          aten::linear, aten::relu …      the forward again, for the saved tensor is unpacked first
          aten::threshold_backward        the node's own work comes after

  A node of torch's own (its name ends in a digit) computes gradients from primitives and never calls an operator
  such as ``aten::linear``: where one is inside, all products up to its end are recomputed.
- Python frames of ``torch/utils/checkpoint.py``, where stacks were recorded.

Code compiled as a whole leaves none of them.
"""

from __future__ import annotations

import re
from typing import Final

import numpy as np

from perfscope.analyzers.intervals import Intervals
from perfscope.analyzers.nesting import Nested
from perfscope.trace import Bool, Category, Int64, Trace

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
"""Operators that only a forward calls."""
_FRAME: Final = re.compile(r"(\S*/)?torch/utils/checkpoint\.py\(\d+\): recompute_fn$")


def recomputed(trace: Trace, operators: Nested, calls: Int64) -> Bool:
    """For each of ``calls`` (places in ``operators``): is it recomputation?"""
    result = _in_frames(trace, operators, calls)

    def named(pattern: re.Pattern[str]) -> Bool:
        return trace.names_where(lambda name: pattern.match(name) is not None)[operators.row]

    reentrant = named(_REENTRANT)
    own_node = named(_OWN_NODE)
    if reentrant.any():
        node = trace.names_where(lambda name: name.startswith(_NODE))[operators.row]
        found = _nearest(operators, calls, reentrant | node)
        result |= (found >= 0) & reentrant[found]
    if own_node.any():
        evidence = np.flatnonzero(named(_FORWARD))
        node_of_evidence = _nearest(operators, evidence, own_node)
        evidence, node_of_evidence = evidence[node_of_evidence >= 0], node_of_evidence[node_of_evidence >= 0]
        until = np.full(len(operators), np.iinfo(np.int64).min, dtype=np.int64)
        np.maximum.at(until, node_of_evidence, operators.end[evidence])
        node_of_call = _nearest(operators, calls, own_node)
        result |= (node_of_call >= 0) & (operators.start[calls] < until[node_of_call])
    return result


def _nearest(operators: Nested, places: Int64, wanted: Bool) -> Int64:
    """The nearest operator around each place, itself left out, that is one of ``wanted``; NONE without."""
    found = operators.parent[places]
    pending = np.flatnonzero((found >= 0) & ~wanted[found])
    while len(pending):
        found[pending] = operators.parent[found[pending]]
        pending = pending[(found[pending] >= 0) & ~wanted[found[pending]]]
    return found


def _in_frames(trace: Trace, operators: Nested, calls: Int64) -> Bool:
    result = np.zeros(len(calls), dtype=np.bool_)
    if not (trace.category == Category.PYTHON).any():
        return result
    rows = operators.row[calls]
    frames = np.flatnonzero(
        trace.names_where(lambda name: _FRAME.match(name) is not None) & (trace.category == Category.PYTHON)
    )
    for thread in np.unique(trace.thread[frames]):
        mine = frames[trace.thread[frames] == thread]
        covered = Intervals.of(trace.start_ns[mine], trace.end_ns[mine])
        here = np.flatnonzero(trace.thread[rows] == thread)
        at = np.searchsorted(covered.start_ns, trace.start_ns[rows[here]], side="right") - 1
        inside = (at >= 0) & (trace.start_ns[rows[here]] < covered.end_ns[at])
        result[here[inside]] = True
    return result
