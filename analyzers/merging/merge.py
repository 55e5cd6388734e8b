"""``perfscope.merge``: the ranks of a job in one file for Perfetto, on one clock, with what the analysis found."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Final

import numpy as np

from perfscope import engine, paths
from perfscope.analyzers.comparison import Comparison
from perfscope.analyzers.gather import Progress, executor_for
from perfscope.analyzers.merging.choice import choose_ranks, choose_steps, parse_window, windows_of_steps
from perfscope.analyzers.merging.job_tracks import JOB_UUID, job_packets
from perfscope.analyzers.merging.pftrace import header
from perfscope.analyzers.merging.rank_tracks import RankPackets, rank_packets
from perfscope.analyzers.merging.view import DEFAULT_LANES, LANES, RankView, Windows
from perfscope.analyzers.merging.views import rank_views
from perfscope.analyzers.merging.wording import Shown, job_title, steps_shown, what_is_left_out
from perfscope.analyzers.whole import Whole, read_whole
from perfscope.errors import PerfscopeError, UnusableInput

DEFAULT_MEGABYTES: Final = 100.0
"""Perfetto's page takes about ten times a packed file's size in memory, and a browser's tab has 2 to 4 GB."""

_MB: Final = 1_000_000

_ON_A_CLUSTER: Final = 16
"""Ranks in work at once where an executor does not say how many workers it has."""


@dataclass(frozen=True, kw_only=True)
class Merged:
    """What was written."""

    path: Path
    bytes: int
    ranks: tuple[int, ...]
    """Ranks shown, ascending."""
    steps: tuple[int, ...]
    """Numbers of the steps that lie in the time shown; empty where nothing marks steps."""
    windows_ms: tuple[tuple[float, float], ...]
    """Stretches of time shown, from the beginning of the first recorded step on: what ``window`` takes."""
    slices: int
    left_out: tuple[str, ...]
    """What the file does not show, a sentence each; empty where it shows everything."""


@dataclass
class _Written:
    """What is in the file so far. ``unread`` says which ranks are not, for want of their traces."""

    ranks: list[int]
    unread: list[str]
    slices: int


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """What a file is to show; ``ranks`` and ``steps`` are as the user writes them."""

    ranks: str | None = None
    steps: str | None = None
    window: tuple[int, int] | None = None
    lanes: frozenset[str] = frozenset(DEFAULT_LANES)
    most_bytes: int = int(DEFAULT_MEGABYTES * _MB)

    @classmethod
    def of(
        cls, ranks: str | None, steps: str | None, window: str | None, lanes: Iterable[str], max_size_mb: float
    ) -> Wanted:
        """As ``merge`` has it. Raises UnusableInput where that is not understood."""
        chosen = frozenset(lanes)
        unknown = chosen - set(LANES)
        if unknown:
            raise UnusableInput(f"lanes: none is called {min(unknown)!r}; there is {', '.join(LANES)}")
        if window is not None and steps is not None:
            raise UnusableInput("steps and a window are two ways to say when: give one of them")
        stretch = parse_window(window) if window is not None else None
        return cls(ranks=ranks, steps=steps, window=stretch, lanes=chosen, most_bytes=int(max_size_mb * _MB))


def merge(
    path: str | Path,
    output: str | Path | None = None,
    *,
    ranks: str | None = None,
    steps: str | None = None,
    window: str | None = None,
    lanes: Iterable[str] = DEFAULT_LANES,
    max_size_mb: float = DEFAULT_MEGABYTES,
    capture: int | None = None,
    executor: Executor | None = None,
    workers: int | None = None,
    progress: Progress | None = None,
) -> Merged:
    """Write ranks of the job at ``path`` (a folder, a file or a URL) into one file that Perfetto opens.

    ``output`` is ``merged.pftrace`` in the folder by default, or here where ``path`` is a URL. ``ranks`` (``0,3-7``)
    and ``steps`` (``12-14``) may be ``all``; by default the most telling ones are chosen. ``window`` (``120ms-250ms``)
    counts from the beginning of the first recorded step, and is an alternative to ``steps``. ``lanes`` are some of
    ``compute``, ``comm``, ``copy``, ``host``, ``loader``, ``counters`` and ``python``. Where the file would grow beyond
    ``max_size_mb`` (10^6 bytes), the least telling ranks are left out; ``Merged.left_out`` says which.

    The ranks are read one after another, or by ``executor`` or ``workers`` side by side, and none is kept in memory.

    Raises UnusableInput where nothing can be read, nothing would be shown, or not even one rank fits; PerfscopeError
    where the file cannot be written.
    """
    wanted = Wanted.of(ranks, steps, window, lanes, max_size_mb)
    with read_whole(path, capture=capture, executor=executor, workers=workers, progress=progress) as whole:
        place = Path(output) if output is not None else _default_output(path)
        return merge_whole(whole, place, wanted, executor, workers)


