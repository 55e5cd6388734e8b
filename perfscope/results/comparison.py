"""Comparison: what changed between recordings, as typed values (schema ``perfscope.comparison/1``).

The first recording is the baseline; each other one is a candidate, and has a ``Difference`` to the baseline. Times are
µs per step, shares 0..1; a delta is always candidate - baseline. What the data cannot support is None. ``significant``
is True where a change is more than noise, False where it is within noise, None where that cannot be judged;
``docs/compare.md`` explains the tests.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import field
from typing import Annotated, Any, Final

from perfscope.frozen import dataclass
from perfscope.results.display import Displayed
from perfscope.results.fields import Us
from perfscope.results.findings import Prediction

SCHEMA: Final = "perfscope.comparison/1"

_SUSPECT: Final = 0.05
"""p-value below which a change that is not significant is called not certain, instead of within noise."""

_LARGE: Final = 0.1
"""Share of the step from which a change is not called noise, however much the steps vary."""

BETWEEN_RANKS: Final = "between_ranks"
"""Category besides the ten of the time breakdown: the job's step time minus the mean of its ranks' steps. With it the
categories add up to the job's step time."""


@dataclass(frozen=True, kw_only=True)
class RunRow:
    """One of the recordings compared."""

    label: Annotated[str, "Short and unique: the end of the recording's path."]
    source: str
    headline: Annotated[str, "The verdict of its own analysis."]
    started_at: str | None
    world_size: int | None
    ranks: Annotated[int, "Ranks in the recording."]
    devices: tuple[str, ...]
    steps: Annotated[int, "Number of used steps; 0 where nothing marks steps."]
    step_time_us: Us
    step_time_us_per_step: tuple[Us, ...]
    categories_us: Annotated[
        dict[str, Us],
        "Time breakdown, mean over ranks, and ``between_ranks``; they add up to ``step_time_us``. Empty where no rank "
        "has a time breakdown.",
    ]
    mfu: float | None
    perturbation: float | None


@dataclass(frozen=True, kw_only=True)
class TimeChange:
    """A time in both recordings, µs per step."""

    baseline_us: Us
    candidate_us: Us
    delta_us: Us = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "delta_us", self.candidate_us - self.baseline_us)


@dataclass(frozen=True, kw_only=True)
class StepChange(TimeChange):
    """The step time of baseline and candidate, and whether the difference is significant.

    ``baseline_us`` and ``candidate_us`` are means of the regular steps: a lone odd step (warm-up, a checkpoint, a step
    that is cut) is left out, but no quicker one that computes as much as the others. The means of all steps
    stand beside them.
    """

    verdict: Annotated[
        str,
        "``faster``, ``slower``, ``same`` (within noise: the range includes 0) or ``unknown`` (too few steps).",
    ]
    low_us: Annotated[Us | None, "Lower end of the range: ``delta_us`` - ``noise_us``. None below two steps."]
    high_us: Us | None
    p: Annotated[
        float | None,
        "Two-sided p-value of Welch's test of the steps alone, without the floor; or of Wilcoxon's, where all steps of "
        "one recording are beyond all of the other.",
    ]
    floor_us: Annotated[
        Us,
        "Smaller differences are never significant: runs of one job differ by this much, by experience or as measured.",
    ]
    floor_from: Annotated[str, "Where the floor comes from, in words."]
    noise_us: Annotated[
        Us | None,
        "The difference must exceed this: half the width of its 99 % confidence interval (Welch), at least the floor; "
        "where the steps do not overlap, and that is no chance, no more than the difference without the gap between "
        "them.",
    ]
    baseline_mean_us: Annotated[Us, "Mean of all used steps, as on the recording's own page."]
    candidate_mean_us: Us
    baseline_steps: int
    candidate_steps: int
    why: Annotated[str, "Number of steps and confidence, in a sentence."]
    confirmed: Annotated[
        bool | None,
        "Do the steps of the runs that were not profiled show the same? False: the recorded steps differ, the others "
        "do not, so the verdict is ``same``. None where too few of the others were timed.",
    ] = None
    baseline_unprofiled_us: Annotated[
        Us | None, "Median of the steps that were not profiled; None where these are what is compared, without a trace."
    ] = None
    candidate_unprofiled_us: Us | None = None

    @property
    def uncertain(self) -> bool:
        """Is there more than noise often shows, but less than it takes to be sure? Between 95 % and 99 % confidence; or
        a large change between steps that vary so much that it could not have been significant.
        """
        if self.p is None or self.confirmed is not None or abs(self.delta_us) <= self.floor_us:
            return False
        return self.p < _SUSPECT or abs(self.delta_us) >= _LARGE * self.baseline_us

    @property
    def unprofiled_differ(self) -> bool:
        """Did the steps that were not profiled change by much, while the recorded ones did not, or not so, or nothing
        says whether they did?
        """
        before, after = self.baseline_unprofiled_us, self.candidate_unprofiled_us
        if self.confirmed or not before or not after:
            return False
        return abs(after - before) >= max(_LARGE * before, self.floor_us)


