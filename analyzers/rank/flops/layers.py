"""FLOPs of convolutions and of recurrent layers that are one operator."""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any, Final

from perfscope.analyzers.rank.flops.products import Flops, Formula, Inputs, Shapes, listed, parsed, same

_GATES: Final = (1, 1, 4, 3)
"""Products of a cell by mode: ReLU, tanh, LSTM, GRU (aten/src/ATen/native/cudnn/RNN.cpp)."""


def _convolution(shapes: Shapes, inputs: Inputs) -> Flops:
    return same(_convolve(shapes[0], shapes[1], inputs[3:]))


def _outer_convolution(shapes: Shapes, inputs: Inputs) -> Flops:
    """``aten::conv2d`` and the like: data, weight, bias, stride, padding, dilation, groups."""
    return same(_convolve(shapes[0], shapes[1], [*inputs[3:6], "False"]))


def _of_library(bias: int) -> Callable[[Shapes, Inputs], Flops]:
    """A library's operator: data, weight, as many biases, padding, stride, dilation, groups."""

    def formula(shapes: Shapes, inputs: Inputs) -> Flops:
        padding, stride, dilation = inputs[2 + bias : 5 + bias]
        return same(_convolve(shapes[0], shapes[1], [stride, padding, dilation, "False"]))

    return formula


def _convolution_backward(shapes: Shapes, inputs: Inputs) -> Flops:
    # Inputs in order: gradient, data, weight, bias sizes, stride, padding, dilation, transposed, output padding,
    # groups, and the mask of wanted gradients.
    products = sum(1 for wanted in listed(inputs[10])[:2] if wanted)
    return same(products * _convolve(shapes[1], shapes[2], inputs[4:]))


def _convolve(data: list[int], weight: list[int], inputs: Inputs) -> float:
    """``inputs``: stride, padding, dilation, transposed, output_padding, groups.

    The weight is [channels out, channels in / groups, kernel …], or transposed [in, out / groups, kernel …]. In both
    cases the product of its sizes is the multiplications per output (transposed: input) position, for all groups.
    """
    stride, padding, dilation = (listed(value) for value in inputs[:3])
    spatial, kernel = data[2:], weight[2:]
    if parsed(inputs[3]):
        return 2.0 * data[0] * prod(spatial) * prod(weight)
    out = [
        (size + 2 * pad - step * (width - 1) - 1) // jump + 1
        for size, pad, step, width, jump in zip(
            spatial, _wide(padding, kernel), _wide(dilation, kernel), kernel, _wide(stride, kernel), strict=True
        )
    ]
    return 2.0 * data[0] * prod(out) * prod(weight)


def _wide(values: list[int], like: list[int]) -> list[int]:
    return values * len(like) if len(values) == 1 else values


def _recurrent(mode_at: int, *, projects: bool) -> Callable[[Shapes, Inputs], float]:
    """FLOPs of a forward; from input ``mode_at`` on: mode, hidden size, (projected size,) layers, batch first,
    dropout, train, bidirectional. The first input is [time, batch, features], or [all times, features] packed.
    """

    def formula(shapes: Shapes, inputs: Inputs) -> float:
        *positions, features = shapes[0]
        values = [int(parsed(value)) for value in inputs[mode_at : mode_at + (4 if projects else 3)]]
        mode, hidden, layers, projected = values[0], values[1], values[-1], values[2] if projects else 0
        directions = 2 if parsed(inputs[mode_at + (7 if projects else 6)]) else 1
        fed_back = projected or hidden
        total = 0.0
        for layer in range(layers):
            width = features if layer == 0 else fed_back * directions
            total += directions * (_GATES[mode] * hidden * (width + fed_back) + hidden * projected)
        return float(2.0 * prod(positions) * total)

    return formula


def _recurrent_forward(mode_at: int, *, projects: bool) -> Formula:
    count = _recurrent(mode_at, projects=projects)
    return lambda shapes, inputs: same(count(shapes, inputs))


def _recurrent_backward(mode_at: int, mask_at: int, *, projects: bool) -> Formula:
    # The gradient back through time takes as many FLOPs as the forward, and so does that of the weights, if wanted.
    count = _recurrent(mode_at, projects=projects)

    def formula(shapes: Shapes, inputs: Inputs) -> Flops:
        weights = listed(inputs[mask_at])[3]
        return same((2.0 if weights else 1.0) * count(shapes, inputs))

    return formula


def _one_layer(times: float) -> Formula:
    """oneDNN's: one layer in one direction, with the weights for the input and for the state as inputs 1 and 2."""

    def formula(shapes: Shapes, _inputs: Inputs) -> Flops:
        data, weight, recurrent = shapes[:3]
        return same(times * 2.0 * prod(data[:-1]) * (_matrix(weight) + _matrix(recurrent)))

    return formula


def _matrix(shape: Any) -> int:
    rows, columns = shape
    return int(rows) * int(columns)


FORMULAS: Final[dict[str, tuple[Formula, int]]] = {
    **dict.fromkeys(("aten::conv1d", "aten::conv2d", "aten::conv3d"), (_outer_convolution, 0)),
    "aten::cudnn_convolution": (_of_library(0), 0),
    **dict.fromkeys(("aten::miopen_convolution", "aten::mkldnn_convolution"), (_of_library(1), 0)),
    "aten::convolution": (_convolution, 0),
    "aten::_convolution": (_convolution, 0),
    "aten::convolution_overrideable": (_convolution, 0),
    "aten::convolution_backward": (_convolution_backward, 0),
    "aten::convolution_backward_overrideable": (_convolution_backward, 0),
    "aten::_cudnn_rnn": (_recurrent_forward(6, projects=True), 0),
    "aten::_cudnn_rnn_backward": (_recurrent_backward(10, 21, projects=True), 0),
    "aten::miopen_rnn": (_recurrent_forward(5, projects=False), 0),
    "aten::miopen_rnn_backward": (_recurrent_backward(10, 20, projects=False), 0),
    "aten::mkldnn_rnn_layer": (_one_layer(1.0), 0),
    "aten::mkldnn_rnn_layer_backward": (_one_layer(2.0), 0),
}
"""Operator -> its formula and the input whose type the products run in."""
