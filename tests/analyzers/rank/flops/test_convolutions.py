"""FLOPs of convolutions whose stride and padding were not recorded, as by torch before 2.0."""

from __future__ import annotations

from pathlib import Path

import pytest

from perfscope.analyzers.rank.flops.calls import flop_calls
from perfscope.analyzers.rank.flops.recomputation import stretches
from perfscope.analyzers.rank.nesting import Nested
from perfscope.trace.trace import Category
from tests.analyzers.measured import measured
from tests.traces import TraceBuilder

RESNET = Path(__file__).parents[5] / "shared" / "traces" / "resnet50_workers_0"
STEM = [[32, 3, 224, 224], [64, 3, 7, 7], [], [], [], [], [], [], []]
STEM_OUT = [32, 64, 112, 112]
STEM_FLOPS = 2.0 * 32 * 112 * 112 * (64 * 3 * 7 * 7)
SAME = [[32, 64, 56, 56], [64, 64, 3, 3], [], [], []]
SAME_FLOPS = 2.0 * 32 * 56 * 56 * (64 * 64 * 3 * 3)


def counted(*calls: tuple[str, list[object]]) -> list[float]:
    """FLOPs of the calls that count, one after the other; a name that ends in a dot lies inside the call before it."""
    builder = TraceBuilder()
    at = 0
    for name, shapes in calls:
        inside = name.startswith(".")
        begin, length = (at - 80, 20) if inside else (at, 90)
        builder.op(name.removeprefix("."), begin, begin + length, shapes=shapes, types=["float"] * len(shapes))
        at += 0 if inside else 100
    trace = builder.build()
    operators = Nested.of(trace, trace.rows(Category.CPU_OP))
    return flop_calls(trace, operators, stretches(trace, operators)).model.tolist()


def test_the_output_has_the_size_of_the_backward_s_gradient() -> None:
    backward = [STEM[0], STEM_OUT, STEM[1], [], [], [], [], [], [], [], []]
    found = counted(
        ("aten::conv2d", STEM), (".aten::cudnn_convolution", STEM), ("aten::cudnn_convolution_backward", backward)
    )
    assert found == [STEM_FLOPS, STEM_FLOPS], "of an image no gradient is wanted: one product"


def test_where_data_want_a_gradient_the_backward_has_two_products() -> None:
    out = SAME[0]
    found = counted(
        ("aten::cudnn_convolution", SAME),
        ("aten::cudnn_convolution_backward", [SAME[0], out, SAME[1], []]),
        (".aten::cudnn_convolution_backward_input", [[], out, SAME[1], []]),
    )
    assert found == [SAME_FLOPS, 2 * SAME_FLOPS]


def test_newer_backwards_show_the_output_as_well() -> None:
    """Which of their products were wanted they do not show."""
    found = counted(("aten::convolution", STEM), ("aten::convolution_backward", [STEM_OUT, STEM[0], STEM[1], [], []]))
    assert found == [STEM_FLOPS]


@pytest.mark.parametrize(
    "backwards",
    [
        [],
        [("aten::cudnn_convolution_backward", [[32, 3, 224, 224], STEM_OUT, [64, 3, 3, 3]])],
        # With two strides.
        [
            ("aten::convolution_backward", [STEM_OUT, STEM[0], STEM[1]]),
            ("aten::convolution_backward", [[32, 64, 224, 224], STEM[0], STEM[1]]),
        ],
        [("aten::cudnn_convolution_backward", [[], [], []])],
    ],
    ids=["none", "another weight", "ambiguous", "no shapes"],
)
def test_what_no_backward_shows_is_not_counted(backwards: list[tuple[str, list[object]]]) -> None:
    assert STEM_FLOPS not in counted(("aten::conv2d", STEM), *backwards)


@pytest.mark.skipif(not RESNET.is_dir(), reason="the recording is not here")
def test_a_real_resnet_50_takes_what_its_architecture_does() -> None:
    """4.089 billion multiplications an image forward, as published; twice that backward, but not to the image."""
    found = measured(RESNET).utilisation
    stem = 112 * 112 * 64 * 3 * 7 * 7
    assert found.model_flops_per_step == pytest.approx(2 * 32 * (3 * 4.089e9 - stem), rel=0.001)
    assert found.flops_coverage == pytest.approx(1.0, abs=0.001)
    assert found.mfu is not None
    assert 0.2 < found.mfu < 0.4
