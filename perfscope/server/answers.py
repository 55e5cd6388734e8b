"""What the tools return. Rows of a kind that a summary has are the summary's own; these are the others."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Annotated, Any

from perfscope.frozen import dataclass
from perfscope.results.comparison import StepChange
from perfscope.results.fields import Bytes, Ratio, Share, Signed, Us
from perfscope.results.findings import Evidence, Finding, Prediction
from perfscope.server.schemas import as_json


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What a tool found: a value of the tool's own class, and rows where it has some, to be sent page by page."""

    fixed: Any
    rows: Sequence[Any] = ()
    to_json: Callable[[Any], Any] = as_json
    state: str = ""
    """Changes with the recording: cursors hold as long as it does."""


@dataclass(frozen=True, kw_only=True)
class AboutRecording:
    """What every answer about a recording begins with."""

    recording: Annotated[str, "The recording that the answer is about."]
    notes: Annotated[tuple[str, ...], "What must be known to judge the answer."] = ()


@dataclass(frozen=True, kw_only=True)
class About:
    """Rows that need nothing beside them."""

    notes: Annotated[tuple[str, ...], "What must be known to judge the answer."] = ()


@dataclass(frozen=True, kw_only=True)
class RecordingRow:
    """A recording in the folder, by its files alone."""

    recording: Annotated[str, "Its name for the other tools."]
    kind: Annotated[str, "``perfscope run``, ``traces``, ``nsys``, ``hang`` (dumps and stacks alone) or ``result``."]
    traces: Annotated[int, "Traces of the capture that is analyzed: one for each rank."]
    world_size: Annotated[int | None, "Ranks of the job; None where the files do not state it."]
    captures: Annotated[tuple[int, ...], "Captures to choose from with ``capture``; empty where there is one."]
    steps_seen: Annotated[int | None, "Steps that the job took while it was watched."]
    has_history: Annotated[bool, "Whether the ``history`` tool can answer."]
    has_hang_files: Annotated[bool, "Whether it holds dumps or stacks of a job that stood still."]
    bytes: Annotated[Bytes, "Size of its files."]
    started_at: str | None
    exit_code: Annotated[int | None, "Exit code of the recorded command."]
    command: Annotated[str, "The recorded command, without secrets; empty where names are hidden or none is known."]


@dataclass(frozen=True, kw_only=True)
class FindingRow:
    """A finding: what limits the job, the evidence, and what to change."""

    number: Annotated[int, "Its place: 0 is worth most."]
    rule: Annotated[str, "The rule that found it."]
    title: Annotated[str, "The limit, in a sentence."]
    severity: Annotated[str, "How much of the step it is about: high from 20%, medium from 5%, low below; info: none."]
    confidence: Annotated[str, "How certain it is: ``high``, ``medium`` or ``low``."]
    obtained: Annotated[str, "How the gain was obtained: ``measured``, ``replayed`` or ``bounded``."]
    speedup: Annotated[
        Ratio | None, "How many times as fast the change makes the step: predicted, else an upper bound; None: no gain."
    ]
    predicted_step_us: Annotated[Prediction | None, "The step with the change; None where it could not be replayed."]
    ceiling: Annotated[Ratio | None, "0.25: no change of this kind makes the step more than 1.25x as fast."]
    evidence: Annotated[tuple[Evidence, ...], "The numbers that it rests on."]
    setting: Annotated[str, "The setting to change."]
    now: Annotated[str | None, "Its value now; None where it is not known."]
    advised: Annotated[str | None, "The advised value; None where there is none."]
    how: Annotated[str, "What to do: sentences, and what to type in fenced blocks."]
    costs: Annotated[str | None, "What the change takes besides time; None where nothing."]
    whatif: Annotated[dict[str, str], "The same change as settings of ``what_if``; empty where it cannot be replayed."]

    @classmethod
    def of(cls, number: int, finding: Finding, step_us: float) -> FindingRow:
        """The row of a finding of a job whose step takes ``step_us``."""
        action, gain = finding.action, finding.gain(step_us)
        return cls(
            number=number,
            rule=finding.rule,
            title=finding.title,
            severity=finding.severity.value,
            confidence=finding.confidence.value,
            obtained=finding.obtained.value,
            speedup=None if gain is None else 1 + gain,
            predicted_step_us=finding.predicted_step_us,
            ceiling=finding.ceiling,
            evidence=finding.evidence,
            setting=action.setting,
            now=action.old,
            advised=action.new,
            how=action.how,
            costs=action.costs,
            whatif=dict(finding.whatif),
        )


