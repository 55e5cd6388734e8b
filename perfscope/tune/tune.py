"""Records a training, tries settings on it from outside, and reports which of them help."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from fnmatch import fnmatchcase
from math import ceil
from pathlib import Path
from typing import Final

from perfscope.errors import UnusableInput
from perfscope.frozen import dataclass
from perfscope.recording.whole import write_text
from perfscope.tune.baseline import BaselineRecording, baseline_of
from perfscope.tune.candidates import Candidate, Value, settings_of, shown
from perfscope.tune.measuring import Measurement
from perfscope.tune.permanent import how_to_keep
from perfscope.tune.proposals import asked_for, propose
from perfscope.tune.result import RESULT_FILE, Result, as_json
from perfscope.tune.search import Search, TrialFailed
from perfscope.tune.trials import Command, Trials, record

MEASURED_S: Final = 6.0
"""Seconds of steps to measure in each trial, where their number is not given."""

FEWEST_STEPS: Final = 24
MOST_STEPS: Final = 300

_LIMIT_TIMES: Final = 5.0
_LIMIT_S: Final = 120.0
"""A trial may take this many times as long as the recording, and so many seconds more: a change may make a job hang."""

Say = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class TuneRequest:
    """What the user asks for."""

    command: tuple[str, ...]
    folder: Path
    budget: int
    steps: int | None = None
    """To measure in each trial; None: as many as take :data:`MEASURED_S`."""
    only: tuple[str, ...] = ()
    """Patterns of names of settings; others are not tried."""
    tried: Mapping[str, tuple[Value, ...]] | None = None
    """The user's own values, tried first."""
    numerics: bool = False


def tune(request: TuneRequest, say: Say) -> Result:
    """Record, propose, try, decide; writes ``tune.json``. ``say`` gets a line for each thing that happens.

    Raises UnusableInput where the command cannot be run, recorded or measured.
    """
    command = Command(words=request.command, folder=request.folder)
    began = time.monotonic()
    say("recording the command as it is")
    baseline = baseline_of(record(command))
    took_s = time.monotonic() - began
    step_s = baseline.summary.job.step_time_us / 1e6
    steps = request.steps or min(max(ceil(MEASURED_S / step_s), FEWEST_STEPS), MOST_STEPS)
    say(f"a recorded step takes {step_s * 1e3:.1f} ms; {baseline.summary.verdict.headline}")
    candidates, left = _candidates(request, baseline)
    if not candidates:
        say("nothing to try: no setting that can be applied from outside applies to this job")
    limit_s = took_s * _LIMIT_TIMES + _LIMIT_S + steps * step_s * _LIMIT_TIMES
    trials = Trials(_with_recorded(command, baseline, limit_s), steps)
    try:
        outcome = Search(_reporting(trials, say), request.budget).run(candidates)
    except TrialFailed as failure:
        raise UnusableInput(f"the unchanged command cannot be measured: {failure}") from failure
    kept = outcome.kept
    result = Result(
        outcome=outcome,
        left=tuple(left),
        together=baseline.predict(settings_of(kept)),
        keep=tuple(how_to_keep(kept, baseline.run.settings, baseline.microbatches)),
        command=baseline.run.command,
        headline=baseline.summary.verdict.headline,
    )
    write_text(request.folder / RESULT_FILE, json.dumps(as_json(result), indent=1) + "\n")
    return result


def _candidates(
    request: TuneRequest, baseline: BaselineRecording
) -> tuple[list[Candidate], list[tuple[Candidate, str]]]:
    """The user's own first; each setting and value once."""
    proposed, left = propose(baseline, numerics=request.numerics)
    wanted: dict[tuple[str, Value], Candidate] = {}
    for candidate in [*asked_for(baseline, request.tried or {}), *proposed]:
        if not request.only or any(fnmatchcase(candidate.name, pattern) for pattern in request.only):
            wanted.setdefault((candidate.name, candidate.new), candidate)
    return list(wanted.values()), [each for each in left if (each[0].name, each[0].new) not in wanted]


def _with_recorded(command: Command, baseline: BaselineRecording, limit_s: float) -> Command:
    """The command, with what its recording shows of it."""
    loader = baseline.loader
    return replace(
        command,
        datasets=(loader.dataset,) if loader is not None else (),
        microbatches=baseline.microbatches,
        workers=loader.num_workers if loader is not None else 0,
        prefetch=(loader.prefetch_factor if loader is not None else None) or Command.prefetch,
        limit_s=limit_s,
    )


def _reporting(trials: Trials, say: Say) -> Callable[[Mapping[str, Value]], Measurement]:
    """A measurement that reports each run and its result to ``say``."""

    def measure(settings: Mapping[str, Value]) -> Measurement:
        what = " ".join(f"{name}={shown(value)}" for name, value in settings.items()) or "unchanged"
        number = trials.number
        try:
            measured = trials.measure(settings)
        except TrialFailed as failure:
            say(f"run {number}: {what}: {failure}")
            raise
        say(f"run {number}: {what}: {measured.step_ns / 1e6:.2f} ms per step ({measured.steps} steps)")
        return measured

    return measure
