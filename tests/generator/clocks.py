"""What the hosts' clocks show: recorded time = offset + true time x (1 + drift)."""

from __future__ import annotations

from dataclasses import dataclass

from tests.generator.spec import JobSpec


@dataclass(frozen=True)
class Clock:
    """One rank's clock: its own offset and its host's, its host's drift."""

    offset_ns: int
    drift_ppm: float

    def shows(self, ns: int) -> int:
        """What it shows at a true time."""
        if not self.drift_ppm:
            return ns + self.offset_ns
        return ns + self.offset_ns + round(ns * self.drift_ppm / 1e6)


def clock_of(spec: JobSpec, rank: int) -> Clock:
    """A rank's clock."""
    host = spec.host_of(rank)
    offset = spec.clock_offsets_ns.get(rank, 0) + spec.host_clock_offsets_ns.get(host, 0)
    return Clock(offset, spec.host_drift_ppm.get(host, 0.0))
