"""Convolutions of recordings without concrete inputs (torch before 2.0): stride and padding are not known.

The gradient that a backward takes has the size of its forward's output. So the shapes of the backwards in a recording
show what each forward computed; what no backward of the recording shows is not counted.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from math import prod
from typing import Any, Final

import numpy as np

from perfscope.analyzers.rank.flops.products import Flops, same
from perfscope.trace.distinct import distinct
from perfscope.trace.trace import NONE, Trace

_LIBRARIES: Final = "cudnn|miopen|mkldnn"
_FORWARD: Final = re.compile(rf"^aten::(conv[123]d|_?convolution|convolution_overrideable|({_LIBRARIES})_convolution)$")
_BACKWARD: Final = re.compile(rf"^aten::({_LIBRARIES})_convolution_backward$")
"""Inputs: data, gradient, weight."""
_BACKWARD_ANY: Final = re.compile(r"^aten::convolution_backward(_overrideable)?$")
"""Inputs: gradient, data, weight. Which products it computes depends on a mask, which is not recorded either."""
_OF_DATA: Final = re.compile(rf"^aten::({_LIBRARIES})_convolution_backward_input$")
"""Inside ``_BACKWARD``, where the data's gradient is wanted: size of the data, gradient, weight."""

_Shape = tuple[int, ...]


def is_convolution(name: str) -> bool:
    """Whether an operator of this name computes a convolution, or the products of its backward."""
    return any(pattern.match(name) for pattern in (_FORWARD, _BACKWARD))


class KnownConvolutions:
    """What the backwards of a recording show: the output's size by data and weight, and which data want a gradient."""

    def __init__(self, trace: Trace) -> None:
        self._outputs: dict[tuple[_Shape, _Shape], set[_Shape]] = {}
        for pattern, order in ((_BACKWARD, (0, 1, 2)), (_BACKWARD_ANY, (1, 0, 2))):
            for shapes in _shapes_of(trace, pattern):
                data, gradient, weight = (shapes[place] for place in order)
                if len(data) == len(gradient) == len(weight) > 2:
                    self._outputs.setdefault((data, weight), set()).add(gradient)
        self._of_data = {(gradient, weight) for _, gradient, weight in _shapes_of(trace, _OF_DATA)}

    def flops(self, name: str, shapes: str, types: str) -> tuple[Flops, str] | None:
        """FLOPs of one call and its recorded type; None for other operators and unknown or ambiguous sizes."""
        if not is_convolution(name):
            return None
        try:
            flops = self._flops(name, [_shape(shape) for shape in json.loads(shapes)[:3]])
            recorded = json.loads(types)[0] if types else ""
        except (ValueError, TypeError, IndexError):
            return None
        return (same(flops), str(recorded)) if flops is not None else None

    def _flops(self, name: str, shapes: list[_Shape]) -> float | None:
        if _BACKWARD.match(name):
            _, output, weight = shapes
            products = 1 + ((output, weight) in self._of_data)
        else:
            weight, products = shapes[1], 1
            found = self._outputs.get((shapes[0], weight), set())
            if len(found) != 1:
                return None
            (output,) = found
        # The weight's sizes multiply to the multiplications per output position, for all groups.
        return 2.0 * products * output[0] * prod(output[2:]) * prod(weight)


def _shapes_of(trace: Trace, pattern: re.Pattern[str]) -> Iterable[list[_Shape]]:
    """The first three shapes of each kind of call, once; those that do not fit are left out."""
    rows = np.flatnonzero(trace.names_where(pattern.match))
    for index in distinct(trace.shapes[rows]).tolist():
        try:
            shapes = [_shape(shape) for shape in json.loads(trace.strings[index])[:3]] if index != NONE else []
        except (ValueError, TypeError):
            continue
        if len(shapes) == 3:
            yield shapes


def _shape(value: Any) -> _Shape:
    return tuple(int(size) for size in value)