@dataclass(frozen=True, kw_only=True)
class CategoryChange(TimeChange):
    """One category of the time breakdown (mean over ranks), or ``between_ranks``."""

    name: str
    low_us: Annotated[
        Us | None,
        "Lower end of the range of the change; all ranges hold together with 99 %. By the noise of the whole step "
        "where a recording has no time breakdown of each step; None below two steps.",
    ]
    high_us: Us | None
    significant: Annotated[bool | None, "Whether the range excludes 0."]


@dataclass(frozen=True, kw_only=True)
class StageChange(TimeChange):
    """One stage of the step, over the whole run, by the host's clock: it holds the wait for the device and for other
    ranks. Mean over ranks.
    """

    name: Annotated[str, "``dataloader``, ``forward``, ``backward``, ``optimizer`` …, ``other``."]
    low_us: Annotated[
        Us | None, "Lower end of the range of the change; all ranges hold together with 99 %. None below two bins."
    ]
    high_us: Us | None
    significant: Annotated[bool | None, "Whether the range excludes 0."]


@dataclass(frozen=True, kw_only=True)
class PathChange(TimeChange):
    """Time of the critical path in one category, all ranks; the changes add up to the change of the mean step time."""

    category: str


@dataclass(frozen=True, kw_only=True)
class CollectiveChange(TimeChange):
    """Collectives of one process group, kind, type and size. Times are per step: instances x mean transfer of one."""

    group: str
    kind: str
    dtype: str | None
    bytes: int | None
    status: Annotated[str, "``both``, ``gone`` (baseline only) or ``new`` (candidate only)."]
    baseline_count: Annotated[float, "Instances per step."]
    candidate_count: float
    baseline_transfer_us: Annotated[Us | None, "Mean of one instance."]
    candidate_transfer_us: Us | None
    baseline_busbw_gbps: float | None
    candidate_busbw_gbps: float | None
    wait_delta_us: Annotated[Us | None, "Change of the wait for the last arrival, per step and participant."]
    significant: bool | None


@dataclass(frozen=True, kw_only=True)
class WorkChange(TimeChange):
    """A kernel (device time), or an operator (device time and its own host time), per rank and step."""

    name: str
    category: Annotated[str, "The kernel's category or the operator's class."]
    status: Annotated[str, "``both``, ``gone`` (baseline only) or ``new`` (candidate only)."]
    baseline_count: float
    candidate_count: float
    from_count_us: Annotated[Us, "Change by the number of calls, at the mean of both durations."]
    from_duration_us: Annotated[Us, "Change by the duration of calls; both add up to ``delta_us``."]
    significant: bool | None


@dataclass(frozen=True, kw_only=True)
class RankChange(TimeChange):
    """One rank that is in both recordings."""

    rank: int
    baseline_host: str
    candidate_host: str
    categories_us: Annotated[
        dict[str, Us], "Change of each category of its time breakdown; they add up to ``delta_us``."
    ]
    stands_out: Annotated[
        bool,
        "Its own time (the step without the wait for others) changed differently from the ranks' median, "
        "significantly.",
    ]


