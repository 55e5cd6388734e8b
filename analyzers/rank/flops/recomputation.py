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
  as ``aten::linear``: where one is inside, all up to its end is recomputation. What follows it, up to the node's own
  work (``…_backward``, or as many operators as nodes of that name have elsewhere), is recomputation too.
- Python frames of ``torch/utils/checkpoint.py``, where stacks were recorded.

Code compiled as a whole shows none of them.
"""

from __future__ import annotations

import re
from typing import Final

import numpy as np

from perfscope.analyzers.rank.intervals import Intervals
from perfscope.analyzers.rank.nesting import Nested, taken
from perfscope.frozen import dataclass
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


@dataclass(frozen=True, eq=False)
class Stretches:
    """Time in which host threads run a forward again: parallel arrays, own clock. ``thread`` as in ``Trace``."""

    thread: Int64
    start_ns: Int64
    end_ns: Int64

    def covers(self, trace: Trace, rows: Int64) -> Bool:
        """For each of these events of the host: whether it begins in one, on the same thread."""
        result = np.zeros(len(rows), dtype=np.bool_)
        for thread in distinct(self.thread):
            mine, here = self.thread == thread, np.flatnonzero(trace.thread[rows] == thread)
            covered = Intervals.of(self.start_ns[mine], self.end_ns[mine])
            result[here] = covered.covers(trace.start_ns[rows[here]])
        return result


def stretches(trace: Trace, operators: Nested) -> Stretches:
    """When forwards run again in the backward."""
    found = [_in_frames(trace), _in_checkpoints(trace, operators), _in_nodes(trace, operators)]
    return Stretches(*(np.concatenate(columns).astype(np.int64) for columns in zip(*found, strict=True)))


_Columns = tuple[Int64, Int64, Int64]
"""Thread, start and end of stretches."""


def _named(trace: Trace, operators: Nested, pattern: re.Pattern[str]) -> Bool:
    return trace.names_where(pattern.match, operators.row)


def _columns(trace: Trace, operators: Nested, places: Int64, until: Int64) -> _Columns:
    """From the begin of each of these operators until then, which is on the operators' axis."""
    rows = operators.row[places]
    start_ns = trace.start_ns[rows]
    return trace.thread[rows].astype(np.int64), start_ns, start_ns + until - operators.start[places]


def _in_frames(trace: Trace) -> _Columns:
    if not (trace.category == Category.PYTHON).any():
        nothing = np.empty(0, dtype=np.int64)
        return nothing, nothing, nothing
    frames = trace.rows(Category.PYTHON, named=_FRAME.match)
    return trace.thread[frames].astype(np.int64), trace.start_ns[frames], trace.ends_ns(frames)


def _in_checkpoints(trace: Trace, operators: Nested) -> _Columns:
    """From the begin of a reentrant checkpoint's node to the last operator before the backward that it starts."""
    places = np.flatnonzero(_named(trace, operators, _REENTRANT))
    nodes = np.flatnonzero(trace.names_where(lambda name: name.startswith(_NODE), operators.row))
    following = np.append(nodes, len(operators))[np.searchsorted(nodes, places, side="right")]
    begins = np.append(operators.start, np.iinfo(np.int64).max)[following]
    inner = np.flatnonzero(np.isin(operators.parent, places))
    number = np.searchsorted(places, operators.parent[inner])
    forward = operators.start[inner] < begins[number]
    until = operators.start[places].copy()
    np.maximum.at(until, number[forward], operators.end[inner[forward]])
    return _columns(trace, operators, places, until)


def _in_nodes(trace: Trace, operators: Nested) -> _Columns:
    """From the begin of a node of torch's own that runs a forward first, to the node's own work."""
    own_node = _named(trace, operators, _OWN_NODE)
    evidence = np.flatnonzero(_named(trace, operators, _FORWARD)) if own_node.any() else np.empty(0, dtype=np.int64)
    around = operators.nearest(operators.parent[evidence], own_node)
    evidence, around = evidence[around >= 0], around[around >= 0]
    nodes, number = np.unique(around, return_inverse=True)
    until = np.full(len(nodes), np.iinfo(np.int64).min, dtype=np.int64)
    np.maximum.at(until, number, operators.end[evidence])
    return _columns(trace, operators, nodes, _own_work(trace, operators, own_node, nodes, until))


def _own_work(trace: Trace, operators: Nested, own_node: Bool, nodes: Int64, until: Int64) -> Int64:
    """Where the own work of these nodes begins, which is not before ``until``.

    A node's own operators are two levels below it: ``evaluate_function`` > ``GeluBackward0`` > ``aten::gelu_backward``.
    """
    node_of = taken(operators.parent, operators.parent)
    inner = np.flatnonzero((node_of >= 0) & own_node[node_of])
    inner = inner[np.argsort(node_of[inner], kind="stable")]
    owner = node_of[inner]
    usual = _usual_count(trace, operators, owner, nodes)
    is_backward = trace.names_where(lambda name: "backward" in name, operators.row[inner])
    first, last = np.searchsorted(owner, nodes, side="left"), np.searchsorted(owner, nodes, side="right")
    begins: Int64 = until.copy()
    for at, node in enumerate(nodes.tolist()):
        places = np.arange(first[at], last[at])
        places = places[operators.start[inner[places]] >= until[at]]
        if len(places) == 0:
            continue
        backward = np.flatnonzero(is_backward[places])
        own = usual.get(int(trace.name[operators.row[node]]), 0)
        chosen = int(backward[0]) if len(backward) else len(places) - own if 0 < own <= len(places) else 0
        begins[at] = operators.start[inner[places[chosen]]]
    return begins


def _usual_count(trace: Trace, operators: Nested, owner: Int64, nodes: Int64) -> dict[int, int]:
    """Name of a node -> the fewest operators that those of that name have, apart from ``nodes``."""
    others, counts = np.unique(owner[~np.isin(owner, nodes)], return_counts=True)
    names, number = np.unique(trace.name[operators.row[others]], return_inverse=True)
    fewest = np.full(len(names), len(owner))
    np.minimum.at(fewest, number, counts)
    return dict(zip(names.tolist(), fewest.tolist(), strict=True))
