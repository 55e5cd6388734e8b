"""What a training script's own stopwatch measured in the recorded steps."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, median

Steps = list[dict[str, float]]


@dataclass(frozen=True)
class Truth:
    """The stopwatches of all ranks (see scripts/train.py), of these steps; ms."""

    ranks: tuple[Steps, ...]
    steps: tuple[int, ...]

    @classmethod
    def load(cls, path: Path, steps: Sequence[int]) -> Truth:
        everyone: list[Steps] = json.loads(path.read_text(encoding="utf-8"))["ranks"]
        return cls(tuple([rank[step] for step in steps] for rank in everyone), tuple(steps))

    def mean_ms(self, what: str, rank: int) -> float:
        """Mean per step of what the stopwatch measured under this name."""
        return mean(step[what] for step in self.ranks[rank])

    def step_ms(self) -> float:
        """Mean step of the slowest rank."""
        return max(self.mean_ms("step", rank) for rank in range(len(self.ranks)))

    def own_ms(self, rank: int) -> list[float]:
        """Each step less what the rank waited for the others in it."""
        return [step["step"] - step["blocked"] for step in self.ranks[rank]]

    def lost_ms(self, stragglers: Sequence[int]) -> float:
        """Mean per step of what these ranks cost the job: the slowest rank's own time sets the step's pace, and they
        would take the median of the others.

        Example: own times 250, 60, 50 ms. Rank 0 costs 250 - max(55, 60, 50) = 190, the others nothing.
        """
        own = [self.own_ms(rank) for rank in range(len(self.ranks))]
        return mean(_lost(step, stragglers) for step in zip(*own, strict=True))

    def struck(self) -> tuple[int, ...]:
        """Steps in which something was planted on any rank."""
        columns = zip(self.steps, *self.ranks, strict=True)
        return tuple(step for step, *ranks in columns if any(rank["planted"] > 0 for rank in ranks))


def _lost(own: Sequence[float], stragglers: Sequence[int]) -> float:
    others = [time for rank, time in enumerate(own) if rank not in stragglers]
    # Where ranks are slow in turn, the median of a step is still that of ranks that are not.
    usual = median(others or own)
    return max(own) - max([*others, *(min(own[rank], usual) for rank in stragglers)])
