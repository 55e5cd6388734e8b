"""FLOPs of attention in its fused forms.

QK^T and PV are two products of 2·batch·heads·queries·keys·size each, counted in full: recorded shapes do not show the
mask, so a causal mask is not subtracted. Sequences of several lengths packed into one (``cu_seqlens``) are not counted:
the lengths are values, and only shapes are recorded.
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any, Final

from perfscope.analyzers.rank.flops.products import Flops, Formula, Inputs, Shapes, same


def _products(query: list[int], key: list[int], value: list[int]) -> tuple[float, float]:
    """FLOPs of QK^T and of PV; ``[..., heads, length, size]``. Fewer key heads than query heads serve several."""
    *batch, queries, size = query
    keys, value_size = key[-2], value[-1]
    pairs = 2.0 * prod(batch) * queries * keys
    return pairs * size, pairs * value_size


def _forward(query: list[int], key: list[int], value: list[int]) -> Flops:
    return same(sum(_products(query, key, value)))


def _backward(query: list[int], key: list[int], value: list[int]) -> Flops:
    # The gradients of Q, K, V and of the scores are four products; fused kernels recompute QK^T, a fifth.
    scores, output = _products(query, key, value)
    return Flops(2.0 * (scores + output), 3.0 * scores + 2.0 * output)


_Count = Callable[[list[int], list[int], list[int]], Flops]


def _heads_first(shape: list[int]) -> list[int]:
    """``[batch, length, heads, size]``, heads before lengths. Raises ValueError for packed ``[total, heads, size]``."""
    batch, length, heads, size = shape
    return [batch, heads, length, size]


def _scaled_dot_product(count: _Count, first: int) -> Formula:
    """Torch's own: ``[batch, heads, length, size]``; query, key and value from input ``first`` on."""

    def formula(shapes: Shapes, _inputs: Inputs) -> Flops:
        return count(*_three(shapes, first))

    return formula


def _lengths_first(count: _Count, first: int, *packed: int) -> Formula:
    """Kernels' own: ``[batch, length, heads, size]``; not counted where an input of ``packed`` is given."""

    def formula(shapes: Shapes, _inputs: Inputs) -> Flops:
        if any(shapes[at] for at in packed if at < len(shapes)):
            raise ValueError("sequences of several lengths are packed into one")
        return count(*(_heads_first(shape) for shape in _three(shapes, first)))

    return formula


def _three(shapes: Shapes, first: int) -> tuple[Any, Any, Any]:
    query, key, value = shapes[first : first + 3]
    return query, key, value


_KINDS: Final = (
    "flash_attention",
    "flash_attention_for_cpu",
    "efficient_attention",
    "cudnn_attention",
    "fused_attention_overrideable",
)
"""Of torch's kernels for ``scaled_dot_product_attention``."""

FORMULAS: Final[dict[str, tuple[Formula, int]]] = {
    "aten::scaled_dot_product_attention": (_scaled_dot_product(_forward, 0), 0),
    "aten::_cudnn_attention_forward": (_scaled_dot_product(_forward, 0), 0),
    "aten::_cudnn_attention_backward": (_scaled_dot_product(_backward, 1), 1),
    **{f"aten::_scaled_dot_product_{kind}": (_scaled_dot_product(_forward, 0), 0) for kind in _KINDS},
    **{f"aten::_scaled_dot_product_{kind}_backward": (_scaled_dot_product(_backward, 1), 1) for kind in _KINDS},
    "aten::_flash_attention_forward": (_lengths_first(_forward, 0, 3, 4), 0),
    "aten::_flash_attention_backward": (_lengths_first(_backward, 1), 1),
    "aten::_efficient_attention_forward": (_lengths_first(_forward, 0, 4, 5), 0),
    "aten::_efficient_attention_backward": (_lengths_first(_backward, 1, 6, 7), 1),
    # Dao-AILab/flash-attention: flash_attn/flash_attn_interface.py and hopper/flash_api.cpp. In the latter's forward,
    # input 7 is cu_seqlens_q and 14 the page table.
    "flash_attn::_flash_attn_forward": (_lengths_first(_forward, 0), 0),
    "flash_attn::_flash_attn_backward": (_lengths_first(_backward, 1), 1),
    "flash_attn_3::fwd": (_lengths_first(_forward, 0, 7, 14), 0),
    "flash_attn_3::bwd": (_lengths_first(_backward, 1), 1),
}
"""Operator -> its formula and the input whose type the products run in."""
