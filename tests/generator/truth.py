"""The true times of a simulated job, from the simulation's own state and never from the events that are written.

The time breakdown follows the definitions in words: every interval between two changes of anything belongs to exactly
one category (``tests.generator.sweep``).
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Generic, TypeVar

from tests.generator.clocks import clock_of
from tests.generator.engine import Host
from tests.generator.layout import Group
from tests.generator.loader import Delivery
from tests.generator.spec import JobSpec
from tests.generator.stages import Passes, StageTruth, passes, stage_truth
from tests.generator.sweep import Window, bounds, windows
from tests.generator.work import Collective

Value = TypeVar("Value")


class PerRank(Mapping[int, Value], Generic[Value]):
    """A value per rank, computed on first access: tests of large jobs seldom look at all ranks."""

    def __init__(self, ranks: Sequence[int], compute: Callable[[int], Value]) -> None:
        self._ranks = ranks
        self._compute = functools.cache(compute)

    def __getitem__(self, rank: int) -> Value:
        if rank not in self._ranks:
            raise KeyError(rank)
        return self._compute(rank)

    def __iter__(self) -> Iterator[int]:
        return iter(self._ranks)

    def __len__(self) -> int:
        return len(self._ranks)


@dataclass(frozen=True)
class CollectiveTruth:
    """All recorded collectives of one kind and size in one group; sends (kind ``send_recv``) by their two ends."""

    kind: str
    bytes: int
    elements_in: int
    elements_out: int
    count: int
    transfer_ns: float
    """Mean over instances: alpha + f(n) bytes / busbw."""
    wait_ns: float
    """Mean over instances and ranks."""
    last_arriver: dict[int, float]
    group: Group
    ranks: tuple[int, ...]
    """The group's; of a send the sender, then the receiver."""


@dataclass(frozen=True)
class Truth:
    """Everything that is true of a job."""

    spec: JobSpec = field(repr=False)
    windows: Mapping[int, tuple[Window, ...]]
    steps_ns: tuple[int, ...]
    """Each step of the job: from its last rank's begin to its last rank's end."""
    clock_correction_ns: dict[int, int]
    """What must be added to each rank's clock to agree with the lowest rank's; where clocks drift, in the middle of the
    recording."""
    drift_ppm: dict[int, float]
    """How much faster each rank's clock runs than the lowest rank's, in millionths."""
    collectives: tuple[CollectiveTruth, ...]
    flops_per_step: int
    """Forward and backward of all ranks, without recomputation."""
    hardware_flops_per_step: int
    """The same with recomputation."""
    deliveries: dict[int, tuple[Delivery, ...]]
    """Batches taken in the recorded steps."""
    passes: Mapping[int, tuple[Passes, ...]]
    """For each rank, what its forward and backward passes took in each recorded step."""

    def mean_ns(self, rank: int, category: str) -> float:
        """Mean of one category per step."""
        return sum(window.categories[category] for window in self.windows[rank]) / len(self.windows[rank])

    @property
    def step_time_ns(self) -> float:
        """Mean step of the job."""
        return fmean(self.steps_ns)

    def step_ns(self, rank: int) -> float:
        """Mean window of one rank."""
        return sum(window.duration_ns for window in self.windows[rank]) / len(self.windows[rank])

    @functools.cached_property
    def stages(self) -> tuple[StageTruth, ...]:
        """The pipeline's stages, in order."""
        return tuple(
            stage_truth(self.spec, stage, self.windows, self.passes) for stage in range(self.spec.pipeline)
        )  # fmt: skip

    @property
    def bubble_share(self) -> float:
        """Bubble time per step / step time, mean over stages; 0..1."""
        return sum(stage.bubble_ns / stage.step_ns for stage in self.stages) / len(self.stages)


def truth_of(
    spec: JobSpec, hosts: Sequence[Host], collectives: Sequence[Collective], deliveries: dict[int, list[Delivery]]
) -> Truth:
    """The truth of a finished simulation."""
    edges = {host.rank: bounds(spec, host) for host in hosts}
    clocks = {host.rank: clock_of(spec, host.rank) for host in hosts}
    middle = (edges[0][0][0] + edges[0][-1][1]) // 2
    recorded = set(spec.recorded_steps)
    ranks = range(spec.ranks)
    return Truth(
        spec=spec,
        windows=PerRank(ranks, lambda rank: windows(spec, hosts[rank])),
        steps_ns=tuple(
            max(end for _, end in step) - max(start for start, _ in step) for step in zip(*edges.values(), strict=True)
        ),
        clock_correction_ns={rank: clocks[0].shows(middle) - clock.shows(middle) for rank, clock in clocks.items()},
        drift_ppm={rank: clock.drift_ppm - clocks[0].drift_ppm for rank, clock in clocks.items()},
        collectives=_collectives([collective for collective in collectives if collective.step in recorded]),
        flops_per_step=sum(spec.model_flops(rank) for rank in ranks),
        hardware_flops_per_step=sum(spec.hardware_flops(rank) for rank in ranks),
        deliveries={rank: tuple(d for d in mine if d.step in recorded) for rank, mine in deliveries.items()},
        passes=PerRank(ranks, lambda rank: passes(spec, hosts[rank])),
    )


def _collectives(collectives: Sequence[Collective]) -> tuple[CollectiveTruth, ...]:
    alike: dict[tuple[str, int, int, tuple[int, ...]], list[Collective]] = defaultdict(list)
    for collective in collectives:
        assert collective.group is not None
        alike[collective.kind, collective.bytes, int(collective.group.name), collective.ranks].append(collective)
    return tuple(_one_truth(group) for _, group in sorted(alike.items()))


def _one_truth(alike: Sequence[Collective]) -> CollectiveTruth:
    first = alike[0]
    assert first.group is not None
    waits = [c.last_arrival_ns - work.started for c in alike for work in c.works.values()]
    last = [max(c.works.values(), key=lambda work: work.started).rank for c in alike]
    return CollectiveTruth(
        kind=first.kind,
        bytes=first.bytes,
        elements_in=first.elements_in,
        elements_out=first.elements_out,
        count=len(alike),
        transfer_ns=sum(c.cost_ns for c in alike) / len(alike),
        wait_ns=sum(waits) / len(waits),
        last_arriver={rank: last.count(rank) / len(last) for rank in sorted(set(last))},
        group=first.group,
        ranks=first.ranks,
    )
