"""Findings about memory snapshots: what is advised where memory ran out, grows, or is held in vain."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from perfscope.analyzers.rules.context import RuleContext
from perfscope.analyzers.rules.memory import fragmentation, memory_growth, out_of_memory
from perfscope.results.memory.snapshots import GrowthRow, HolderRow, MemorySnapshots, OutOfMemoryRow, SnapshotRow
from perfscope.results.rows import MemoryRow
from tests.analyzers.rules.jobs import GIB, MIB, breakdown, changed, context

PLACE: dict[str, Any] = {
    "rank": 0, "device": 0, "phase": "forward", "module": "gpt.py:88", "function": "run", "file": "train.py", "line": 9
}  # fmt: skip


def device(**changes: Any) -> SnapshotRow:
    row = SnapshotRow(
        rank=0, device=0, file="rank0.pickle", reserved_bytes=70 * GIB, allocated_bytes=50 * GIB, peak_bytes=69 * GIB,
        rounding_bytes=0, pending_bytes=0, cached_bytes=0, split_bytes=20 * GIB, largest_free_bytes=GIB,
        reserved_peak_bytes=70 * GIB, fragmentation=1 / 70, private_bytes=0, expandable=False, actions=1000, steps=8,
    )  # fmt: skip
    return dataclasses.replace(row, **changes)


def case(snapshots: MemorySnapshots | None, *, capacity: int | None = 80 * GIB, ranks: int = 2) -> RuleContext:
    memory = (MemoryRow(rank=0, peak_bytes=None, capacity_bytes=capacity),)
    made = context(*(breakdown(rank) for rank in range(ranks)), memory=memory)
    return dataclasses.replace(made, summary=dataclasses.replace(made.summary, snapshots=snapshots))


def failed(cause: Any, *, phase: str = "forward", expandable: bool = False, ranks: int = 2) -> RuleContext:
    oom = OutOfMemoryRow(
        **PLACE, requested_bytes=2 * GIB, device_free_bytes=GIB, allocated_bytes=70 * GIB, reserved_bytes=78 * GIB,
        cause=cause,
    )  # fmt: skip
    held = HolderRow(
        **{**PLACE, "phase": phase}, bytes=GIB, share=0.6, allocations=3, largest_bytes=GIB, kept_bytes=GIB
    )
    found = MemorySnapshots(devices=(device(expandable=expandable),), holders=(held,), ooms=(oom,))
    return case(found, ranks=ranks)


@pytest.mark.parametrize(
    ("job", "title", "how"),
    [
        (failed("fragmentation"), "any of the free pieces, although 8.00 GiB", "expandable_segments:True"),
        (failed("fragmentation", expandable=True), "free pieces", "apply_activation_checkpointing"),
        (failed("others"), "something else on the device", "nvidia-smi"),
        (failed("request"), "one allocation of 2.00 GiB is more than half", "in pieces"),
        (failed("full"), "2.00 GiB more did not fit beside 70.0 GiB", "apply_activation_checkpointing"),
        (failed("full", phase="optimizer"), "did not fit", "fully_shard"),
        (failed("full", phase="optimizer", ranks=1), "did not fit", "fewer bits"),
    ],
)  # fmt: skip
def test_the_cause_decides_what_to_change(job: RuleContext, title: str, how: str) -> None:
    finding = out_of_memory.evaluate(job)
    assert finding is not None
    assert finding.title.startswith("Rank 0 ran out of memory: ")
    assert title in finding.title
    assert how in finding.action.how
    assert finding.evidence[0].value == 2 * GIB


def test_who_else_uses_an_amd_device_is_shown_by_its_own_tools() -> None:
    finding = out_of_memory.evaluate(changed(failed("others"), devices=("AMD Instinct MI300X",)))
    assert finding is not None
    assert "(amd-smi process or rocm-smi --showpids)" in finding.action.how


def test_what_grew_is_the_cause_where_it_is_large() -> None:
    job = failed("full")
    assert job.summary.snapshots is not None
    for last, named in ((13 * GIB, False), (14 * GIB, True)):
        row = GrowthRow(**PLACE, bytes_per_step=64 * MIB, first_bytes=0, last_bytes=last, steps=9)
        found = dataclasses.replace(job.summary.snapshots, growth=(row,))
        finding = out_of_memory.evaluate(case(found))
        assert finding is not None
        assert ("64.0 MiB more are kept in each step, in the forward of gpt.py:88" in finding.title) == named
        assert ("run (train.py:9)" in finding.action.how) == named


def test_growth_names_the_place_and_when_the_device_is_full() -> None:
    row = GrowthRow(**PLACE, bytes_per_step=64 * MIB, first_bytes=0, last_bytes=GIB, steps=16)
    found = MemorySnapshots(devices=(device(),), holders=(), growth=(row,))
    finding = memory_growth.evaluate(case(found))
    assert finding is not None
    assert finding.title == (
        "Rank 0's memory grows by 64.0 MiB per step, in the forward of gpt.py:88, run (train.py:9)"
    )
    # 80 - 69 GiB at 64 MiB each.
    assert finding.evidence[-1].value == 11 * 16
    without = memory_growth.evaluate(case(found, capacity=None))
    assert without is not None
    assert len(without.evidence) == 2


@pytest.mark.parametrize(
    ("changes", "capacity", "fires"),
    [
        ({}, 80 * GIB, False),
        ({"peak_bytes": 56 * GIB, "fragmentation": 0.2}, 80 * GIB, True),
        ({"peak_bytes": 57 * GIB, "fragmentation": 0.19}, 80 * GIB, False),
        ({"peak_bytes": 56 * GIB, "fragmentation": 0.2}, None, True),
        ({"peak_bytes": 56 * GIB, "fragmentation": 0.2}, 90 * GIB, False),
        ({"peak_bytes": 56 * GIB, "fragmentation": 0.2, "expandable": True}, 80 * GIB, False),
        ({"peak_bytes": 56 * GIB, "fragmentation": 0.2, "private_bytes": GIB}, 80 * GIB, False),
        ({"peak_bytes": 56 * GIB, "fragmentation": None}, 80 * GIB, False),
    ],
)
def test_fragmentation_counts_where_the_device_is_nearly_full(
    changes: dict[str, Any], capacity: int | None, fires: bool
) -> None:
    finding = fragmentation.evaluate(case(MemorySnapshots(devices=(device(**changes),), holders=()), capacity=capacity))
    assert (finding is not None) == fires
    if finding is not None:
        assert "14.0 GiB of the 70.0 GiB that rank 0's allocator holds" in finding.title


def test_without_snapshots_nothing_is_said() -> None:
    for rule in (out_of_memory, memory_growth, fragmentation):
        assert rule.evaluate(case(None)) is None
        assert rule.evaluate(case(MemorySnapshots(devices=(device(),), holders=()))) is None
