"""Which rank does what: tensor, data and pipeline parallel groups, stages and hosts.

Ranks are numbered as Megatron numbers them by default (``tp-dp-pp``): tensor fastest, then data, then pipeline. With
8 ranks, tensor 2 and pipeline 2::

    rank      0  1  2  3  4  5  6  7
    tensor    0  1  0  1  0  1  0  1      groups [0, 1], [2, 3], [4, 5], [6, 7]
    data      0  0  1  1  0  0  1  1      groups [0, 2], [1, 3], [4, 6], [5, 7]
    stage     0  0  0  0  1  1  1  1      groups [0, 4], [1, 5], [2, 6], [3, 7]
"""

from __future__ import annotations

from dataclasses import dataclass

COMPUTE_STREAM = 7
SIDE_STREAM = 16
"""A second stream of the training loop's own, where ZeRO prepares gradients."""
WORLD_STREAM = 20
_STREAMS = {"data": 24, "tensor": 28, "pipeline": 32, "model": 40, "shard": 44, "replica": 48}
NEXT_STREAM = 36
"""Sends to and receives from the next stage, where each neighbour has a stream of its own; ``pipeline``'s is the
previous one's."""
_DESCRIPTIONS = {
    "megatron": {
        "data": "DATA_PARALLEL_GROUP",
        "tensor": "TENSOR_MODEL_PARALLEL_GROUP",
        "pipeline": "PIPELINE_MODEL_PARALLEL_GROUP",
        "model": "MODEL_PARALLEL_GROUP",
        "shard": "INTRA_PARTIAL_DATA_PARALLEL_GROUP",
        "replica": "INTER_PARTIAL_DATA_PARALLEL_GROUP",
    },
    "mesh": {
        "data": "mesh_dp",
        "tensor": "mesh_tp",
        "pipeline": "mesh_pp",
        "model": "mesh_pp_tp",
        "shard": "mesh_dp_shard",
        "replica": "mesh_dp_replicate",
    },
}
GROUP_STYLES = tuple(_DESCRIPTIONS)


@dataclass(frozen=True)
class Group:
    """A process group: ``name`` is torch's number of it, the same on all its ranks."""

    name: str
    description: str
    role: str
    """``world``, ``data``, ``tensor``, ``pipeline``, ``model`` (all that hold parts of one copy of the model), and with
    replicas ``shard`` (those that hold one in shards) and ``replica`` (those that hold the same shard)."""
    ranks: tuple[int, ...]
    stream: int
    """Where its collectives run."""


@dataclass(frozen=True)
class Layout:
    """Sizes of the dimensions; ``data`` is what tensor and pipeline leave of the ranks."""

    ranks: int
    tensor: int = 1
    pipeline: int = 1
    style: str = "megatron"
    """Whose descriptions the groups carry: ``megatron`` or ``mesh`` (torch's DeviceMesh)."""
    replicas: int = 1
    """Into how many groups the data parallel ranks are divided that each hold one whole copy of the model in shards."""

    def __post_init__(self) -> None:
        if self.style not in _DESCRIPTIONS:
            raise ValueError(f"no such style of groups: {self.style!r}")
        if self.ranks < 1 or self.tensor < 1 or self.pipeline < 1 or self.ranks % (self.tensor * self.pipeline):
            raise ValueError(f"{self.ranks} ranks cannot be laid out as {self.tensor} tensor x {self.pipeline} stages")
        if self.replicas < 1 or self.data % self.replicas:
            raise ValueError(f"{self.data} copies of the model cannot be {self.replicas} replicas of shards")

    @property
    def data(self) -> int:
        """Copies of the model."""
        return self.ranks // (self.tensor * self.pipeline)

    @property
    def _shards(self) -> int:
        """Ranks that hold one copy of the model between them."""
        return self.data // self.replicas

    def rank(self, tensor: int, data: int, stage: int) -> int:
        """The rank at these coordinates."""
        return tensor + self.tensor * (data + self.data * stage)

    def coordinates(self, rank: int) -> tuple[int, int, int]:
        """(tensor, data, stage) of a rank."""
        return rank % self.tensor, rank // self.tensor % self.data, rank // (self.tensor * self.data)

    def members(self, role: str, rank: int) -> tuple[int, ...]:
        """Ranks of the group of this role that ``rank`` belongs to, in ascending order."""
        tensor, data, stage = self.coordinates(rank)
        if role == "tensor":
            return tuple(self.rank(i, data, stage) for i in range(self.tensor))
        if role == "data":
            return tuple(self.rank(tensor, i, stage) for i in range(self.data))
        if role == "shard":
            first = data - data % self._shards
            return tuple(self.rank(tensor, first + i, stage) for i in range(self._shards))
        if role == "replica":
            return tuple(self.rank(tensor, i, stage) for i in range(data % self._shards, self.data, self._shards))
        if role == "pipeline":
            return tuple(self.rank(tensor, data, i) for i in range(self.pipeline))
        if role == "model":
            return tuple(sorted(self.rank(i, data, j) for i in range(self.tensor) for j in range(self.pipeline)))
        return tuple(range(self.ranks))

    def groups(self) -> dict[str, list[Group]]:
        """Every group of the job by role, numbered in the order in which all ranks create them. Groups of a single
        rank have no traffic and are left out; a data parallel group of all ranks is the default group."""
        made = {"world": [Group("0", "default_pg", "world", tuple(range(self.ranks)), WORLD_STREAM)]}
        number = 0
        for role, description in _DESCRIPTIONS[self.style].items():
            sets = sorted({self.members(role, rank) for rank in range(self.ranks)})
            if len(sets[0]) == 1 or (role == "data" and len(sets) == 1):
                continue
            if role in ("shard", "replica") and self.replicas == 1:
                continue
            numbered = enumerate(sets, number + 1)
            made[role] = [Group(str(i), description, role, ranks, _STREAMS[role]) for i, ranks in numbered]
            number += len(sets)
        return made