@dataclass(frozen=True, kw_only=True)
class FindingChange:
    """A finding of either recording."""

    rule: str
    status: Annotated[str, "``gone``, ``new`` or ``still``."]
    title: Annotated[str, "The candidate's title, or the baseline's where the finding is gone."]
    baseline_severity: str | None
    candidate_severity: str | None


@dataclass(frozen=True, kw_only=True)
class PredictionCheck:
    """A changed setting whose effect was predicted, mostly by a finding of the baseline: predicted and measured."""

    rule: str
    title: str
    settings: Annotated[
        dict[str, str],
        "Setting of ``perfscope whatif`` -> the advised value; where nothing was advised, the candidate's.",
    ]
    baseline: dict[str, str]
    candidate: dict[str, str]
    as_advised: Annotated[bool, "Every setting has exactly the advised value."]
    predicted_us: Annotated[Prediction | None, "Of the step time; None where nothing, or only a bound, was predicted."]
    ceiling: Annotated[float | None, "Upper bound of the speedup (0.2: 1.2x), where the finding states only that."]
    measured_us: Us
    verdict: Annotated[
        str,
        "``as predicted``, ``faster than predicted``, ``slower than predicted``, ``slower than baseline``, ``no "
        "effect`` or ``not judged``.",
    ]
    realised: Annotated[float | None, "Measured change / predicted change of the step time; 1: exactly the prediction."]
    also_changed: Annotated[
        tuple[str, ...], "Other settings that changed at the same time, and may have an effect of their own."
    ]


@dataclass(frozen=True, kw_only=True)
class SettingChange:
    """One thing about the runs that differs."""

    about: Annotated[str, "``setting``, ``version``, ``job``, ``device`` or ``command``."]
    name: str
    baseline: str | None
    candidate: str | None


@dataclass(frozen=True, kw_only=True)
class MetricChange:
    """One number of the whole job."""

    name: str
    unit: Annotated[str, "``us``, ``share``, ``bytes`` or ``per_second``."]
    better: Annotated[str, "``higher`` or ``lower``."]
    baseline: float | None
    candidate: float | None
    delta: float | None
    significant: Annotated[
        bool | None,
        "Rates and MFU are judged as the step time is, shares of the time as their categories are; memory does not "
        "vary from step to step, so any change of it is significant.",
    ]


@dataclass(frozen=True, kw_only=True, repr=False)
class Difference:
    """One candidate against the baseline."""

    baseline: Annotated[int, "Index into ``Comparison.runs``; always 0."]
    candidate: int
    step: StepChange
    categories: Annotated[
        tuple[CategoryChange, ...], "Add up to ``step.delta_us``; empty where a recording has no time breakdown."
    ]
    causes: Annotated[
        tuple[str, ...],
        "Categories that moved in the direction of the step time, the largest change first: significant ones where "
        "they carry most of the change, else those that it is made up of. Empty where the step time did not change.",
    ]
    causes_significant: Annotated[bool, "Whether all ``causes`` are significant and carry most of the change."]
    path: Annotated[
        tuple[PathChange, ...],
        "Of the mean over all steps; empty where a recording has no critical path.",
    ]
    metrics: tuple[MetricChange, ...]
    collectives: tuple[CollectiveChange, ...]
    kernels: tuple[WorkChange, ...]
    operators: tuple[WorkChange, ...]
    ranks: tuple[RankChange, ...]
    findings: tuple[FindingChange, ...]
    predictions: tuple[PredictionCheck, ...]
    settings: tuple[SettingChange, ...]
    notes: Annotated[tuple[str, ...], "What limits the comparison, one sentence each."]
    stages: Annotated[
        tuple[StageChange, ...],
        "From the histories of both runs; empty where one has none, or has not timed its stages.",
    ] = ()

    def __repr__(self) -> str:
        return f"<Difference of run {self.candidate} from run {self.baseline}: {self.step.verdict}>"

    def self_check(self) -> None:
        """Raise ValueError where parts do not add up to their total (to rounding)."""
        if self.categories:
            _add_up("categories", [row.delta_us for row in self.categories], self.step.delta_us, self.step.baseline_us)
        if self.path:
            whole = self.step.candidate_mean_us - self.step.baseline_mean_us
            _add_up("critical path", [row.delta_us for row in self.path], whole, self.step.baseline_us)
        for rank in self.ranks:
            _add_up(f"rank {rank.rank}", list(rank.categories_us.values()), rank.delta_us, rank.baseline_us)
        for work in (*self.kernels, *self.operators):
            _add_up(work.name, [work.from_count_us, work.from_duration_us], work.delta_us, work.baseline_us)


