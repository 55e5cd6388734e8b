"""The LiveJob: looks at a recording's folder again and again, and says each time what is known of the job."""

from __future__ import annotations

import math
import time
from pathlib import Path
from typing import Final

import numpy as np

from perfscope.analyzers.history.rank_history import Float64
from perfscope.analyzers.live.facts import BUDGET_S, Facts
from perfscope.analyzers.live.hosts import Hosts
from perfscope.analyzers.live.listing import Listing, listing
from perfscope.analyzers.live.ring import COLUMNS
from perfscope.analyzers.live.source import Entry, Source, source_of
from perfscope.analyzers.live.state import DeviceLoad, HostLoad, LiveRank, LiveState
from perfscope.analyzers.live.states import Log, job_state, patience_s, rank_state
from perfscope.analyzers.live.steps import JobSteps
from perfscope.analyzers.live.stragglers import OwnTime, measured_time, own_time
from perfscope.analyzers.live.trend import Trend
from perfscope.analyzers.samples import samples_per_step
from perfscope.grouping import grouped
from perfscope.recording.history import CORE, OCCASIONAL
from perfscope.recording.metadata import epoch_ns
from perfscope.trace.trace import Float32

_SELDOM: Final = {*OCCASIONAL, CORE}


class LiveJob:
    """One recording's folder, on disk or remote, which may not exist yet."""

    def __init__(self, folder: Path, source: Source | None = None) -> None:
        self._folder = folder
        self._source = source or source_of(folder)
        self._entries: dict[str, Entry] | None = None
        self._started_at = ""
        self._begin()

    @property
    def name(self) -> str:
        """The folder's path or URL."""
        return str(self._folder)

    def look(self, now_ns: int | None = None, *, whole: bool = False) -> LiveState:
        """Read what is new. ``LiveState.problem`` says why the folder cannot be read; what it holds never raises.

        ``whole``: all of it, however long that takes; else what metadata of ranks are left when half a second is over
        come with the next look.
        """
        now_ns = time.time_ns() if now_ns is None else now_ns
        began = time.monotonic()
        problem, entries = "", self._entries
        try:
            entries = self._source.entries()
        except OSError as error:
            problem = f"the folder cannot be read ({error.strerror or error})"
        if entries is not None and not problem:
            self._read(entries, now_ns, math.inf if whole else BUDGET_S)
        elif entries is None and self._entries:
            self._begin()  # it was removed
        self._entries = entries
        return self._state(now_ns, there=entries is not None, problem=problem, began=began)

    def _begin(self) -> None:
        self._facts, self._steps, self._hosts = Facts(), JobSteps(), Hosts()
        self._trend, self._log = Trend(), Log()
        self._files = Listing()
        self._compared = (-1, 0, 0)
        self._own = OwnTime(np.empty(0), ())

    def _read(self, entries: dict[str, Entry], now_ns: int, budget_s: float) -> None:
        files = self._files = listing(entries)
        self._facts.read(self._folder, entries, files.runs, budget_s)
        started = self._facts.launch.started_at if self._facts.launch is not None else ""
        if started and self._started_at and started != self._started_at:
            self._begin()  # another run took the folder
            self._files = files
            self._facts.read(self._folder, entries, files.runs, budget_s)
        self._started_at = started or self._started_at
        self._steps.read(self._source, entries, files.steps, now_ns)
        self._hosts.read(self._source, entries, files.samples)

    def _state(self, now_ns: int, *, there: bool, problem: str, began: float) -> LiveState:
        facts, steps, launch = self._facts, self._steps, self._facts.launch
        compared = steps.stepping()
        last_step, window = steps.window(compared)
        strategies = facts.strategies()
        hosts = self._hosts.loads()
        ages = [age for each in steps.ranks.values() if (age := each.age_s(now_ns)) is not None]
        age_s = min(ages, default=None)
        means = _means(window)
        step_us = _median(means[:, 0])
        silent_s = patience_s(step_us)
        own = self._own_time(compared, last_step, window, step_us)
        ranks = self._ranks(now_ns, compared, means, own, hosts, silent_s)
        lost = {row.rank: row.state for row in ranks if row.state in ("gone", "failed")}
        captures = set(self._files.captures.values())
        hangs = sorted(set(self._files.stuck.values()))
        state, reason = job_state(facts, steps, there=there, age_s=age_s, silent_s=silent_s, lost=lost, hangs=hangs)
        self._log.look(now_ns, state, reason, steps, len(captures), lost, hangs)
        self._trend.add(last_step, steps.since(compared, last_step, self._trend.last))
        world = max((each.world_size for each in facts.ranks.values()), default=None)
        known = [each.samples for each in self._facts.ranks.values() if each.samples is not None]
        samples = samples_per_step(known, world, strategies)
        seen = {row.rank for row in ranks}
        return LiveState(
            folder=self.name,
            time_ns=now_ns,
            state=state,
            reason=reason,
            command=launch.command if launch is not None else (),
            started_ns=epoch_ns(launch.started_at) if launch is not None else None,
            exit_code=launch.exit_code if launch is not None else None,
            world_size=world,
            hosts_count=len({row.host for row in ranks if row.host} | {host.host for host in hosts}),
            strategies=tuple(sorted(strategies)),
            backend=next((each.backend for each in facts.ranks.values() if each.backend), ""),
            restarts=steps.restarts,
            last_step=last_step,
            first_step=min((steps.ranks[rank].first_step for rank in compared), default=0),
            age_s=age_s,
            step_us=step_us,
            step_p95_us=float(np.nanpercentile(window[..., 0], 95)) if np.isfinite(window[..., :1]).any() else None,
            run_step_us=_median(np.array([steps.ranks[rank].mean_us[0] for rank in compared])),
            samples_per_step=samples,
            samples_per_s=samples / step_us * 1e6 if samples and step_us else None,
            run_samples_per_s=self._run_rate(compared, samples),
            stages_us=_stages(_over_ranks(means)),
            stragglers=own.stragglers,
            not_compared=own.not_compared,
            ranks=tuple(ranks),
            missing_ranks=tuple(rank for rank in range(world or 0) if rank not in seen),
            hosts=tuple(sorted(hosts, key=lambda host: host.host)),
            trend_us=self._trend.values(),
            captures=len(captures),
            hang_files=tuple(hangs),
            events=tuple(self._log.events),
            further_jobs=tuple(sorted(self._files.further)),
            problem=problem,
            reading_s=time.monotonic() - began,
        )

    def _ranks(
        self, now_ns: int, compared: list[int], means: Float64, own: OwnTime, hosts: list[HostLoad], silent_s: float
    ) -> list[LiveRank]:
        places = {rank: place for place, rank in enumerate(compared)}
        devices = {(host.host, device.uuid): device for host in hosts for device in host.devices if device.uuid}
        indexed = {(host.host, device.index): device for host in hosts for device in host.devices}
        cores = {rank: used for host in hosts for rank, used in host.cores_of_ranks.items()}
        gone = self._hosts.ended()
        ended = self._facts.launch is not None and self._facts.launch.exit_code is not None
        rows = []
        for rank in sorted({*self._steps.ranks, *self._facts.ranks}):
            steps, facts, place = self._steps.ranks.get(rank), self._facts.ranks.get(rank), places.get(rank)
            age_s = steps.age_s(now_ns) if steps is not None else None
            mean = means[place] if place is not None else np.full(len(COLUMNS), np.nan)
            device: DeviceLoad | None = None
            if facts is not None and facts.device_index is not None:
                device = devices.get((facts.host, facts.device_uuid)) or indexed.get((facts.host, facts.device_index))
            # After a restart a rank may leave the metadata of the attempt before as they are.
            present = facts if facts is None or steps is None or facts.attempt >= steps.attempt else None
            rows.append(
                LiveRank(
                    rank=rank,
                    host=facts.host if facts is not None else "",
                    state=rank_state(
                        present, age_s, stepping=place is not None, silent_s=silent_s, gone=rank in gone, ended=ended
                    ),
                    last_step=steps.last_step if steps is not None else -1,
                    age_s=age_s,
                    step_us=_known(mean[0]),
                    run_step_us=_known(steps.mean_us[0]) if steps is not None else None,
                    stages_us=_stages(mean),
                    excess_us=_known(own.excess_us[place]) if place is not None else None,
                    cores=cores.get(rank),
                    device=device,
                )
            )
        return rows

    def _own_time(self, ranks: list[int], last: int, window: Float32, step_us: float | None) -> OwnTime:
        """Who is slower than its peers; as before where no rank has written anything since."""
        facts = self._facts.ranks
        if self._compared == (at := (self._steps.bytes_read, len(facts), len(ranks))):
            return self._own
        self._compared = at
        number, steps = self._steps.comparable(ranks, last, step_us)
        peers = grouped((facts[rank].stage if rank in facts else "", rank) for rank in ranks)
        hosts = {rank: each.host for rank, each in facts.items()}
        found = measured_time(number, steps, ranks, hosts, list(peers.values()))
        self._own = found if found is not None else own_time(window, ranks, self._facts.strategies())
        return self._own

    def _run_rate(self, ranks: list[int], samples: float | None) -> float | None:
        """Samples per second of wall time, from the first step that was read to the last."""
        rates = [
            samples * (each.last_step - each.first_step + 1) / (each.ended_ns - each.began_ns) * 1e9
            for each in (self._steps.ranks[rank] for rank in ranks)
            if samples and each.ended_ns > each.began_ns
        ]
        return _median(np.array(rates)) if rates else None


def _means(window: Float32) -> Float64:
    """(ranks, columns) of (ranks, steps, columns): means over the steps that are known."""
    known = np.isfinite(window)
    counts = known.sum(axis=1)
    sums = np.where(known, window, 0.0).sum(axis=1, dtype=np.float64)
    means: Float64 = sums / np.where(counts, counts, np.nan)
    return means


def _over_ranks(means: Float64) -> Float64:
    known = np.isfinite(means)
    counts = known.sum(axis=0)
    mean: Float64 = np.where(known, means, 0.0).sum(axis=0) / np.where(counts, counts, np.nan)
    return mean


def _median(values: Float64) -> float | None:
    values = values[np.isfinite(values)]
    return float(np.median(values)) if len(values) else None


def _known(value: float) -> float | None:
    return float(value) if np.isfinite(value) else None


def _stages(values: Float64) -> dict[str, float]:
    """The stages that are measured, without those that come now and then and have not come."""
    stages = zip(COLUMNS[1:], values[1:].tolist(), strict=True)
    return {name: us for name, us in stages if np.isfinite(us) and (us or name not in _SELDOM)}
