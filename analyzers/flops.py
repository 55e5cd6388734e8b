"""FLOPs of operators from their recorded shapes.

A product of an [m, k] by a [k, n] matrix is 2·m·k·n FLOPs (a multiplication and an addition for each term), as in
torch.utils.flop_counter. Only the operator that does the work counts: ``aten::linear`` and ``aten::matmul`` lead to
``mm``/``addmm``/``bmm`` below them, which are recorded too.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from typing import Any, Final

Shapes = list[Any]


@dataclass(frozen=True)
class Flops:
    """FLOPs of one call. ``hardware`` counts recomputation inside the operator, ``model`` does not."""

    model: float
    hardware: float


def _mm(shapes: Shapes, _inputs: Shapes) -> Flops:
    (m, k), (_, n) = shapes[0], shapes[1]
    return _same(2.0 * m * k * n)


def _addmm(shapes: Shapes, inputs: Shapes) -> Flops:
    return _mm(shapes[1:], inputs)


def _bmm(shapes: Shapes, _inputs: Shapes) -> Flops:
    (b, m, k), (_, _, n) = shapes[0], shapes[1]
    return _same(2.0 * b * m * k * n)


def _baddbmm(shapes: Shapes, inputs: Shapes) -> Flops:
    return _bmm(shapes[1:], inputs)


def _attention(query: Shapes, key: Shapes, value: Shapes) -> float:
    """QK^T and PV in full (causal masks are not subtracted), [..., length, head size] with heads before lengths."""
    *batch, queries, head = query
    keys, value_head = key[-2], value[-1]
    return float(2 * prod(batch) * queries * keys * (head + value_head))


def _attention_forward(shapes: Shapes, _inputs: Shapes) -> Flops:
    return _same(_attention(shapes[0], shapes[1], shapes[2]))


def _attention_backward(shapes: Shapes, _inputs: Shapes) -> Flops:
    # Gradients of Q, K, V and P are four products; the fused backward computes QK^T again, a fifth.
    query, key, value = shapes[1], shapes[2], shapes[3]
    forward = _attention(query, key, value)
    *batch, queries, head = query
    again = 2.0 * prod(batch) * queries * key[-2] * head
    return Flops(2.0 * forward, 2.0 * forward + again)


def _flash_forward(shapes: Shapes, inputs: Shapes) -> Flops:
    return _attention_forward([_heads_first(shape) for shape in shapes[:3]], inputs)


def _flash_backward(shapes: Shapes, inputs: Shapes) -> Flops:
    return _attention_backward([shapes[0], *(_heads_first(shape) for shape in shapes[1:4])], inputs)


def _heads_first(shape: Shapes) -> Shapes:
    batch, length, heads, head = shape
    return [batch, heads, length, head]


def _convolution(shapes: Shapes, inputs: Shapes) -> Flops:
    data, weight = shapes[0], shapes[1]
    return _same(_convolve(data, weight, inputs[3:]))


def _convolution_backward(shapes: Shapes, inputs: Shapes) -> Flops:
    # Inputs in order: gradient, data, weight, bias sizes, stride, padding, dilation, transposed, output padding,
    # groups, and the mask of gradients that are wanted.
    data, weight = shapes[1], shapes[2]
    mask = _listed(inputs[10])
    products = sum(1 for wanted in mask[:2] if wanted)
    return _same(products * _convolve(data, weight, inputs[4:]))


def _convolve(data: list[int], weight: list[int], inputs: Shapes) -> float:
    """``inputs``: stride, padding, dilation, transposed, output_padding, groups."""
    stride, padding, dilation = (_listed(value) for value in inputs[:3])
    transposed = str(inputs[3]).lower() in ("true", "1")
    batch, spatial, kernel = data[0], data[2:], weight[2:]
    if transposed:
        # Every input element meets the whole kernel of every output channel of its group.
        return 2.0 * batch * prod(spatial) * prod(weight)
    out = [
        (size + 2 * pad - step * (width - 1) - 1) // jump + 1
        for size, pad, step, width, jump in zip(
            spatial, _wide(padding, kernel), _wide(dilation, kernel), kernel, _wide(stride, kernel), strict=True
        )
    ]
    return 2.0 * batch * prod(out) * prod(weight)


def _wide(values: list[int], like: Shapes) -> list[int]:
    return values * len(like) if len(values) == 1 else values


def _listed(value: object) -> list[int]:
    parsed = json.loads(value.lower()) if isinstance(value, str) else value
    if not isinstance(parsed, list):
        raise TypeError(f"not a list: {value!r}")
    return [int(item) for item in parsed]


def _same(flops: float) -> Flops:
    return Flops(flops, flops)


FORMULAS: Final[dict[str, tuple[Callable[[Shapes, Shapes], Flops], int]]] = {
    "aten::mm": (_mm, 0),
    "aten::addmm": (_addmm, 1),
    "aten::_addmm_activation": (_addmm, 1),
    "aten::bmm": (_bmm, 0),
    "aten::baddbmm": (_baddbmm, 1),
    "aten::_scaled_mm": (_mm, 0),
    "aten::convolution": (_convolution, 0),
    "aten::convolution_backward": (_convolution_backward, 0),
    "aten::_scaled_dot_product_flash_attention": (_attention_forward, 0),
    "aten::_scaled_dot_product_flash_attention_for_cpu": (_attention_forward, 0),
    "aten::_scaled_dot_product_efficient_attention": (_attention_forward, 0),
    "aten::_scaled_dot_product_cudnn_attention": (_attention_forward, 0),
    "aten::_scaled_dot_product_flash_attention_backward": (_attention_backward, 1),
    "aten::_scaled_dot_product_flash_attention_for_cpu_backward": (_attention_backward, 1),
    "aten::_scaled_dot_product_efficient_attention_backward": (_attention_backward, 1),
    "aten::_scaled_dot_product_cudnn_attention_backward": (_attention_backward, 1),
    "flash_attn::_flash_attn_forward": (_flash_forward, 0),
    "flash_attn::_flash_attn_backward": (_flash_backward, 1),
}
"""Operator -> its formula and the input whose type the products run in."""


def flops_of(name: str, shapes: str, types: str, inputs: str) -> tuple[Flops, str] | None:
    """FLOPs of one call and the recorded type of its factors.

    ``shapes``, ``types`` and ``inputs`` are the JSON texts of the operator's input dimensions, types and concrete
    inputs. None for operators that are not matrix products and for shapes that do not fit the formula (nested or
    missing), which lowers the coverage.
    """
    entry = FORMULAS.get(name)
    if entry is None or not shapes:
        return None
    formula, typed = entry
    try:
        flops = formula(json.loads(shapes), json.loads(inputs) if inputs else [])
        return flops, str(json.loads(types)[typed]) if types else ""
    except (ValueError, TypeError, IndexError, KeyError):
        return None
