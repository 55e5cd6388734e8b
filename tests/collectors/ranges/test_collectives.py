"""Ranges around collectives, in one process: their names, and that the operators are their own again."""

from __future__ import annotations

from typing import Any

import pytest

from perfscope.collectors.problems import Problems
from perfscope.recording.vocabulary import COLLECTIVE_PREFIX
from tests.collectors.harness import needs_torch
from tests.collectors.worlds import Written, world

pytestmark = [needs_torch, pytest.mark.filterwarnings("ignore")]


def hooked_operators() -> list[str]:
    """Operators of c10d that have a kernel where ours go."""
    import torch

    has = torch._C._dispatch_has_kernel_for_dispatch_key
    names = torch._C._dispatch_get_all_op_names()
    return [name for name in names if name.startswith("c10d::") and has(name, "BackendSelect")]


def ranges_of(calls: Any, size: int = 4, rank: int = 1) -> list[str]:
    """Names, without the prefix, of the ranges that ``calls(dist)`` leaves."""
    import torch.distributed as dist

    from perfscope.collectors.ranges.collectives import CollectiveRanges

    written, problems = Written(), Problems()
    with world(size, rank):
        ranges = CollectiveRanges(written, problems)  # type: ignore[arg-type]
        ranges.install()
        assert len(hooked_operators()) >= 20
        try:
            calls(dist)
        finally:
            ranges.remove()
    assert hooked_operators() == []
    assert (written.open, problems.as_tuple()) == (0, ())
    assert all(name.startswith(COLLECTIVE_PREFIX) for name in written.names)
    return [name.removeprefix(COLLECTIVE_PREFIX) for name in written.names]


def test_each_kind_records_group_size_type_and_bytes() -> None:
    import torch

    x, wide = torch.zeros(8), torch.zeros(32, dtype=torch.bfloat16)

    def calls(dist: Any) -> None:
        dist.all_reduce(x)
        dist.broadcast(x, 0)
        dist.all_gather_into_tensor(wide, wide[:8])
        dist.reduce_scatter_tensor(wide[:8], wide)
        dist.all_gather([torch.zeros(8) for _ in range(4)], x)
        dist.scatter(x, src=0)
        dist.gather(x, dst=0)
        dist.all_to_all_single(wide, wide)
        dist.barrier()

    assert ranges_of(calls) == [
        "all_reduce|0|4|0||float32|32",
        "broadcast|0|4|1||float32|32",
        "all_gather|0|4|2||bfloat16|64",
        "reduce_scatter|0|4|3||bfloat16|64",
        "all_gather|0|4|4||float32|128",
        "scatter|0|4|5||float32|128",  # what the root holds
        "gather|0|4|6||float32|128",
        "all_to_all|0|4|7||bfloat16|64",
        "barrier|0|4|8|||",
    ]


def test_messages_are_counted_by_peer_and_apart_from_collectives() -> None:
    import torch

    x = torch.zeros(2)

    def calls(dist: Any) -> None:
        dist.send(x, 2)
        dist.send(x, 3)
        dist.all_reduce(x)
        dist.send(x, 2)
        dist.recv(x, 2)
        dist.send(x, 2, tag=7)

    assert ranges_of(calls) == [
        "send|0|4|0|2|float32|8",
        "send|0|4|0|3|float32|8",
        "all_reduce|0|4|0||float32|8",
        "send|0|4|1|2|float32|8",
        "recv|0|4|0|2|float32|8",
        "send|0|4|0|2|float32|8",
    ]


def test_a_peer_in_a_smaller_group_has_its_global_rank() -> None:
    import torch

    def calls(dist: Any) -> None:
        group = dist.new_group([1, 3])
        dist.send(torch.zeros(2), 3, group=group)
        dist.all_reduce(torch.zeros(2), group=group)

    send, reduce = ranges_of(calls)[-2:]
    assert send.split("|")[2:] == ["2", "0", "3", "float32", "8"]
    assert reduce.split("|")[2:4] == ["2", "0"]


def test_a_fault_of_ours_stays_ours() -> None:
    import torch
    import torch.distributed as dist

    from perfscope.collectors.ranges.collectives import CollectiveRanges

    class Broken(Written):
        def begin(self, name: str) -> str:
            raise RuntimeError("injected")

    problems = Problems()
    with world(2):
        ranges = CollectiveRanges(Broken(), problems)  # type: ignore[arg-type]
        ranges.install()
        dist.all_reduce(torch.zeros(2))
        dist.all_reduce(torch.zeros(2))
        ranges.remove()
    assert problems.as_tuple() == ("describing collectives failed and was switched off (RuntimeError: injected)",)
    assert hooked_operators() == []


def test_without_a_process_group_nothing_is_installed() -> None:
    from perfscope.collectors.ranges.collectives import CollectiveRanges

    ranges = CollectiveRanges(Written(), Problems())  # type: ignore[arg-type]
    ranges.install()
    assert hooked_operators() == []
    ranges.remove()
