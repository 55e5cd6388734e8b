"""Reports what a run recorded, or why it recorded nothing and what to do about it."""

from __future__ import annotations

import math
import os
import shlex
from collections import Counter
from pathlib import Path
from typing import Final

from perfscope.collectors.agreement import Board
from perfscope.collectors.config import ALWAYS_ON, ENOUGH, FAILURES_FILE, CollectorConfig, RankSelection
from perfscope.collectors.launch.failed import failed_ranks
from perfscope.collectors.launch.nsys import reports
from perfscope.recording.history import DISTURBED, PackedBlock, step_times_us, unpack
from perfscope.recording.metadata import WITHOUT_OPTIMIZER, RunMetadata, load_run
from perfscope.recording.paths import (
    BOOTSTRAP_FOLDER,
    further_jobs,
    rank_and_capture_of_trace_file,
    rank_of_run_file,
    rank_of_stacks_file,
    steps_file,
)
from perfscope.text import byte_size, plural, ranks_in_words

_TAIL_BYTES: Final = 1 << 16
"""Of a step history: more than its last block."""


def recap(config: CollectorConfig, exit_code: int) -> list[str]:
    """Lines for the user: what is in the recording's folder, and what to do next."""
    if not config.folder.is_dir():
        return [f"nothing was recorded: the command removed {config.folder}; choose another folder with --output"]
    further = [line for folder in further_jobs(config.folder) for line in _further(folder, config)]
    return [*_first_job(config, exit_code), *further]


def recap_of_rank(config: CollectorConfig, rank: int) -> list[str]:
    """Lines for the user where the program started the recording itself: what one rank has recorded, for the others
    may not have ended yet.
    """
    folder = config.folder
    runs = [run for run in read_runs(folder) if run.rank == rank] if folder.is_dir() else []
    recorded = [run for run in runs if run.captures]
    if not recorded:
        found = _without_captures(config, runs, f"rank {rank}")
        return found or ["nothing was recorded: " + why_nothing(config, runs, 0)]
    ranks = recorded[0].world_size
    others = f" (rank {rank}; each of the {ranks} ranks records its own)" if ranks > 1 else ""
    return [f"recorded {_steps(recorded)} in {folder}{others}", _next(folder)]


def _further(folder: Path, config: CollectorConfig) -> list[str]:
    """What was recorded of a further training of the command; empty where nothing was."""
    recorded = [run for run in read_runs(folder) if run.captures]
    if not recorded:
        return []
    found = f"{_ranks(recorded, config)}, {_steps(recorded)}, {_size(folder)} in {folder}"
    if recorded[0].role:  # analyzed with the others
        return [f"role {recorded[0].role}: recorded {found}"]
    return [f"the command ran another training: recorded {found}", _next(folder)]


def _first_job(config: CollectorConfig, exit_code: int) -> list[str]:
    runs = read_runs(config.folder)
    recorded = [run for run in runs if run.captures]
    failed, stuck = failed_ranks(runs), _stuck(config.folder, runs)
    if not recorded:
        of = _ranks(runs, config) if runs else ""
        found = _without_captures(config, runs, of) or ([_next(config.folder)] if stuck else [])
        nothing = "nothing was recorded: " + why_nothing(config, runs, exit_code)
        return [*failed, *([*stuck, *found] or [nothing])]
    lines = [f"recorded {_ranks(recorded, config)}, {_steps(recorded)}, {_size(config.folder)} in {config.folder}"]
    cut = [run for run in recorded if not all(capture.complete for capture in run.captures)]
    if cut:
        lines.append(f"a capture was cut short on {plural(len(cut), 'rank')}")
    if config.mode == "captures":
        lines += dict.fromkeys(capture.reason for run in recorded for capture in run.captures if capture.reason)
    missing = _missing(runs, recorded, config)
    began = {run.rank for run in runs}
    stopped = [rank for rank in missing if rank in began]
    elsewhere = [rank for rank in missing if rank not in began]
    if stopped:
        lines.append(f"no trace of {ranks_in_words(stopped)}: stopped before it was written")
    if elsewhere:
        lines.append(f"no trace of {ranks_in_words(elsewhere)} here; if other nodes wrote it, see perfscope gather")
    return [*lines, *failed, *stuck, _next(config.folder)]


