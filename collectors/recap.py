"""Says what a run recorded, or why it recorded nothing and what to do about it."""

from __future__ import annotations

import os
import shlex
from collections import Counter
from pathlib import Path
from typing import Final

from perfscope.collectors.config import ALWAYS_ON, FAILURES_FILE, CollectorConfig, RankSelection
from perfscope.collectors.nsys import reports
from perfscope.history import unpack
from perfscope.metadata import RunMetadata, load_run
from perfscope.paths import BOOTSTRAP_FOLDER, rank_and_capture_of_trace_file, rank_of_run_file, steps_file

_TAIL_BYTES: Final = 1 << 16
"""Of a step history: more than its last block."""


def recap(config: CollectorConfig, exit_code: int) -> list[str]:
    """Lines that tell the user what is in the recording's folder and what to do next."""
    if not config.folder.is_dir():
        return [f"nothing was recorded: the command removed {config.folder}; choose another folder with --output"]
    runs = read_runs(config.folder)
    recorded = [run for run in runs if run.captures]
    if not recorded:
        return _without_captures(config, runs) or ["nothing was recorded: " + why_nothing(config, runs, exit_code)]
    lines = [f"recorded {_ranks(recorded, config)}, {_steps(recorded)}, {_size(config.folder)} in {config.folder}"]
    cut = [run for run in recorded if not all(capture.complete for capture in run.captures)]
    if cut:
        lines.append(f"a capture was cut short on {_plural(len(cut), 'rank')}")
    missing = _missing(runs, recorded, config)
    began = {run.rank for run in runs}
    stopped = [rank for rank in missing if rank in began]
    elsewhere = [rank for rank in missing if rank not in began]
    if stopped:
        lines.append(f"no trace of {_named(stopped)}: stopped before it was written")
    if elsewhere:
        lines.append(f"no trace of {_named(elsewhere)} here; where other nodes have it, see perfscope gather")
    lines.append(f"next: perfscope analyze {shlex.quote(str(config.folder))}")
    return lines


def _without_captures(config: CollectorConfig, runs: list[RunMetadata]) -> list[str]:
    """What there is where no capture was to be made, or none had a reason to; empty where there should be one."""
    folder, next_line = config.folder, f"next: perfscope analyze {shlex.quote(str(config.folder))}"
    found = reports(folder)
    if found:
        size = _in_units(sum(path.stat().st_size for path in found))
        return [f"Nsight Systems recorded {_plural(len(found), 'report')}, {size} in {folder}", next_line]
    if not runs or config.mode == "captures":
        return []
    steps = max(_steps_kept(folder, run) for run in runs)
    if config.mode == "nvtx":
        return [f"ranges were written in {_ranks(runs, config)}, {_plural(steps, 'step')}, for your own profiler"]
    if not steps or config.mode == "nsys":
        return []
    size = _in_units(sum(steps_file(folder, run.rank).stat().st_size for run in runs if _steps_kept(folder, run)))
    lines = [
        f"recorded how long the steps of {_ranks(runs, config)} took: {_plural(steps, 'step')}, {size} in {folder}"
    ]
    if config.mode == "trigger":
        lines.append(f"no step took {config.trigger:g} times the median, so none was traced")
    return [*lines, next_line]


def _steps_kept(folder: Path, run: RunMetadata) -> int:
    """Steps in a rank's history, by its last block; a killed rank's metadata may be older."""
    try:
        with steps_file(folder, run.rank).open("rb") as file:
            file.seek(max(os.fstat(file.fileno()).st_size - _TAIL_BYTES, 0))
            blocks = list(unpack(file.read()))
    except OSError:
        return 0
    return blocks[-1].first_step + blocks[-1].steps if blocks else 0


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
        return _why_no_capture(config, runs, exit_code) + (f". It met a problem: {problem}" if problem else "")
    if failures := _failures(config.folder):
        return f"the collector could not start: {'; '.join(failures)}"
    seen = config.folder / BOOTSTRAP_FOLDER
    if not (seen / "seen-python").exists():
        return (
            "no Python process of the command loaded the collector. It travels in PYTHONPATH, which python -E, -I and "
            "-S ignore, which a wrapper may replace, and which mpirun passes to other hosts only with -x PYTHONPATH"
        )
    if not (seen / "seen-torch").exists():
        return f"the command never imported torch{_failed(exit_code)}"
    if config.ranks != "all":
        return f"no rank of {config.ranks} completed an optimizer step; choose other ranks with --ranks, or all"
    return (
        f"torch was imported, but no optimizer step was completed{_failed(exit_code)}. If the job trains without "
        "torch.optim, call perfscope.step() at the end of each training step"
    )


