"""Programs of healthy jobs: some steps of DDP, FSDP, and meshes of tensor, pipeline, data and expert parallelism."""

from __future__ import annotations

import random
from collections.abc import Iterable

from tests.stuck.program import Action, Collective, Group, Job, Join, Message, Messages, Sync


def ddp(rng: random.Random, world: int, steps: int) -> Job:
    """All-reduces of buckets, overlapped, and sometimes a loss that is reduced."""
    group = Group("0", "default_pg", tuple(range(world)))
    buckets = [rng.choice([1024, 4096, 65536]) * rng.randint(1, 9) for _ in range(rng.randint(1, 8))]
    loss, waits = rng.random() < 0.5, rng.random() < 0.7
    step: list[Action] = [
        Collective(group, "all_reduce", (size,), (size,), "Float", blocking=False, line=20) for size in buckets
    ]
    step.append(Join(group))
    if loss:
        step.append(Collective(group, "all_reduce", (1,), (1,), "Float", line=31))
    if waits:
        step.append(Sync())
    return Job([group], [steps * step + [Sync()] for _ in range(world)])


def fsdp(rng: random.Random, world: int, steps: int) -> Job:
    """Gathers before each layer, scatters after; with replicas where the world allows, an all-reduce between them."""
    default = Group("0", "default_pg", tuple(range(world)))
    shard = rng.choice([size for size in (2, 4, 8, 16, world) if world % size == 0 and size <= world])
    groups, shards, replicas = [default], {}, {}
    for first in range(0, world, shard):
        _add(groups, shards, "mesh_shard", range(first, first + shard))
    if shard < world:
        for first in range(shard):
            _add(groups, replicas, "mesh_replicate", range(first, world, shard))
    layers = [rng.choice([512, 2048, 8192]) * rng.randint(1, 5) for _ in range(rng.randint(2, 6))]
    clip = rng.random() < 0.6
    programs = []
    for rank in range(world):
        group = shards[rank]
        step: list[Action] = []
        for size in [*layers, *reversed(layers)]:
            step += [
                Collective(group, "_allgather_base", (size,), (size * shard,), blocking=False, line=40),
                Join(group),
            ]
        for size in reversed(layers):
            step.append(Collective(group, "_reduce_scatter_base", (size * shard,), (size,), blocking=False, line=44))
            if replicas:
                step.append(Join(group))
                step.append(Collective(replicas[rank], "all_reduce", (size,), (size,), blocking=False, line=45))
        step += [Join(group), *([Join(replicas[rank])] if replicas else [])]
        if clip:
            step.append(Collective(default, "all_reduce", (1,), (1,), "Float", line=52))
        programs.append(steps * [*step, Sync()])
    return Job(groups, programs)


def mesh(rng: random.Random, tp: int, pp: int, dp: int, ep: int, steps: int) -> Job:
    """1F1B over stages; in each a tensor-parallel group, in each layer experts, at the end data-parallel gradients.

    Ranks are numbered as Megatron does: tensor first, then data, then pipeline; ``ep`` divides ``dp``.
    """
    world = tp * pp * dp
    groups = [Group("0", "default_pg", tuple(range(world)))]
    rank_of = {(t, d, p): t + tp * (d + dp * p) for t in range(tp) for d in range(dp) for p in range(pp)}
    of: dict[str, dict[int, Group]] = {name: {} for name in ("tp", "dp", "pp", "ep")}
    for name, members in _members(rank_of, tp, pp, dp, ep):
        _add(groups, of[name], _DESCRIPTIONS[name], members)
    micro, layers, batched = rng.randint(1, 2 * pp + 1), rng.randint(1, 3), rng.random() < 0.6
    norm, first_reduce = rng.random() < 0.7, rng.random() < 0.5
    programs = []
    for rank in range(world):
        place = {number: at for at, number in rank_of.items()}[rank]
        stage = _Stage(rank, {name: members.get(rank) for name, members in of.items()}, layers, batched)
        stage.previous = rank_of[place[0], place[1], place[2] - 1] if place[2] else None
        stage.next = rank_of[place[0], place[1], place[2] + 1] if place[2] + 1 < pp else None
        step = stage.one_forward_one_backward(micro, pp - place[2] - 1)
        data = of["dp"].get(rank)
        if data is not None:
            sizes = [16384, 4096] if first_reduce else [8192]
            step += [Collective(data, "all_reduce", (n,), (n,), "Float", blocking=False, line=70) for n in sizes]
            step.append(Join(data))
        if norm:
            step.append(Collective(groups[0], "all_reduce", (1,), (1,), "Float", line=80))
        programs.append(steps * [*step, Sync()])
    return Job(groups, programs)


