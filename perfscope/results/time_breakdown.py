"""Where the ranks' steps went: one time breakdown for each rank, and what several ranks' add up to."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import field
from typing import Annotated

from perfscope.frozen import dataclass
from perfscope.results.categories import CATEGORIES, TimeCategory
from perfscope.results.fields import Us


@dataclass(frozen=True, kw_only=True)
class TimeBreakdown:
    """Where one rank's step went: means per step in µs. The ten categories add up to ``step_time_us``."""

    rank: int
    step_time_us: Annotated[Us, "Mean length of the rank's step windows."]
    compute_us: Annotated[Us, TimeCategory.COMPUTE]
    exposed_comm_wait_us: Annotated[Us, TimeCategory.COMM_WAIT]
    exposed_comm_transfer_us: Annotated[Us, TimeCategory.COMM_TRANSFER]
    exposed_copy_us: Annotated[Us, TimeCategory.COPY]
    idle_dataloader_us: Annotated[Us, TimeCategory.DATALOADER]
    idle_sync_us: Annotated[Us, TimeCategory.SYNC]
    idle_launch_us: Annotated[Us, TimeCategory.LAUNCH]
    idle_host_us: Annotated[Us, TimeCategory.HOST]
    idle_dependency_us: Annotated[Us, TimeCategory.DEPENDENCY]
    idle_unknown_us: Annotated[Us, TimeCategory.UNKNOWN]
    comm_us: Annotated[Us, "Time in which a collective ran on this rank: hidden plus exposed."]
    hidden_comm_us: Annotated[Us, "Communication that overlaps compute, and so costs the step nothing."]
    host: str = ""
    wait_is_bound: Annotated[
        bool, "Not every participant is in the recording: the wait is a lower bound (and transfer an upper one)."
    ] = False
    named_host_us: Annotated[
        dict[str, Us],
        "Parts of idle_host that have a visible name (garbage collection, checkpoint, a Python function), per step.",
    ] = field(default_factory=dict)
    own_us_per_step: Annotated[
        tuple[Us, ...],
        "All but ``exposed_comm_wait`` in each used step: the rank's own time, whichever rank it waits for.",
    ] = ()

    def categories(self) -> dict[str, float]:
        """µs of the ten categories by id, in order of precedence."""
        return {name: getattr(self, f"{name}_us") for name in CATEGORIES}

    def share(self, *names: str) -> float:
        """Share (0..1) of the step that the named categories take together; 0 for a step without length."""
        values = self.categories()
        return math.fsum(values[name] for name in names) / self.step_time_us if self.step_time_us > 0 else 0.0

    def self_check(self) -> None:
        """Raise ValueError where the categories do not add up to the step (to a picosecond's rounding)."""
        total = math.fsum(self.categories().values())
        if not math.isclose(total, self.step_time_us, rel_tol=1e-12, abs_tol=1e-6):
            raise ValueError(f"rank {self.rank}: categories add up to {total} us, the step is {self.step_time_us} us")
        exposed = self.exposed_comm_wait_us + self.exposed_comm_transfer_us
        if not math.isclose(self.hidden_comm_us + exposed, self.comm_us, rel_tol=1e-12, abs_tol=1e-6):
            raise ValueError(f"rank {self.rank}: hidden + exposed communication is not communication")


def shares(breakdowns: Sequence[TimeBreakdown]) -> dict[str, float]:
    """Share (0..1) of all ranks' step time that each category takes; all 0 without ranks."""
    total = math.fsum(each.step_time_us for each in breakdowns)
    if not total > 0:
        return dict.fromkeys(CATEGORIES, 0.0)
    return {name: math.fsum(each.categories()[name] for each in breakdowns) / total for name in CATEGORIES}


def largest_loss(breakdowns: Sequence[TimeBreakdown]) -> tuple[TimeCategory, float] | None:
    """The category other than compute that takes most of all ranks' time, and its share; None where nothing is lost."""
    taken = shares(breakdowns)
    most = max((category for category in TimeCategory if category.id != "compute"), key=lambda each: taken[each.id])
    return (most, taken[most.id]) if taken[most.id] > 0 else None