def _why_no_capture(config: CollectorConfig, runs: list[RunMetadata], exit_code: int) -> str:
    seen = max(run.steps.seen for run in runs)
    before = config.wait + config.warmup
    plan = f"recording begins after {before} (--wait {config.wait}, --warmup {config.warmup})"
    if all(run.outcome == "running" for run in runs):
        return f"the job ended{_failed(exit_code)} before a capture was written, and {plan}; {_options_for(8)}"
    if config.mode == "nsys":
        return f"nsys left no report of {_plural(seen, 'step')}{_failed(exit_code)}; what it says above tells why"
    if config.mode in ALWAYS_ON:
        return f"the job took {_plural(seen, 'step')}{_failed(exit_code)}, too few to keep any"
    if seen > before:
        return f"the job took {_plural(seen, 'step')}, yet no capture was written"
    if exit_code:
        failed = f"the command failed{_failed(exit_code)} after {_plural(seen, 'step')}"
        return f"{failed}, and {plan}; to record those, {_options_for(seen)}"
    return f"the job took {_plural(seen, 'step')}, and {plan}; {_options_for(seen)}"


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
    of = f"{world} ranks" if wanted == world else f"the {wanted} ranks chosen ({world} in all)"
    if world == 1:
        return "1 rank"
    return f"{'all' if len(recorded) == wanted else f'{len(recorded)} of'} {of}"


def _steps(recorded: list[RunMetadata]) -> str:
    """The steps that most ranks recorded."""
    spans = Counter(
        ", ".join(f"{capture.first_step}-{capture.last_step}" for capture in run.captures) for run in recorded
    )
    return f"steps {spans.most_common(1)[0][0]}"


def _size(folder: Path) -> str:
    traces = [path for path in folder.iterdir() if rank_and_capture_of_trace_file(path) is not None]
    return _in_units(sum(path.stat().st_size for path in traces))


def _in_units(size: float) -> str:
    for unit in ("B", "KB", "MB"):
        if size < 1000:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} GB"


def _missing(runs: list[RunMetadata], recorded: list[RunMetadata], config: CollectorConfig) -> list[int]:
    world = max(run.world_size for run in runs)
    present = {run.rank for run in recorded}
    wanted = RankSelection.parse(config.ranks)
    return [rank for rank in range(world) if rank in wanted and rank not in present]


def _named(ranks: list[int]) -> str:
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {_ranges(ranks)}"


def _ranges(numbers: list[int]) -> str:
    """``0,3-7`` for [0, 3, 4, 5, 6, 7]."""
    parts: list[list[int]] = []
    for number in numbers:
        if parts and parts[-1][-1] == number - 1:
            parts[-1].append(number)
        else:
            parts.append([number])
    return ",".join(str(part[0]) if len(part) == 1 else f"{part[0]}-{part[-1]}" for part in parts)


def _failed(exit_code: int) -> str:
    if exit_code == 0:
        return ""
    return f" (signal {-exit_code})" if exit_code < 0 else f" (exit code {exit_code})"


def _plural(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def _failures(folder: Path) -> list[str]:
    """What kept the collector from starting, each once."""
    try:
        text = (folder / BOOTSTRAP_FOLDER / FAILURES_FILE).read_text(encoding="utf-8")
    except OSError:
        return []
    return list(dict.fromkeys(text.splitlines()))[:5]
