"""Who calls the costliest operators: the operator around them, and the script's own function, by hand."""

from __future__ import annotations

from perfscope.analyzers.rank.analyze import analyze_rank
from perfscope.trace.trace import Category
from tests.traces import TraceBuilder

FUNCTION = "train.py(11): hook"
AROUND = "autograd::engine::evaluate_function: "


def callers(*, stacks: bool) -> dict[str, tuple[str, str]]:
    """Three steps: 10 ms of products, and a quantile, in a hook of the backward, that sorts for 50."""
    builder = TraceBuilder()
    for step in range(3):
        begin = step * 100_000_000
        builder.step(step, begin, begin + 100_000_000).op("aten::mm", begin, begin + 10_000_000)
        at = begin + 20_000_000
        builder.op(f"{AROUND}MulBackward0", at, at + 60_000_000)
        builder.op("aten::quantile", at + 1_000_000, at + 55_000_000)
        builder.op("aten::sort", at + 2_000_000, at + 52_000_000).op("aten::sort", at + 2_100_000, at + 51_900_000)
        if stacks:
            for name, early in (("train.py(40): main", 9), (FUNCTION, 2), ("torch/functional.py(7): quantile", 1)):
                start, end = at + 1_000_000 - early * 100_000, at + 55_000_000 + early * 100_000
                builder.event(name, Category.PYTHON, start, end)
    times = analyze_rank(builder.build()).tables.operators
    functions = times.function or ("",) * len(times.called_by)
    return dict(zip(times.names, zip(times.called_by, functions, strict=True), strict=False))


def test_the_operator_around_it_is_named_and_no_overload_nor_the_engine() -> None:
    found = callers(stacks=False)
    assert found["aten::sort"] == ("aten::quantile", "")
    assert found["aten::mm"] == found["aten::quantile"] == ("", "")


def test_with_stacks_the_scripts_own_function_is() -> None:
    found = callers(stacks=True)
    assert found["aten::sort"] == ("aten::quantile", FUNCTION)
    assert found["aten::mm"] == ("", "")