_DESCRIPTIONS = {
    "tp": "TENSOR_MODEL_PARALLEL_GROUP", "dp": "DATA_PARALLEL_GROUP", "pp": "PIPELINE_MODEL_PARALLEL_GROUP",
    "ep": "EXPERT_MODEL_PARALLEL_GROUP",
}  # fmt: skip


def _members(
    rank_of: dict[tuple[int, int, int], int], tp: int, pp: int, dp: int, ep: int
) -> Iterable[tuple[str, list[int]]]:
    ts, ds, ps = range(tp), range(dp), range(pp)
    if tp > 1:
        yield from (("tp", [rank_of[t, d, p] for t in ts]) for p in ps for d in ds)
    if dp > 1:
        yield from (("dp", [rank_of[t, d, p] for d in ds]) for p in ps for t in ts)
    if pp > 1:
        yield from (("pp", [rank_of[t, d, p] for p in ps]) for d in ds for t in ts)
    if ep > 1:
        for first in range(0, dp, ep):
            yield from (("ep", [rank_of[t, d, p] for d in range(first, first + ep)]) for p in ps for t in ts)


class _Stage:
    """One rank's part of a micro-batch, forward and backward."""

    def __init__(self, rank: int, groups: dict[str, Group | None], layers: int, batched: bool) -> None:
        self._rank, self._groups, self._layers, self._batched = rank, groups, layers, batched
        self.previous: int | None = None
        self.next: int | None = None

    def one_forward_one_backward(self, micro: int, warm: int) -> list[Action]:
        """The step of a stage that has ``warm`` stages after it."""
        actions: list[Action] = []
        warm = min(warm, micro)
        for _ in range(warm):
            actions += [*self._move([(False, self.previous)]), *self._compute(50), *self._move([(True, self.next)])]
        if warm < micro:
            actions += self._move([(False, self.previous)])
        for number in range(micro - warm):
            last = number == micro - warm - 1
            actions += [*self._compute(50), *self._move([(True, self.next), (False, self.next)])]
            actions += self._compute(60)
            actions += self._move([(True, self.previous), *([] if last else [(False, self.previous)])])
        for _ in range(warm):
            actions += [*self._move([(False, self.next)]), *self._compute(60), *self._move([(True, self.previous)])]
        return actions

    def _compute(self, line: int) -> list[Action]:
        tensor, expert = self._groups["tp"], self._groups["ep"]
        actions: list[Action] = []
        for _ in range(self._layers):
            if tensor is not None:
                actions.append(Collective(tensor, "all_reduce", (2048, 512), (2048, 512), line=line))
            if expert is not None:
                actions += 2 * [Collective(expert, "all_to_all", (1024, 512), (1024, 512), line=line + 2)]
        return actions

    def _move(self, wanted: list[tuple[bool, int | None]]) -> list[Action]:
        group = self._groups["pp"]
        parts = tuple(Message(send, peer, (2048, 512)) for send, peer in wanted if peer is not None)
        if group is None or not parts:
            return []
        batched = self._batched or len(parts) > 1
        return [Messages(group, parts, batched, line=90)]


def _add(groups: list[Group], of: dict[int, Group], description: str, members: Iterable[int]) -> None:
    group = Group(str(len(groups)), description, tuple(members))
    groups.append(group)
    of.update(dict.fromkeys(group.ranks, group))
