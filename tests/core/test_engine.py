from __future__ import annotations

import os
import signal
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor

import pytest

from perfscope import engine
from perfscope.errors import TraceError

ITEMS = list(range(6))


def double_or_fail(item: int) -> int:
    if item == 3:
        raise TraceError("rank3.json: not a trace")
    return 2 * item


def double_or_die(item: int) -> int:
    if item == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    return 2 * item


@pytest.mark.parametrize("kind", [engine.Serial, ThreadPoolExecutor, ProcessPoolExecutor])
def test_results_are_the_same_on_every_executor(kind):
    with kind() as executor:
        outcomes = sorted(engine.map_items(double_or_fail, ITEMS, executor), key=lambda outcome: outcome.item)
    assert [outcome.result for outcome in outcomes] == [0, 2, 4, None, 8, 10]
    assert [outcome.error for outcome in outcomes if outcome.error] == ["rank3.json: not a trace"]


def test_a_worker_that_is_killed_costs_its_item_only():
    with ProcessPoolExecutor(2) as executor:
        outcomes = sorted(engine.map_items(double_or_die, ITEMS, executor), key=lambda outcome: outcome.item)
    assert [outcome.result for outcome in outcomes] == [0, 2, 4, None, 8, 10]
    assert outcomes[3].error == engine.WORKER_DIED


def test_errors_of_other_kinds_carry_their_type():
    assert engine.describe(KeyError("x")) == "KeyError: 'x'"
    assert engine.describe(TraceError("x")) == "x"


def test_small_work_stays_in_the_caller_s_process():
    assert isinstance(engine.default_executor(8, 1000), engine.Serial)
    assert isinstance(engine.default_executor(1, 1 << 40), engine.Serial)
