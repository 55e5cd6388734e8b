"""Which operator a rank is slow in, where it is one above all."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from perfscope.analyzers.job.slow_operators import SlowOperator, slow_operators
from perfscope.results.rows import StragglerRow

SLOW = StragglerRow(rank=2, cause="compute", lost_us=30_000.0, confidence="high", ranks=(2,))


def rank(
    on_host_ms: dict[str, float], on_device_ms: dict[str, float] | None = None, calls: int = 4,
    twice: Collection[str] = (),
) -> Any:  # fmt: skip
    """A rank of two steps with these operators, each called so often per step, some ``twice`` as often."""
    table = lambda ms: np.array([[ms.get(name, 0.0) * 1e6] * 2 for name in on_host_ms])  # noqa: E731
    operators = SimpleNamespace(
        names=tuple(on_host_ms), host_ns=table(on_host_ms), device_ns=table(on_device_ms or {}),
        count=np.array([[calls * (1 + (name in twice))] * 2 for name in on_host_ms]),
    )  # fmt: skip
    steps = SimpleNamespace(indices_of=lambda steps: np.arange(len(steps)))
    return SimpleNamespace(tables=SimpleNamespace(operators=operators), steps=steps, has_device_work=bool(on_device_ms))


def found(*ranks: Any, row: StragglerRow = SLOW) -> SlowOperator | None:
    job: Any = SimpleNamespace(partials=dict(enumerate(ranks)), steps=(8, 9))
    return slow_operators(job, [row]).get(2)


USUAL = {"mm": 50.0, "relu": 10.0, "Custom": 1.0}


def test_one_operator_that_takes_longer_than_the_peers_is_named():
    slow = rank(USUAL | {"Custom": 41.0})
    assert found(rank(USUAL), rank(USUAL), slow) == SlowOperator("Custom", 41_000.0, 1_000.0)
    assert found(rank(USUAL), rank(USUAL), slow, row=replace(SLOW, cause="host")) is None


@pytest.mark.parametrize(
    "slow",
    [
        rank({name: 1.6 * ms for name, ms in USUAL.items()}),  # all are slower alike: most of it in the largest
        rank(USUAL | {"relu": 30.0, "mm": 75.0}),  # two of them
        rank(USUAL | {"Custom": 41.0}, calls=8),  # all are called more often: more samples
        rank({**USUAL, "Alone": 14.0}),  # no peer has it, and it is less than half of what is lost
        rank(USUAL | {"Custom": 11.0}),  # a third of what is lost
    ],
)
def test_nothing_is_named_where_it_is_not_one_operator_above_all(slow):
    assert found(rank(USUAL), rank(USUAL), slow) is None


def test_work_that_no_peer_does_is_named():
    own = found(rank(USUAL), rank(USUAL), rank({**USUAL, "Alone": 40.0}))
    assert own == SlowOperator("Alone", 40_000.0, 0.0, 4.0, 0.0)
    assert own.is_own_work


def test_work_of_the_model_that_no_peer_asks_it_for_is_named_by_what_it_needs_besides():
    """A rank that generates text calls all of the model's operators more often, and one that draws tokens."""
    own = found(*[rank(USUAL)] * 2, rank({"mm": 90.0, "relu": 14.0, "Custom": 1.5, "draw": 3.0}, twice=USUAL))
    assert own == SlowOperator("mm", 90_000.0, 50_000.0, 8.0, 4.0, alone="draw")
    # More samples need nothing that the others do not.
    assert found(*[rank(USUAL)] * 2, rank({"mm": 90.0, "relu": 14.0, "Custom": 1.5}, twice=USUAL)) is None


def test_small_operators_that_it_is_made_of_do_not_hide_it():
    views = {f"view{i}": 0.1 for i in range(12)}
    own = found(*[rank(USUAL | views)] * 2, rank({**USUAL, **views, "Alone": 40.0}, twice=views))
    assert own == SlowOperator("Alone", 40_000.0, 0.0, 4.0, 0.0)


def test_on_devices_their_time_counts():
    kernels = {"mm": 20.0, "relu": 5.0, "Custom": 1.0}
    slow = rank(USUAL, kernels | {"relu": 38.0})
    peers = rank(USUAL, kernels), rank(USUAL | {"Custom": 90.0}, kernels)
    assert found(*peers, slow) == SlowOperator("relu", 38_000.0, 5_000.0, kind="other")


def test_what_ranks_send_to_one_another_is_no_work_of_one():
    """An inner stage of a pipeline sends twice as often as the outer ones."""
    sent = {"record_param_comms": 30.0, "c10d::send": 30.0}
    assert found(rank(USUAL), rank(USUAL), rank({**USUAL, **sent})) is None
    slow = rank({**USUAL, **dict.fromkeys(sent, 60.0)})
    assert found(rank({**USUAL, **sent}), rank({**USUAL, **sent}), slow) is None


KERNELS = {"aten::mm": 6.0, "aten::bmm": 5.0, "aten::add": 2.0, "aten::gelu": 1.0}


def on_devices(**times_as_long: float) -> SlowOperator | None:
    """Rank 2's kernels take that many times as long as its peers'."""
    longer = {name: ms * times_as_long.get(name.removeprefix("aten::"), 1.0) for name, ms in KERNELS.items()}
    peers, slow = rank(KERNELS, KERNELS), rank(KERNELS, longer)
    return found(peers, peers, slow, row=replace(SLOW, lost_us=4_000.0))


def test_a_few_kernels_that_are_slow_beside_equally_quick_ones_are_not_slow_by_clocks():
    assert on_devices(bmm=1.8) == SlowOperator("aten::bmm", 9_000.0, 5_000.0, kind="matrix")
    assert on_devices(bmm=1.8, gelu=1.8) == SlowOperator("aten::bmm", 9_000.0, 5_000.0, kind="matrix")
    both = on_devices(bmm=1.6, gelu=3.0)
    assert both == SlowOperator("aten::bmm and aten::gelu", 11_000.0, 6_000.0, kind="matrix")


def test_clocks_slow_all_kernels_of_a_sort():
    assert on_devices(mm=1.5, bmm=1.5) is None  # its products are slow: low clocks
    assert on_devices(add=1.9, gelu=1.9) is None  # all else is: slow memory
    assert on_devices(mm=1.05, bmm=1.8, add=1.05) is None  # a little slower everywhere