def _next(folder: Path) -> str:
    return f"next: perfscope analyze {shlex.quote(str(folder))}"


def _stuck(folder: Path, runs: list[RunMetadata]) -> list[str]:
    """What ranks that stood still have left, a line; empty without any. Ranks that raised leave the same."""
    raised = {run.rank for run in runs if run.outcome == "exception"}
    ranks = {rank for path in folder.iterdir() if (rank := rank_of_stacks_file(path)) is not None} - raised
    return [f"{ranks_in_words(ranks)} stood still, and wrote stacks and last collectives"] if ranks else []


def _without_captures(config: CollectorConfig, runs: list[RunMetadata], of: str) -> list[str]:
    """What there is where no capture was to be made, or none had a reason to; empty where there should be one.
    ``of``: the ranks whose metadata ``runs`` is, in words.
    """
    folder, next_line = config.folder, _next(config.folder)
    nsys_reports = reports(folder)
    if nsys_reports:
        size = byte_size(sum(path.stat().st_size for path in nsys_reports))
        return [f"Nsight Systems recorded {plural(len(nsys_reports), 'report')}, {size} in {folder}", next_line]
    if not runs or config.mode == "captures":
        return []
    steps = max(_steps_stored(folder, run) for run in runs)
    if config.mode == "nvtx":
        return [f"ranges were written in {of}, {plural(steps, 'step')}, for your own profiler"]
    if not steps or config.mode == "nsys":
        return []
    size = byte_size(sum(steps_file(folder, run.rank).stat().st_size for run in runs if _steps_stored(folder, run)))
    lines = [f"recorded the step times of {of}: {plural(steps, 'step')}, {size} in {folder}"]
    if config.mode == "trigger":
        lines.append(_slow_steps_without_capture(config, runs))
    return [*lines, next_line]


def _slow_steps_without_capture(config: CollectorConfig, runs: list[RunMetadata]) -> str:
    """Of a run whose slow steps were to start captures, and which has none."""
    try:
        plans = Board(config.folder, 0).look()
    except OSError:
        plans = []
    slow = 0 if plans else max(_slow_steps(config, run) for run in runs)
    if slow:
        took = f"{plural(slow, 'step')} took {config.trigger:g}x the median or more"
        return f"{took}, but the job ended before a capture could begin, so none was made"
    if not plans:
        return f"no step took {config.trigger:g}x the median, so no capture was made"
    first = plans[0].start + config.warmup
    steps = f"steps {first}-{first + plans[0].active - 1}"
    return f"{plans[0].reason}: {steps} were to be recorded, but the job ended before, so no capture was made"


