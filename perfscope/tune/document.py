"""``tune.json``: the schema is made from these classes, and ``result.as_json`` writes what follows it."""

from __future__ import annotations

from typing import Annotated, Final

from perfscope.frozen import dataclass
from perfscope.results.fields import Share, Us
from perfscope.results.findings import Prediction
from perfscope.tune.candidates import Value

SCHEMA: Final = "perfscope.tune/1"


@dataclass(frozen=True, kw_only=True)
class TuneRecording:
    """The recording that the proposals come from."""

    headline: Annotated[str, "The verdict of its analysis."]


@dataclass(frozen=True, kw_only=True)
class TuneBaseline:
    """The unchanged command."""

    step_us: Annotated[Us, "Mean step of its runs."]
    noise: Annotated[Share, "What its runs differ by."]
    runs_us: Annotated[tuple[Us, ...], "Step time of each run, in order."]


@dataclass(frozen=True, kw_only=True)
class TuneTrial:
    """One run with settings changed."""

    changes: Annotated[dict[str, Value], "Setting -> value."]
    step_us: Annotated[Us | None, "Its step time; None where the run failed."]
    steps: Annotated[int | None, "Steps measured."]
    gain: Annotated[Share | None, "Share of the unchanged step that it saves; below 0 where it is slower."]
    noise: Annotated[Share | None, "How far ``gain`` may be off."]
    failed: Annotated[str | None, "Why the run failed; None where it did not."]


@dataclass(frozen=True, kw_only=True)
class TuneSetting:
    """One setting with one value: what was expected, what was measured, and whether it is kept."""

    setting: Annotated[str, "``dataloader.num_workers``, ``env.OMP_NUM_THREADS`` …"]
    old: Annotated[Value, "Its value in the recorded run; None where it is not set."]
    new: Annotated[Value, "The value tried; None: a variable is removed."]
    reason: Annotated[str, "Why it may help."]
    changes_numerics: Annotated[bool, "It changes the numbers that the training computes."]
    predicted_step_us: Annotated[Prediction | None, "None where it cannot be predicted."]
    measured_step_us: Annotated[Us | None, "None where it was not tried, or the run failed."]
    kept: bool
    why: Annotated[str, "Why it is kept, or not, or why it was not tried."]


@dataclass(frozen=True, kw_only=True)
class TuneKept:
    """All changes that are kept, together."""

    settings: Annotated[dict[str, Value], "Setting -> value."]
    predicted_step_us: Prediction | None
    measured_step_us: Annotated[Us | None, "As measured the second time; None where no change is kept."]
    permanent: Annotated[tuple[str, ...], "The lines that make them permanent."]


@dataclass(frozen=True, kw_only=True)
class Tune:
    """``tune.json``, which ``perfscope tune`` writes. Gains are shares of the step: 0.2 is a fifth of it saved."""

    perfscope_version: str
    command: tuple[str, ...]
    recording: TuneRecording
    baseline: TuneBaseline
    trials: tuple[TuneTrial, ...]
    settings: tuple[TuneSetting, ...]
    kept: TuneKept
    stopped: Annotated[str | None, "Why it ended before the budget was used; None where it did not."]