@dataclass(frozen=True, kw_only=True)
class ScalingRow:
    """One run of a scaling series, against the run with the fewest devices."""

    run: int
    devices: int
    step_time_us: Us
    work_ratio: Annotated[
        float,
        "Work per device and step / that of the smallest run: 1 in weak scaling, 1/k with k times the devices in "
        "strong scaling.",
    ]
    kind: Annotated[str, "``base``, ``same`` (as many devices), ``weak``, ``strong`` or ``mixed``."]
    speedup: Annotated[float, "Work per second / that of the smallest run."]
    efficiency: Annotated[float, "Work per second and device / that of the smallest run: 1 is perfect scaling."]
    ideal_step_us: Annotated[Us, "Step time at efficiency 1."]
    lost_us: Annotated[
        dict[str, Us], "Category -> its time - work_ratio x its time in the smallest run. Adds up to step - ideal."
    ]

    def self_check(self) -> None:
        """Raise ValueError where the categories do not add up."""
        if self.lost_us:
            lost = self.step_time_us - self.ideal_step_us
            _add_up(f"run {self.run}", list(self.lost_us.values()), lost, self.step_time_us)


@dataclass(frozen=True, kw_only=True)
class Scaling:
    """How the job scales with the number of devices."""

    rows: Annotated[tuple[ScalingRow, ...], "Fewest devices first."]
    work_from: Annotated[str, "Measure of a device's work: ``model FLOPs``, ``batch`` or ``assumed equal``."]


@dataclass(frozen=True, kw_only=True, repr=False)
class Comparison(Displayed):
    """Two or more recordings side by side."""

    _shown_by = "comparison"

    runs: Annotated[tuple[RunRow, ...], "In the order given; the first is the baseline."]
    differences: Annotated[tuple[Difference, ...], "One for each candidate."]
    scaling: Annotated[
        Scaling | None, "None where all runs have the same number of devices, or where that is not known."
    ]
    baselines: Annotated[
        tuple[RunRow, ...], "Further recordings of the baseline's job: what they differ by is noise."
    ] = ()
    perfscope_version: str = ""
    schema: str = field(default=SCHEMA, init=False)

    def __repr__(self) -> str:
        found = [f"{self.runs[each.candidate].label[:60]} ({each.step.verdict})" for each in self.differences]
        more = f" and {len(found) - 4} more" if len(found) > 4 else ""
        return f"<Comparison of {self.runs[0].label[:60]} with {', '.join(found[:4])}{more}>"

    def to_dict(self) -> dict[str, Any]:
        """The JSON value of schema ``perfscope.comparison/1``."""
        return {"schema": self.schema, **dataclasses.asdict(self)}

    def self_check(self) -> None:
        """Raise ValueError where parts do not add up to their total."""
        for difference in self.differences:
            difference.self_check()
        for row in self.scaling.rows if self.scaling else ():
            row.self_check()


def _add_up(what: str, parts: list[float], whole: float, scale: float) -> None:
    total = math.fsum(parts)
    if not math.isclose(total, whole, rel_tol=1e-9, abs_tol=max(abs(scale), 1.0) * 1e-9):
        raise ValueError(f"{what}: the parts add up to {total} us, the total is {whole} us")