@dataclass(frozen=True, kw_only=True)
class FindingLine:
    """A finding in a line; ``findings`` has the whole of it."""

    rule: str
    severity: str
    title: str
    speedup: Ratio | None


@dataclass(frozen=True, kw_only=True)
class StragglerLine:
    """A straggler in a line; ``stragglers`` has the whole of it."""

    rank: int
    cause: str
    lost_us: Annotated[Us, "The step time that would be saved were it as fast as its peers."]
    share_of_step: Annotated[Share, "``lost_us`` / the step time."]


@dataclass(frozen=True, kw_only=True)
class Overview(AboutRecording):
    """What limits a job, in one answer."""

    headline: Annotated[str, "One sentence: what limits the job, who, and by how much; or that it is healthy."]
    first_action: Annotated[str | None, "What to do first; None when the job is healthy."]
    healthy: bool
    hung: Annotated[bool, "Whether the job stood still: ask ``hang``."]
    step_time_us: Annotated[Us, "Mean recorded step of the whole job."]
    unprofiled_step_us: Annotated[Us | None, "Mean step without the profiler; predictions are of it where it is known."]
    steps: Annotated[tuple[int, ...], "Step numbers that were analyzed."]
    world_size: int | None
    ranks: Annotated[tuple[int, ...], "Ranks in the recording."]
    missing_ranks: Annotated[tuple[int, ...], "Ranks of the job that are not in it, or could not be read."]
    hosts: Annotated[int, "Number of hosts; 0 where they are not known."]
    strategy: Annotated[tuple[str, ...], "How the job is parallel: ``ddp``, ``fsdp``, ``pipeline`` …"]
    backend: str | None
    devices: Annotated[tuple[str, ...], "Distinct device names; empty on CPUs."]
    mfu: Annotated[Share | None, "Model FLOPs utilisation."]
    time_shares: Annotated[
        dict[str, Share], "Category of the time breakdown -> its share of all ranks' steps; they add up to 1."
    ]
    findings: Annotated[tuple[FindingLine, ...], "The one that is worth most first."]
    stragglers: Annotated[tuple[StragglerLine, ...], "Ranks that the others wait for, the costliest first."]
    capture: Annotated[int | None, "The capture analyzed; None where there is only one."]


@dataclass(frozen=True, kw_only=True)
class RankShare:
    """A rank and its share."""

    rank: int
    share: Share


@dataclass(frozen=True, kw_only=True)
class BreakdownHead(AboutRecording):
    """What all ranks' time breakdowns have in common."""

    step_time_us: Annotated[Us, "Mean step of the job."]
    mean_us: Annotated[dict[str, Us], "Category -> mean over all ranks, per step; they add up to the ranks' mean step."]
    shares: Annotated[dict[str, Share], "The same as shares of the step."]
    exposed_communication: Annotated[Share, "Waiting for late ranks and exposed transfers together."]
    overlapped_communication: Annotated[Share | None, "Share of communication that compute hides; None without any."]


@dataclass(frozen=True, kw_only=True)
class StragglersHead(AboutRecording):
    """Who waits for whom."""

    step_time_us: Us
    came_last: Annotated[
        tuple[RankShare, ...], "Share of all collectives in which a rank came last, the most frequent first."
    ]
    waited_most: Annotated[
        tuple[RankShare, ...], "Share of its step in which a rank waits for late ones, the longest first."
    ]


@dataclass(frozen=True, kw_only=True)
class StepRow:
    """One recorded step of the job."""

    step: int
    step_time_us: Annotated[Us, "From the last rank's begin of the step to its last rank's end."]
    over_median: Annotated[Ratio, "To the median of the recorded steps."]
    categories_us: Annotated[dict[str, Us], "Category of the time breakdown -> mean over the ranks in this step."]


@dataclass(frozen=True, kw_only=True)
class StepHead(AboutRecording):
    """One step beside the others."""

    step: int
    step_time_us: Us
    over_median: Annotated[Ratio, "To the median of the recorded steps."]
    categories_us: Annotated[dict[str, Us], "Category of the time breakdown -> mean over the ranks in this step."]
    beyond_mean_us: Annotated[
        dict[str, Annotated[Us, Signed()]], "The same less the category's mean over all steps: what this step has more."
    ]
    late_ranks: Annotated[tuple[int, ...], "Stragglers that delayed the job in this step."]


