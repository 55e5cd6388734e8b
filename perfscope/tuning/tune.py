"""Records a training, tries settings on it from outside, and says which of them help."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from math import ceil
from pathlib import Path
from typing import Final

from perfscope.errors import UnusableInput
from perfscope.tuning.candidates import Candidate, Value, settings_of, shown
from perfscope.tuning.evidence import Evidence, evidence_of
from perfscope.tuning.measuring import Measurement
from perfscope.tuning.permanent import how_to_keep
from perfscope.tuning.proposals import propose
from perfscope.tuning.result import RESULT_FILE, Result, as_json
from perfscope.tuning.search import Search, TrialFailed
from perfscope.tuning.trials import Command, Trials, record
from perfscope.tuning.wishes import asked_for

MEASURED_S: Final = 6.0
"""Of steps in each trial, where their number is not given."""

FEWEST_STEPS: Final = 24
MOST_STEPS: Final = 300

_LIMIT_TIMES: Final = 5.0
_LIMIT_S: Final = 120.0
"""A trial may take that many times as long as the recording did, and this longer: a change may make a job hang."""

Say = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class Wish:
    """What the user asks for."""

    command: tuple[str, ...]
    folder: Path
    budget: int
    steps: int | None = None
    """To measure in each trial; None: as many as take :data:`MEASURED_S`."""
    only: tuple[str, ...] = ()
    """Patterns of names of settings; others are left alone."""
    tried: Mapping[str, tuple[Value, ...]] | None = None
    """The user's own values, tried first."""
    numerics: bool = False


def tune(wish: Wish, say: Say) -> Result:
    """Record, propose, try, decide; writes ``tune.json``. ``say`` is told what goes on.

    Raises UnusableInput where the command cannot be run, recorded or measured.
    """
    command = Command(words=wish.command, folder=wish.folder)
    began = time.monotonic()
    say("recording the command as it is")
    evidence = evidence_of(record(command))
    took_s = time.monotonic() - began
    step_s = evidence.summary.job.step_time_us / 1e6
    steps = wish.steps or min(max(ceil(MEASURED_S / step_s), FEWEST_STEPS), MOST_STEPS)
    say(f"a recorded step takes {step_s * 1e3:.1f} ms; {evidence.summary.verdict.headline}")
    candidates, left = _candidates(wish, evidence)
    if not candidates:
        say("there is nothing to try: no setting that can be applied from outside suits this job")
    limit_s = took_s * _LIMIT_TIMES + _LIMIT_S + steps * step_s * _LIMIT_TIMES
    trials = Trials(_known(command, evidence, limit_s), steps)
    try:
        outcome = Search(_telling(trials, say), wish.budget).run(candidates)
    except TrialFailed as failure:
        raise UnusableInput(f"the unchanged command cannot be measured: {failure}") from failure
    kept = outcome.kept
    result = Result(
        outcome=outcome,
        left=tuple(left),
        together=evidence.predict(settings_of(kept)),
        keep=tuple(how_to_keep(kept, evidence.run.settings, evidence.microbatches)),
        command=evidence.run.command,
        headline=evidence.summary.verdict.headline,
    )
    (wish.folder / RESULT_FILE).write_text(json.dumps(as_json(result), indent=1) + "\n", encoding="utf-8")
    return result


def _candidates(wish: Wish, evidence: Evidence) -> tuple[list[Candidate], list[tuple[Candidate, str]]]:
    """The user's own first; of each setting and value one."""
    proposed, left = propose(evidence, numerics=wish.numerics)
    wanted: dict[tuple[str, Value], Candidate] = {}
    for candidate in [*asked_for(evidence, wish.tried or {}), *proposed]:
        if not wish.only or any(fnmatchcase(candidate.name, pattern) for pattern in wish.only):
            wanted.setdefault((candidate.name, candidate.new), candidate)
    return list(wanted.values()), [each for each in left if (each[0].name, each[0].new) not in wanted]


def _known(command: Command, evidence: Evidence, limit_s: float) -> Command:
    """The command, with what its recording tells of it."""
    loader = evidence.loader
    return replace(
        command,
        datasets=(loader.dataset,) if loader is not None else (),
        microbatches=evidence.microbatches,
        workers=loader.num_workers if loader is not None else 0,
        prefetch=(loader.prefetch_factor if loader is not None else None) or Command.prefetch,
        limit_s=limit_s,
    )


def _telling(trials: Trials, say: Say) -> Callable[[Mapping[str, Value]], Measurement]:
    """A measurement that says what it measures, and what came out."""

    def measure(settings: Mapping[str, Value]) -> Measurement:
        what = " ".join(f"{name}={shown(value)}" for name, value in settings.items()) or "unchanged"
        number = trials.number
        try:
            found = trials.measure(settings)
        except TrialFailed as failure:
            say(f"run {number}: {what}: {failure}")
            raise
        say(f"run {number}: {what}: {found.step_ns / 1e6:.2f} ms a step ({found.steps} steps)")
        return found

    return measure
