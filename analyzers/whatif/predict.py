"""Plays the recorded steps with settings changed and says what a step will take, and how surely."""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from perfscope import findings
from perfscope.analyzers.compared import Compared
from perfscope.analyzers.facts import Predict
from perfscope.analyzers.replay.engine import Played, play
from perfscope.analyzers.whatif import (
    batch,
    ddp,
    loader,
    microbatches,
    network,
    overlap,
    pace_changes,
    sharding,
    threads,
)
from perfscope.analyzers.whatif.change import BadSetting, CannotReplay, Context, Setting, Uncertainty
from perfscope.analyzers.whatif.script import script_of
from perfscope.errors import did_you_mean
from perfscope.medians import deviation
from perfscope.trace import Int64

SETTINGS: Final[tuple[Setting, ...]] = (
    *ddp.SETTINGS,
    *loader.SETTINGS,
    *microbatches.SETTINGS,
    *network.SETTINGS,
    *pace_changes.SETTINGS,
    *sharding.SETTINGS,
    *overlap.SETTINGS,
    *batch.SETTINGS,
    *threads.SETTINGS,
)
"""Everything that can be changed."""

TRUSTED: Final = 0.05
"""Error of the unchanged replay above which nothing is predicted (``docs/metrics.md``)."""

_SUREST: Final = 0.01
"""Share of the step time that a prediction may be off however little is changed: what else varies is as much."""


@dataclass(frozen=True)
class Prediction:
    """Step times in ns: measured, played unchanged, played with the changes (low, mid, high).

    ``error`` is the unchanged replay's, relative; low and high hold it, what the changes' models leave out, and how
    far the mean of so few steps may be from that of all: twice its standard error. ``assumed`` says what the recording
    does not tell and the prediction hangs on; low and high hold how much.
    """

    settings: Mapping[str, str]
    measured_ns: float
    replayed_ns: float
    low_ns: float
    mid_ns: float
    high_ns: float
    error: float
    assumed: tuple[str, ...] = ()


def predict(context: Context, settings: Mapping[str, str]) -> Prediction:
    """One replay with all ``settings`` changed.

    Raises BadSetting for a name or value that is not understood, CannotReplay where the recording does not allow it.
    """
    measured = context.result.step_ns
    base = context.unchanged
    if not base.complete:
        raise CannotReplay("the recorded steps cannot be replayed: collectives of different ranks do not fit together")
    steps = context.recorded.slowest_ns(base)
    replayed = float(steps.mean())
    error = abs(replayed / measured - 1)
    if error > TRUSTED:
        raise CannotReplay(
            f"the unchanged replay misses the measured step by {error:.0%}, so no prediction can be trusted; "
            "record all ranks, and more steps"
        )
    middle = _play(context, settings, base, 0)
    # The replay's own error is taken out of its prediction: it misses both in the same direction.
    mid = middle.step_ns * measured / replayed
    low, high = _range(measured, mid, _SUREST + error + 2 * _standard_error(steps) / replayed, middle.sure)
    if middle.unsure:
        ends = [_play(context, settings, base, leaning).step_ns * measured / replayed for leaning in (-1, 1)]
        low, high = low - max(mid - min(ends), 0.0), high + max(max(ends) - mid, 0.0)
    return Prediction(settings, measured, replayed, max(low, 0.0), mid, high, error, middle.assumed)


@dataclass(frozen=True)
class _Outcome:
    """What a step takes with settings changed, ns, how sure each of them is, whether latencies are not sure, and what
    was assumed.
    """

    step_ns: float
    sure: list[Uncertainty]
    unsure: bool
    assumed: tuple[str, ...]


def _play(context: Context, settings: Mapping[str, str], base: Played, leaning: int) -> _Outcome:
    """Change the recorded steps and play them; ``leaning`` as in ``Context``. Raises as ``predict`` does."""
    script = script_of(context.result, context.recorded)
    # What was found out for one question (who is whose peer) serves the next.
    cured = tuple(sorted(int(name[5:]) for name in settings if name.startswith("rank.") and name[5:].isdecimal()))
    asked_of = context.asked(cured, leaning)
    asked = sorted(((setting_named(name), name, value) for name, value in settings.items()), key=lambda a: a[0].order)
    sure = [setting.apply(script, asked_of, name, value) for setting, name, value in asked]
    played = play(script.programs())
    if not played.complete:
        raise CannotReplay(
            "with these settings the ranks would wait for each other forever: this is a defect, report it"
        )
    return _Outcome(script.step_ns(played, base), sure, bool(asked_of.unsure), asked_of.assumptions())


def predictor(compared: Compared) -> Predict | None:
    """``predict`` for the rules, which do without an answer where there is none; None where nothing can be played."""
    if not compared.played.complete:
        return None
    context = Context(compared.result, compared.recorded, compared.models, compared.runs)

    known: dict[tuple[tuple[str, str], ...], findings.Prediction | None] = {}

    def ask(settings: Mapping[str, str]) -> findings.Prediction | None:
        # Rules, the joint plan and the curves ask for the same more than once.
        key = tuple(sorted(settings.items()))
        if key not in known:
            known[key] = _answer(context, settings)
        return known[key]

    return ask


def _answer(context: Context, settings: Mapping[str, str]) -> findings.Prediction | None:
    try:
        found = predict(context, settings)
    except CannotReplay:
        return None
    return findings.Prediction(low=found.low_ns, mid=found.mid_ns, high=found.high_ns)


def setting_named(name: str) -> Setting:
    """The setting of that name. Raises BadSetting, listing what there is."""
    for setting in SETTINGS:
        if fnmatch.fnmatchcase(name, setting.name):
            return setting
    names = [setting.name for setting in SETTINGS]
    raise BadSetting(f"{name}: no such setting{did_you_mean(name, names)}; there are {', '.join(names)}")


def _standard_error(steps_ns: Int64) -> float:
    """Of the mean of these steps, ns, the odd step apart."""
    return deviation(steps_ns) / math.sqrt(len(steps_ns))


def _range(measured: float, mid: float, share: float, sure: list[Uncertainty]) -> tuple[float, float]:
    """(low, high) of a prediction, ns: ``share`` of it is uncertain whatever was changed; nothing where nothing was."""
    if mid == measured and not any(uncertainty.slower_ns or uncertainty.faster_ns for uncertainty in sure):
        return mid, mid
    saving = abs(measured - mid)
    either = max((uncertainty.either_ns for uncertainty in sure), default=0.0) + share * mid
    less = max((uncertainty.less for uncertainty in sure), default=0.0) * saving + either
    more = max((uncertainty.more for uncertainty in sure), default=0.0) * saving + either
    toward_slower, toward_faster = (less, more) if mid <= measured else (more, less)
    toward_slower += max((uncertainty.slower_ns for uncertainty in sure), default=0.0)
    toward_faster += max((uncertainty.faster_ns for uncertainty in sure), default=0.0)
    return max(mid - toward_faster, 0.0), mid + toward_slower