@dataclass(frozen=True, kw_only=True)
class RankOfStep:
    """One rank in one step."""

    rank: int
    own_us: Annotated[Us, "All of its step but the wait for late ranks: whoever has most is whom the others wait for."]
    over_median: Annotated[Ratio, "To the median of the ranks."]


@dataclass(frozen=True, kw_only=True)
class WhatIfHead(AboutRecording):
    """What a change is compared with."""

    measured_step_us: Annotated[Us, "The step as it is: without the profiler where that is known."]
    replayed_step_us: Annotated[Us, "The same replayed without a change."]
    profiled_step_us: Annotated[Us | None, "The recorded step, where the measured one is without the profiler."]
    replay_error: Annotated[Share, "Difference of the replayed from the measured step."]
    assumed: Annotated[tuple[str, ...], "What the recording does not hold and the prediction rests on."]
    accuracy: Annotated[str, "How accurate predictions of this kind have been."]


@dataclass(frozen=True, kw_only=True)
class PredictedStep:
    """The step with settings changed."""

    settings: dict[str, str]
    predicted_step_us: Prediction
    speedup: Annotated[Ratio, "Measured step / middle of the prediction: 1.25 is 1.25x as fast."]
    certain: Annotated[bool, "Whether the whole range is on one side of the measured step."]


@dataclass(frozen=True, kw_only=True)
class SettingRow:
    """A setting that ``what_if`` can change."""

    setting: str
    value: Annotated[str, "How its value is written."]
    meaning: str


@dataclass(frozen=True, kw_only=True)
class ComparisonHead:
    """Two recordings side by side."""

    baseline: str
    candidate: str
    verdict: Annotated[str, "``faster``, ``slower``, ``same`` (within noise) or ``unknown`` (too few steps)."]
    step: Annotated[StepChange, "The step time of both, the range of the difference, and why it is judged so."]
    causes: Annotated[tuple[str, ...], "Categories that moved with the step time, the largest change first."]
    causes_significant: bool
    part: Annotated[str, "What ``rows`` list."]
    notes: Annotated[tuple[str, ...], "What limits the comparison."] = ()


@dataclass(frozen=True, kw_only=True)
class HistoryHead(AboutRecording):
    """The whole run, captured or not."""

    first_step: int
    last_step: int
    median_us: Annotated[Us, "Median step of the rank with the longest median."]
    p99_us: Annotated[Us, "Of the same rank."]
    max_us: Annotated[Us, "Longest step of any rank."]
    outlier_steps: Annotated[int, "Steps that took far longer than those around them, as far as they are listed."]
    trend: Annotated[Ratio | None, "Last tenth of that rank's steps over the first, less 1."]
    part: Annotated[str, "What ``rows`` list."]


@dataclass(frozen=True, kw_only=True)
class HangHead(AboutRecording):
    """Why a job stands still."""

    hung: Annotated[bool, "Whether the recording shows a job that stood still."]
    headline: str
    missing_ranks: Annotated[tuple[int, ...], "Ranks that did not join, and wait for no other rank."]
    waiting_ranks: Annotated[tuple[int, ...], "Ranks that wait for them."]
    collective: Annotated[str | None, "The operation that they did not join."]
    group: str | None
    sequence: Annotated[int | None, "Its number in the group."]
    confidence: str | None
    reason: Annotated[str | None, "Why the answer is as sure as that."]
    part: Annotated[str, "What ``rows`` list."]


@dataclass(frozen=True, kw_only=True)
class WorkHead(AboutRecording):
    """What a table is of."""

    table: str
    step_time_us: Us
    ranks: Annotated[int, "Ranks in the recording."]


@dataclass(frozen=True, kw_only=True)
class TableRow:
    """A table that ``table`` reads."""

    table: str
    meaning: str
    rows: Annotated[int | None, "Rows in the recording asked about; None where none was named."]
    columns: Annotated[tuple[str, ...], "Names of its columns."]


@dataclass(frozen=True, kw_only=True)
class Definition:
    """What a term means."""

    term: str
    where: Annotated[str, "The table or the class that has it."]
    unit: str
    meaning: str