def _slow_steps(config: CollectorConfig, run: RunMetadata) -> int:
    """Steps of a rank, by the end of its history, that took as long as one that starts a capture, after the first ones,
    which nothing is compared with.
    """
    times = [
        us
        for block in _last_blocks(config.folder, run)
        for us, flags in zip(step_times_us(block), block.flags, strict=True)
        if not flags & DISTURBED
    ]
    usual = sorted(times)[len(times) // 2] if len(times) > ENOUGH else math.inf
    return sum(us >= config.trigger * usual for us in times[ENOUGH:])


def _steps_stored(folder: Path, run: RunMetadata) -> int:
    """Steps in a rank's history, by its last block; a killed rank's metadata may be older."""
    blocks = _last_blocks(folder, run)
    return blocks[-1].first_step + blocks[-1].steps if blocks else 0


def _last_blocks(folder: Path, run: RunMetadata) -> list[PackedBlock]:
    """The end of a rank's history; empty without one."""
    try:
        with steps_file(folder, run.rank).open("rb") as file:
            file.seek(max(os.fstat(file.fileno()).st_size - _TAIL_BYTES, 0))
            return list(unpack(file.read()))
    except OSError:
        return []


def read_runs(folder: Path) -> list[RunMetadata]:
    """The metadata of every rank that left any, by rank."""
    runs = []
    for path in sorted(folder.iterdir()):
        if rank_of_run_file(path) is not None:
            try:
                runs.append(load_run(path))
            except ValueError:
                continue
    return runs


def why_nothing(config: CollectorConfig, runs: list[RunMetadata], exit_code: int) -> str:
    """Why no rank recorded a step, and the remedy."""
    problem = next((problem for run in runs for problem in run.problems), "")
    if runs:
        return _why_no_capture(config, runs, exit_code) + (f". A rank reported: {problem}" if problem else "")
    if failures := _failures(config.folder):
        return f"the collector could not start: {'; '.join(failures)}"
    seen = config.folder / BOOTSTRAP_FOLDER
    if not (seen / "seen-python").exists():
        return (
            "no Python process of the command loaded the collector. Python finds it through PYTHONPATH: python -E, -I "
            "and -S ignore that, a wrapper may replace it, and mpirun passes it on only with -x PYTHONPATH"
        )
    if not (seen / "seen-torch").exists():
        return f"the command never imported torch{_failed(exit_code)}"
    if config.ranks != "all":
        return f"no rank of {config.ranks} completed an optimizer step; choose other ranks with --ranks, or all"
    return f"torch was imported, but no optimizer step was completed{_failed(exit_code)}. {WITHOUT_OPTIMIZER}"


def _why_no_capture(config: CollectorConfig, runs: list[RunMetadata], exit_code: int) -> str:
    seen = max(run.steps.seen for run in runs)
    before = config.wait + config.warmup
    plan = f"a capture begins after {before} (--wait {config.wait}, --warmup {config.warmup})"
    if all(run.outcome == "running" for run in runs):
        return f"the job ended{_failed(exit_code)} before a capture was written, and {plan}; {_options_for(8)}"
    if config.mode == "nsys":
        return f"nsys wrote no report of {plural(seen, 'step')}{_failed(exit_code)}; its messages above give the reason"
    if config.mode in ALWAYS_ON:
        return f"the job took {plural(seen, 'step')}{_failed(exit_code)}, too few for a step history"
    if seen > before:
        return f"the job took {plural(seen, 'step')}, yet no capture was written"
    if exit_code:
        failed = f"the command failed{_failed(exit_code)} after {plural(seen, 'step')}"
        return f"{failed}, and {plan}; to record those, {_options_for(seen)}"
    return f"the job took {plural(seen, 'step')}, and {plan}; {_options_for(seen)}"


def _options_for(seen: int) -> str:
    """Options with which a job of ``seen`` steps is recorded."""
    if seen < 2:
        return "let the job take at least 2 steps and use --wait 1 --warmup 0 --active 1"
    warmup = min(3, (seen - 1) // 3)
    active = min(8, seen - 1 - warmup)
    return f"use --wait 1 --warmup {warmup} --active {active}"


def _ranks(recorded: list[RunMetadata], config: CollectorConfig) -> str:
    world = max(run.world_size for run in recorded)
    wanted = sum(rank in RankSelection.parse(config.ranks) for rank in range(world))
    if wanted != world:
        return f"{plural(len(recorded), 'rank')} ({wanted} of {world} chosen)"
    if world == 1:
        return "1 rank"
    return f"all {world} ranks" if len(recorded) == world else f"{len(recorded)} of {world} ranks"


def _steps(recorded: list[RunMetadata]) -> str:
    """The steps that most ranks recorded."""
    spans = Counter(
        ", ".join(f"{capture.first_step}-{capture.last_step}" for capture in run.captures) for run in recorded
    )
    return f"steps {spans.most_common(1)[0][0]}"


def _size(folder: Path) -> str:
    traces = [path for path in folder.iterdir() if rank_and_capture_of_trace_file(path) is not None]
    return byte_size(sum(path.stat().st_size for path in traces))


def _missing(runs: list[RunMetadata], recorded: list[RunMetadata], config: CollectorConfig) -> list[int]:
    world = max(run.world_size for run in runs)
    present = {run.rank for run in recorded}
    wanted = RankSelection.parse(config.ranks)
    return [rank for rank in range(world) if rank in wanted and rank not in present]


def _failed(exit_code: int) -> str:
    if exit_code == 0:
        return ""
    return f" (signal {-exit_code})" if exit_code < 0 else f" (exit code {exit_code})"


def _failures(folder: Path) -> list[str]:
    """Why the collector did not start, each reason once."""
    try:
        text = (folder / BOOTSTRAP_FOLDER / FAILURES_FILE).read_text(encoding="utf-8")
    except OSError:
        return []
    return list(dict.fromkeys(text.splitlines()))[:5]
