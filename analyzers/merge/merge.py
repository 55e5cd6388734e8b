"""``perfscope.merge``: the ranks of a job in one file for Perfetto, on one clock, with the findings of the analysis."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Executor
from pathlib import Path
from typing import BinaryIO, Final

import numpy as np

from perfscope.analyzers.analyze import JobAnalysis, job_analysis
from perfscope.analyzers.job.aligned import AlignedJob
from perfscope.analyzers.merge import choice
from perfscope.analyzers.merge.build_views import rank_views
from perfscope.analyzers.merge.job_tracks import JOB_UUID, job_packets
from perfscope.analyzers.merge.pftrace import header
from perfscope.analyzers.merge.rank_tracks import RankPackets, rank_packets
from perfscope.analyzers.merge.rank_view import DEFAULT_LANES, LANES, RankView, Windows
from perfscope.analyzers.read_ranks import Progress, executor_for
from perfscope.errors import PerfscopeError, UnusableInput
from perfscope.execution import engine
from perfscope.execution.outcome import Outcome
from perfscope.execution.serial import Serial
from perfscope.frozen import dataclass
from perfscope.recording import paths
from perfscope.recording.whole import replacing
from perfscope.results.summary import Summary
from perfscope.text import duration, plural, rank_list, ranks_in_words

DEFAULT_MEGABYTES: Final = 100.0
"""Perfetto's page needs about ten times the size of the compressed file in memory, and a browser tab has 2 to 4 GB."""

_MB: Final = 1_000_000

_ON_A_CLUSTER: Final = 16
"""Ranks processed at once where an executor does not expose its number of workers."""


@dataclass(frozen=True, kw_only=True)
class Merged:
    """The file that ``merge`` wrote."""

    path: Path
    bytes: int
    ranks: tuple[int, ...]
    """Ranks shown, ascending."""
    steps: tuple[int, ...]
    """Numbers of the steps that lie in the time shown; empty where nothing marks steps."""
    windows_ms: tuple[tuple[float, float], ...]
    """Start and end of each time window shown, from the start of the first recorded step: what ``window`` takes."""
    slices: int
    left_out: tuple[str, ...]
    """What the file does not show, one sentence each; empty where it shows everything."""


@dataclass
class _Written:
    """What is in the file so far. ``unread`` has a sentence for each rank whose trace could not be read again."""

    ranks: list[int]
    unread: list[str]
    slices: int


