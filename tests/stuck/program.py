"""What one rank issues, in order."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Group:
    """A process group; ``ranks`` are global."""

    name: str
    description: str
    ranks: tuple[int, ...]


@dataclass(frozen=True)
class Collective:
    """One collective, as one rank calls it. ``blocking``: what the rank issues next needs its result."""

    group: Group
    kind: str
    sizes_in: tuple[int, ...]
    sizes_out: tuple[int, ...]
    dtype: str = "BFloat16"
    blocking: bool = True
    line: int = 0

    @property
    def signature(self) -> tuple[object, ...]:
        """What has to be the same on all ranks."""
        return self.kind, self.sizes_in, self.sizes_out, self.dtype


@dataclass(frozen=True)
class Message:
    """One half of a message; ``peer`` is global."""

    send: bool
    peer: int
    size: tuple[int, ...]


@dataclass(frozen=True)
class Messages:
    """Messages issued as one (``batch_isend_irecv``), or one alone that is not ``batched``."""

    group: Group
    parts: tuple[Message, ...]
    batched: bool
    dtype: str = "BFloat16"
    line: int = 0


@dataclass(frozen=True)
class Join:
    """What is issued next needs everything that was issued in this group."""

    group: Group


@dataclass(frozen=True)
class Sync:
    """The host waits until all that it issued is done, and a step ends."""


@dataclass(frozen=True)
class Stop:
    """The host issues nothing more: it sleeps, loops, waits for its data loader or is dead."""


@dataclass(frozen=True)
class Stall:
    """A kernel that does not end: the host goes on, but nothing that it issues from here on starts."""


Action = Collective | Messages | Join | Sync | Stop | Stall


@dataclass
class Job:
    """Every rank's program."""

    groups: list[Group]
    programs: list[list[Action]] = field(default_factory=list)

    @property
    def world(self) -> int:
        """Number of ranks."""
        return len(self.programs)
