"""The steps of all ranks as their histories grow: the last ones, and sums over the run."""

from __future__ import annotations

from dataclasses import field
from typing import Final

import numpy as np

from perfscope.analyzers.history.own_times import without_waits
from perfscope.analyzers.history.rank_history import Float64, block_columns, block_core, block_waits
from perfscope.analyzers.live.ring import COLUMNS, WAITING, StepRing
from perfscope.analyzers.live.source import Entry, Source, Tail, read_all
from perfscope.frozen import dataclass
from perfscope.recording.history import CORE, DISTURBED, OCCASIONAL, PackedBlock, unpack_growing
from perfscope.results.history import OTHER
from perfscope.trace.trace import Float32, Int64

FIRST_BYTES: Final = 64 << 20
"""Of all histories together that are read when watching begins; of longer runs only the end is."""

_LEAST_BYTES: Final = 8 << 10
"""Of each rank's history at least: some blocks."""

_MOST_BYTES: Final = 4 << 20
"""Of each rank's history in one look."""

_RECENT_S: Final = 10.0
"""What "now" is the mean of, in seconds of steps, within these bounds: """
_FEWEST_STEPS: Final = 8
_MOST_STEPS: Final = 64

_COMPARED_S: Final = 60.0
_LONGEST_COMPARED: Final = 512
_MOST_COMPARED: Final = 1 << 18
"""Steps of all ranks together in which stragglers are looked for, beyond those that are "now"."""

_SOME_RANKS: Final = 64
"""Enough of them for the time of the job's steps, which all ranks make together."""


@dataclass
class RankSteps:
    """What is known of one rank's steps of its last attempt."""

    tail: Tail
    attempt: int = 0
    first_step: int = 0
    """The first that was read: 0, or later in a long run."""
    last_step: int = -1
    began_ns: int = 0
    """When the first step that was read began, ns since the epoch."""
    ended_ns: int = 0
    """When the last one ended."""
    seen_ns: int | None = None
    """When steps were found that were not there at the look before; 0 where that was never so, None before any."""
    sums_us: Float64 = field(default_factory=lambda: np.zeros(len(COLUMNS)))
    counts: Float64 = field(default_factory=lambda: np.zeros(len(COLUMNS)))
    """Steps in each sum: without the disturbed ones, and those in which the stage was not measured."""

    def age_s(self, now_ns: int) -> float | None:
        """Time since the last step; None without one. By the clock of whoever watches, where steps came meanwhile: that
        of the rank's host may differ.
        """
        if not self.ended_ns:
            return None
        ages = [now_ns - at for at in (self.ended_ns, self.seen_ns) if at and at <= now_ns]
        return min(ages, default=0) / 1e9

    @property
    def mean_us(self) -> Float64:
        """Mean of each of ``COLUMNS`` over the run; nan where not known."""
        mean: Float64 = self.sums_us / np.where(self.counts, self.counts, np.nan)
        return mean