@dataclass(frozen=True, kw_only=True)
class Selection:
    """The selection of what to show; ``ranks`` and ``steps`` are as the user writes them."""

    ranks: str | None = None
    steps: str | None = None
    window: tuple[int, int] | None = None
    lanes: frozenset[str] = frozenset(DEFAULT_LANES)
    most_bytes: int = int(DEFAULT_MEGABYTES * _MB)

    @classmethod
    def of(
        cls, ranks: str | None, steps: str | None, window: str | None, lanes: Iterable[str], max_size_mb: float
    ) -> Selection:
        """From the arguments of ``merge``. Raises UnusableInput where one cannot be parsed."""
        chosen = frozenset(lanes)
        unknown = chosen - set(LANES)
        if unknown:
            raise UnusableInput(f"--lanes: no lane is named {min(unknown)!r}; choose from {', '.join(LANES)}")
        if window is not None and steps is not None:
            raise UnusableInput("--steps and --window exclude each other: give one of them")
        stretch = choice.parse_window(window) if window is not None else None
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
    and ``steps`` (``12-14``) may be ``all``; by default the most informative ones are chosen. ``window``
    (``120ms-250ms``) counts from the start of the first recorded step, and is an alternative to ``steps``. ``lanes``
    are some of ``compute``, ``comm``, ``copy``, ``host``, ``loader``, ``counters`` and ``python``. Where the file would
    exceed ``max_size_mb`` (10^6 bytes), the least informative ranks are left out; ``Merged.left_out`` names them.

    The ranks are read one after another, or in parallel by ``executor`` or ``workers``, and none stays in memory.

    Raises UnusableInput where nothing can be read, nothing would be shown, or not even one rank fits; PerfscopeError
    where the file cannot be written.
    """
    selection = Selection.of(ranks, steps, window, lanes, max_size_mb)
    with job_analysis(path, capture=capture, executor=executor, workers=workers, progress=progress) as analysis:
        place = Path(output) if output is not None else _default_output(path)
        return merge_analysis(analysis, place, selection, executor, workers)


def _default_output(path: str | Path) -> Path:
    place = Path(path)
    folder = place if place.is_dir() else place.parent if place.exists() else Path()
    return folder / paths.MERGED_FILE


def merge_analysis(
    analysis: JobAnalysis,
    output: Path,
    selection: Selection,
    executor: Executor | None = None,
    workers: int | None = None,
) -> Merged:
    """``merge`` for a job that is already analyzed."""
    result = analysis.replay.result
    zero_ns = _zero_ns(result)
    chosen = choice.choose_ranks(selection.ranks, analysis.summary, result)
    windows = _windows(result, chosen, selection, zero_ns)
    views = rank_views(analysis, chosen, windows, selection.lanes, zero_ns)
    try:
        with replacing(output) as file:
            file.write(header(_job_title(analysis.summary), JOB_UUID, zero_ns))
            written = _write_ranks(file, analysis, views, selection.most_bytes, executor, workers)
            left_out = [*_left_out(analysis, written.ranks, windows, zero_ns, selection.lanes), *written.unread]
            file.write(job_packets(analysis.summary, result, windows, zero_ns, left_out))
            size = file.tell()
    except OSError as error:
        raise PerfscopeError(
            f"{error.filename or output}: cannot be written ({error.strerror}); choose another place with --output"
        ) from error
    return Merged(
        path=output,
        bytes=size,
        ranks=tuple(sorted(written.ranks)),
        steps=choice.steps_shown(result, windows, zero_ns),
        windows_ms=tuple(
            (start / 1e6, end / 1e6)
            for start, end in zip(windows.start_ns.tolist(), windows.end_ns.tolist(), strict=True)
        ),
        slices=written.slices,
        left_out=tuple(left_out),
    )


def _write_ranks(
    file: BinaryIO,
    analysis: JobAnalysis,
    views: Sequence[RankView],
    most_bytes: int,
    executor: Executor | None,
    workers: int | None,
) -> _Written:
    """Write rank after rank up to the size limit. Raises UnusableInput where not even one rank is written."""
    written = _Written([], [], 0)
    full = 0
    for outcome in _packed(analysis, views, executor, workers):
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
            f"rank {views[0].rank} alone takes {full / _MB:.1f} MB, and --max-size allows {most_bytes / _MB:.1f} MB: "
            "show fewer steps, a shorter window or fewer lanes, or raise --max-size"
        )
    if not written.ranks:
        raise UnusableInput(f"{analysis.job.path}: no rank can be shown. {' '.join(written.unread)}")
    return written


def _zero_ns(result: AlignedJob) -> int:
    """Start of the first recorded step on any rank's host, on the lowest rank's clock."""
    return min(
        int(result.clocks.to_common(rank, int(min(partial.steps.host_start_ns[0], partial.steps.start_ns[0]))))
        for rank, partial in result.partials.items()
    )


def _windows(result: AlignedJob, ranks: Sequence[int], selection: Selection, zero_ns: int) -> Windows:
    if selection.window is None:
        return choice.windows_of_steps(result, ranks, choice.choose_steps(selection.steps, result), zero_ns)
    start, end = selection.window
    length = max(
        int(result.clocks.to_common(rank, int(partial.steps.end_ns[-1]))) - zero_ns
        for rank, partial in result.partials.items()
    )
    if start >= length:
        raise UnusableInput(
            f"--window starts {start / 1e6:g} ms after the start of the first recorded step, but the steps end after "
            f"{length / 1e6:g} ms"
        )
    return Windows(np.array([start], dtype=np.int64), np.array([end], dtype=np.int64))


def _packed(
    analysis: JobAnalysis, views: Sequence[RankView], executor: Executor | None, workers: int | None
) -> Iterator[Outcome[RankView, RankPackets]]:
    """Each rank's packets in the order of the views; at most one rank for each worker is in memory."""
    sources = [analysis.sources[view.rank] for view in views]
    with executor_for(sources, executor, workers) as chosen:
        width = 1 if isinstance(chosen, Serial) else int(getattr(chosen, "_max_workers", _ON_A_CLUSTER))
        for first in range(0, len(views), width):
            batch = list(views[first : first + width])
            by_rank = {outcome.item.rank: outcome for outcome in engine.map_items(rank_packets, batch, chosen)}
            yield from (by_rank[view.rank] for view in batch)


def _job_title(summary: Summary) -> str:
    """The job in one line."""
    job = summary.job
    strategy = "+".join(job.strategies)
    return f"{plural(job.rank_count, 'rank')}, {strategy}, {duration(job.step_time_us)} per step"


def _left_out(
    analysis: JobAnalysis, written: Sequence[int], windows: Windows, zero_ns: int, lanes: frozenset[str]
) -> list[str]:
    """A sentence each for ranks, steps and lanes that the file does not show, and for clocks that are not aligned."""
    result = analysis.replay.result
    sentences = []
    ranks = sorted(set(result.partials) - set(written))
    if ranks:
        count = f"{len(ranks)} of {len(result.partials)} ranks"
        sentences.append(f"{count} are left out: {rank_list(ranks)}. Choose others with --ranks.")
    steps = choice.steps_shown(result, windows, zero_ns)
    others = sorted(set(result.steps.tolist()) - set(steps))
    if others and result.is_marked and not steps:
        sentences.append("Less than half of any step is shown: give a longer --window, or --steps.")
    elif others and result.is_marked:
        count = f"{len(others)} of {len(result.steps)} steps"
        sentences.append(f"{count} are left out: {rank_list(others)}. Choose others with --steps.")
    missing = [lane for lane in DEFAULT_LANES if lane not in lanes]
    if missing:
        sentences.append(f"Lanes that are left out: {', '.join(missing)}.")
    clocks = result.clocks
    unaligned = sorted(set(clocks.ranks[~clocks.aligned].tolist()) & set(written))
    if unaligned:
        sentences.append(
            f"{ranks_in_words(unaligned).capitalize()} share no collective with the others: they keep their own clocks."
        )
    sentences += [f"Rank {each.rank}: {each.error}" for each in analysis.summary.job.failures if each.rank is not None]
    return sentences