def _default_output(path: str | Path) -> Path:
    place = Path(path)
    folder = place if place.is_dir() else place.parent if place.exists() else Path()
    return folder / paths.MERGED_FILE


def merge_whole(
    whole: Whole, output: Path, wanted: Wanted, executor: Executor | None = None, workers: int | None = None
) -> Merged:
    """``merge`` for a job that was read already."""
    result = whole.compared.result
    zero_ns = _zero_ns(result)
    chosen = choose_ranks(wanted.ranks, whole.summary, result)
    windows = _windows(result, chosen, wanted, zero_ns)
    views = rank_views(whole, chosen, windows, wanted.lanes, zero_ns)
    partial = output.with_name(output.name + paths.PARTIAL_SUFFIX)
    try:
        with partial.open("wb") as file:
            file.write(header(job_title(whole.summary), JOB_UUID, zero_ns))
            written = _write_ranks(file, whole, views, wanted.most_bytes, executor, workers)
            shown = Shown(tuple(written.ranks), windows, zero_ns, wanted.lanes)
            left_out = [*what_is_left_out(whole, shown), *written.unread]
            file.write(job_packets(whole.summary, result, windows, zero_ns, left_out))
            size = file.tell()
        partial.replace(output)
    except OSError as error:
        raise PerfscopeError(
            f"{error.filename or output}: cannot be written ({error.strerror}); choose another place with --output"
        ) from error
    finally:
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)
    return Merged(
        path=output,
        bytes=size,
        ranks=tuple(sorted(written.ranks)),
        steps=steps_shown(result, windows, zero_ns),
        windows_ms=tuple(
            (start / 1e6, end / 1e6)
            for start, end in zip(windows.start_ns.tolist(), windows.end_ns.tolist(), strict=True)
        ),
        slices=written.slices,
        left_out=tuple(left_out),
    )


def _write_ranks(
    file: BinaryIO,
    whole: Whole,
    views: Sequence[RankView],
    most_bytes: int,
    executor: Executor | None,
    workers: int | None,
) -> _Written:
    """Write rank after rank until the file is as large as it may be. Raises UnusableInput where that leaves none."""
    written = _Written([], [], 0)
    full = 0
    for outcome in _packed(whole, views, executor, workers):
        if outcome.result is None:
            written.unread.append(f"Rank {outcome.item.rank} could not be read again: {outcome.error}")
            continue
        full = file.tell() + len(outcome.result.data)
        if full > most_bytes:
            break
        file.write(outcome.result.data)
        written.ranks.append(outcome.item.rank)
        written.slices += outcome.result.slices
    if not written.ranks and full:
        raise UnusableInput(
            f"rank {views[0].rank} alone takes {full / _MB:.1f} MB of the {most_bytes / _MB:.1f} MB that the "
            "file may have: show fewer steps, a shorter window or fewer lanes, or allow more with --max-size"
        )
    if not written.ranks:
        raise UnusableInput(f"{whole.job.path}: no rank can be shown. {' '.join(written.unread)}")
    return written


def _zero_ns(result: Comparison) -> int:
    """Beginning of the first recorded step on any rank's host, on the lowest rank's clock."""
    return min(
        int(result.clocks.to_common(rank, int(min(partial.steps.host_start_ns[0], partial.steps.start_ns[0]))))
        for rank, partial in result.partials.items()
    )


def _windows(result: Comparison, ranks: Sequence[int], wanted: Wanted, zero_ns: int) -> Windows:
    if wanted.window is None:
        return windows_of_steps(result, ranks, choose_steps(wanted.steps, result), zero_ns)
    start, end = wanted.window
    length = max(
        int(result.clocks.to_common(rank, int(partial.steps.end_ns[-1]))) - zero_ns
        for rank, partial in result.partials.items()
    )
    if start >= length:
        raise UnusableInput(
            f"--window begins {start / 1e6:g} ms after the first recorded step, and the steps end after "
            f"{length / 1e6:g} ms"
        )
    return Windows(np.array([start], dtype=np.int64), np.array([end], dtype=np.int64))


def _packed(
    whole: Whole, views: Sequence[RankView], executor: Executor | None, workers: int | None
) -> Iterator[engine.Outcome[RankView, RankPackets]]:
    """Each rank's packets in the order of the views; no more of them are in memory at once than there are workers."""
    sources = [whole.sources[view.rank] for view in views]
    with executor_for(sources, executor, workers) as chosen:
        width = 1 if isinstance(chosen, engine.Serial) else int(getattr(chosen, "_max_workers", _ON_A_CLUSTER))
        for first in range(0, len(views), width):
            batch = list(views[first : first + width])
            by_rank = {outcome.item.rank: outcome for outcome in engine.map_items(rank_packets, batch, chosen)}
            yield from (by_rank[view.rank] for view in batch)