class JobSteps:
    """The steps of all ranks."""

    def __init__(self) -> None:
        self.ranks: dict[int, RankSteps] = {}
        self.restarts = 0
        """Elastic restarts before the present attempt."""
        self.bytes_read = 0
        self._ring = StepRing()
        self._begun = False

    def read(self, source: Source, entries: dict[str, Entry], files: dict[str, int], now_ns: int) -> None:
        """Read what is new in the histories, ``files``: name -> rank."""
        while self._read(source, entries, files, now_ns):
            pass

    def _read(self, source: Source, entries: dict[str, Entry], files: dict[str, int], now_ns: int) -> bool:
        """Read a part of each file that has grown; True where there may be more."""
        before = self.bytes_read
        if files and not self._begun:
            self._begun = True
            self._begin(files, entries)
        pieces = []
        for name, rank in files.items():
            if rank not in self.ranks:
                self.ranks[rank] = RankSteps(Tail())
            tail, size = self.ranks[rank].tail, entries[name].size
            if size < tail.offset:  # another run writes into the folder
                self.ranks[rank] = RankSteps(Tail())
                self._ring.forget(rank)
                tail = self.ranks[rank].tail
            if (piece := tail.piece(name, size, _MOST_BYTES)) is not None:
                pieces.append(piece)
        read_all(source, pieces, lambda piece, data: self._take(files[piece.name], data, now_ns))
        return self.bytes_read > before and any(
            self.ranks[rank].tail.offset < entries[name].size for name, rank in files.items()
        )

    def stepping(self) -> list[int]:
        """Ranks whose last steps overlap with those of the rank that is ahead; ascending."""
        known = {rank: each for rank, each in self.ranks.items() if each.last_step >= 0}
        attempt = max((each.attempt for each in known.values()), default=0)
        ahead = max((each.last_step for each in known.values() if each.attempt == attempt), default=-1)
        reach = max(self._ring.length // 2, 1)
        return sorted(
            rank for rank, each in known.items() if each.attempt == attempt and each.last_step > ahead - reach
        )

    def window(self, ranks: list[int]) -> tuple[int, Float32]:
        """The last step that all of ``ranks`` have written, and (ranks, steps, columns) of it and those before: about
        the last ten seconds.
        """
        if not ranks:
            return -1, np.empty((0, 0, len(COLUMNS)), dtype=np.float32)
        last = min(self.ranks[rank].last_step for rank in ranks)
        count, few = _FEWEST_STEPS, self._ring.steps(ranks[:_SOME_RANKS], last, _FEWEST_STEPS)[..., 0]
        while not np.isfinite(few).any() and count < self._ring.length:  # a capture is being made
            count *= 2
            few = self._ring.steps(ranks[:_SOME_RANKS], last, count)[..., 0]
        step_us = float(np.nanmean(few)) if np.isfinite(few).any() else 0.0
        wanted = round(_RECENT_S * 1e6 / step_us) if step_us > 0 else _FEWEST_STEPS
        return last, self._ring.steps(ranks, last, max(min(wanted, _MOST_STEPS), count))

    def comparable(self, ranks: list[int], last: int, step_us: float | None) -> tuple[Int64, Float32]:
        """Numbers of the steps of about the last minute, and (ranks, steps, columns) of them: to tell a straggler from
        chance takes more than a few.
        """
        wanted = round(_COMPARED_S * 1e6 / step_us) if step_us else 0
        count = max(min(wanted, _MOST_COMPARED // max(len(ranks), 1), _LONGEST_COMPARED), _MOST_STEPS)
        steps = self._ring.steps(ranks, last, count)
        return np.arange(last - steps.shape[1] + 1, last + 1, dtype=np.int64), steps

    def since(self, ranks: list[int], last: int, before: int) -> Float32:
        """(ranks, steps, columns) of the steps after ``before`` up to ``last`` in memory, of some of the ranks."""
        return self._ring.steps(ranks[:_SOME_RANKS], last, max(last - before, 0))

    def _begin(self, files: dict[str, int], entries: dict[str, Entry]) -> None:
        total = sum(entries[name].size for name in files)
        if total <= FIRST_BYTES:
            return
        share = max(FIRST_BYTES // len(files), _LEAST_BYTES)
        for name, rank in files.items():
            self.ranks[rank] = RankSteps(Tail(max(entries[name].size - share, 0)))

    def _take(self, rank: int, data: bytes, now_ns: int) -> None:
        steps = self.ranks[rank]
        self.bytes_read += len(data)
        whole = steps.tail.take(data)
        blocks, done = unpack_growing(whole)
        steps.tail.keep(whole[done:])
        for block in blocks:
            self._add(rank, block)
        if blocks:
            steps = self.ranks[rank]
            steps.seen_ns = now_ns if steps.seen_ns is not None else 0

    def _add(self, rank: int, block: PackedBlock) -> None:
        steps = self.ranks[rank]
        if not block.steps or (block.attempt < steps.attempt and steps.last_step >= 0):
            return
        if steps.last_step < 0 or block.attempt > steps.attempt:
            steps = self.ranks[rank] = RankSteps(
                steps.tail, block.attempt, first_step=block.first_step, began_ns=block.began_ns, seen_ns=steps.seen_ns
            )
            self._ring.forget(rank)
            self.restarts = max(self.restarts, block.attempt)
        values = _rows(block)
        undisturbed = np.frombuffer(block.flags, np.uint8) & DISTURBED == 0
        used = values[undisturbed]
        steps.sums_us += np.nansum(used, axis=0)
        steps.counts += np.isfinite(used).sum(axis=0)
        steps.last_step = block.first_step + block.steps - 1
        steps.ended_ns = block.began_ns + int(values[:, 0].sum() * 1000)
        values[~undisturbed] = np.nan
        self._ring.add(rank, block.first_step, values)


def _rows(block: PackedBlock) -> Float64:
    """A row of ``COLUMNS`` for each step of a block."""
    stages = block.stages
    columns = block_columns(block, stages)
    step_us, stages_us = columns[:, 0], columns[:, 1:]
    stages_us = np.column_stack((stages_us, step_us - stages_us.sum(axis=1)))
    rows = np.full((block.steps, len(COLUMNS)), np.nan)
    rows[:, 0] = step_us
    if "forward" in stages:  # a block leaves out those of these stages that none of its steps has
        rows[:, [COLUMNS.index(name) for name in OCCASIONAL]] = 0.0
    places = [COLUMNS.index(name) for name in (*stages, OTHER)]
    if block.waits is None:
        rows[:, places] = stages_us
        return rows
    waits = block_waits(block, stages)
    core = block_core(block, stages)
    rows[:, places], rows[:, COLUMNS.index(CORE)] = without_waits(step_us, stages_us, waits, core)
    rows[:, COLUMNS.index(WAITING)] = waits.sum(axis=1)
    return rows
