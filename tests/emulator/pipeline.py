"""1F1B and GPipe, as ``torch.distributed.pipelining`` and Megatron-LM schedule them: batched sends and receives."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

from tests.emulator import model as layers
from tests.emulator.machine import Meeting, Waits, Work
from tests.emulator.nccl import transfer_ns
from tests.emulator.rank import COMPUTE, Communicator, Rank
from tests.emulator.reducers import Reducer
from tests.emulator.spec import US


def step(rank: Rank, reducer: Reducer | None) -> Waits:
    """A step of one stage."""
    if rank.job.gpipe:
        yield from _all_forwards_first(rank, reducer)
    else:
        yield from _one_forward_one_backward(rank, reducer)
    if reducer is not None:
        rank.depend(reducer.finish())


def _all_forwards_first(rank: Rank, reducer: Reducer | None) -> Waits:
    """All forwards, then all backwards; what was sent is waited for at once, or behind the last pass of its kind."""
    at_once, sent = rank.job.sends_awaited, []
    for micro in range(rank.job.microbatches):
        yield from _forward(rank, micro, receive=True)
        sent += yield from _exchange(rank, [("send", "next", "f", micro)], awaited=at_once)
    rank.depend(sent)
    sent = []
    for micro in range(rank.job.microbatches):
        yield from _exchange(rank, [("recv", "next", "b", micro)])
        yield from _backward(rank, micro, reducer)
        sent += yield from _exchange(rank, [("send", "previous", "b", micro)], awaited=at_once)
    rank.depend(sent)


def _one_forward_one_backward(rank: Rank, reducer: Reducer | None) -> Waits:
    """Some forwards, then one of each in turn, then the remaining backwards."""
    job = rank.job
    stage, count = job.stage_of(rank.number), job.microbatches
    ahead = min(job.stages - 1 - stage, count)
    forwards = backwards = 0
    for _ in range(ahead):
        yield from _forward(rank, forwards, receive=True)
        yield from _exchange(rank, [("send", "next", "f", forwards)])
        forwards += 1
    if forwards < count:
        yield from _exchange(rank, [("recv", "previous", "f", forwards)])
    while forwards < count:
        yield from _forward(rank, forwards, receive=False)
        yield from _exchange(rank, [("send", "next", "f", forwards), ("recv", "next", "b", backwards)])
        forwards += 1
        yield from _backward(rank, backwards, reducer)
        more = [("recv", "previous", "f", forwards)] if forwards < count else []
        yield from _exchange(rank, [("send", "previous", "b", backwards), *more])
        backwards += 1
    while backwards < count:
        yield from _exchange(rank, [("recv", "next", "b", backwards)])
        yield from _backward(rank, backwards, reducer)
        yield from _exchange(rank, [("send", "previous", "b", backwards)])
        backwards += 1


def _units(rank: Rank) -> range:
    each = rank.job.model.blocks // rank.job.stages
    stage = rank.job.stage_of(rank.number)
    return range(stage * each, (stage + 1) * each)


def _forward(rank: Rank, micro: int, receive: bool) -> Waits:
    if receive:
        yield from _exchange(rank, [("recv", "previous", "f", micro)])
    rank.micro = micro
    for unit in _units(rank):
        yield from layers.forward(rank, unit)


def _backward(rank: Rank, micro: int, reducer: Reducer | None) -> Waits:
    rank.micro = micro
    rank.thread = "autograd"
    last = micro == rank.job.microbatches - 1
    if reducer is not None:
        reducer.prepare(last)
    for unit in reversed(_units(rank)):
        for step in layers.backward(rank, unit):
            if not isinstance(step, int):
                yield step
            elif reducer is not None:
                yield from reducer.ready((unit - _units(rank)[0], step))
    rank.thread = "main"


def _exchange(
    rank: Rank, wanted: list[tuple[str, str, str, int]], *, awaited: bool = True
) -> Generator[Any, None, list[Work]]:
    """``batch_isend_irecv``: one kernel, after which the compute stream goes on where it is ``awaited``. Returns it;
    nothing where the stage has no such neighbour.
    """
    job, world = rank.job, rank.communicators["world"]
    each = job.tensor * job.replicas
    stage = job.stage_of(rank.number)
    real = [
        (kind, rank.number + (each if to == "next" else -each), phase, micro)
        for kind, to, phase, micro in wanted
        if 0 <= stage + (1 if to == "next" else -1) < job.stages
    ]
    if not real:
        return []
    work = yield from _batch(rank, world, real)
    if awaited:
        rank.depend([work])
    return [work]


def _batch(rank: Rank, world: Communicator, messages: list[tuple[str, int, str, int]]) -> Generator[Any, None, Work]:
    job = rank.job
    elements = job.model.tokens // job.microbatches * job.model.width
    size = elements * job.model.element_bytes
    work = Work(rank.number, 50, "kernel", "ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)", 0, 0)
    meetings = []
    described = []
    for kind, peer, phase, micro in messages:
        ends = (rank.number, peer) if kind == "send" else (peer, rank.number)
        key = (*ends, phase, micro, rank.step)
        if key not in world.meetings:
            far = job.host_of(ends[0]) != job.host_of(ends[1])
            network = job.network
            link = Communicator(
                f"{ends[0]}:{ends[1]}", "", tuple(sorted(ends)), 0,
                network.between_latency_ns if far else network.latency_ns,
                network.between_gbps if far else network.gbps,
            )  # fmt: skip
            world.meetings[key] = Meeting(2, transfer_ns(job, link, "message", size, rank.step, f"{phase}{micro}"))
        meetings.append(world.meetings[key])
        described.append(_described(rank, world, kind, peer, elements))
    for (kind, *_), args in zip(messages, described, strict=True):
        with rank.operator("c10d::send" if kind == "send" else "c10d::recv_"):
            rank.spend(0.2 * job.cpu.collective_ns)
            own = args if job.recording.metadata != "none" else {}
            with rank.operator("record_param_comms", **own):
                rank.spend(0.2 * job.cpu.collective_ns)
    work.meetings = meetings
    work.duration_ns = 1 * US
    with rank.annotation("nccl:coalesced"):
        rank.spend(0.2 * job.cpu.collective_ns)
        yield from rank.launch(work, rank.last(COMPUTE), "cudaLaunchKernelExC")
    return work


def _described(rank: Rank, world: Communicator, kind: str, peer: int, elements: int) -> dict[str, Any]:
    return {
        "Collective name": kind,
        "dtype": "BFloat16" if rank.job.model.element_bytes == 2 else "Float",
        "In msg nelems": elements,
        "Out msg nelems": elements,
        "Group size": len(world.ranks),
        "Process Group Name": world.name,
        "Process Group Description": world.description,
        "Process Group Ranks": str(list(world.ranks)),
        "Dst Rank" if kind == "send" else "Src Rank": peer,
        "Seq": world.next(rank.number, "p2p"),
    }
