"""The history: how long the steps of the whole run took, captured or not.

All times are by the host's clock on the training thread, from one step boundary to the next: with a device, a stage's
time is that of launching its kernels or waiting for them, not that of the kernels.
"""

from __future__ import annotations

import math
from dataclasses import field
from typing import Annotated

from perfscope.frozen import dataclass
from perfscope.results.fields import Ratio, Share, Unit, Us
from perfscope.text import duration, percent, ranks_in_words

OTHER = "other"
"""Time that no measured stage covers: Python between stages, and waiting outside of them."""


@dataclass(frozen=True, kw_only=True)
class RankHistory:
    """One rank's steps. No statistic includes the steps during which the collector itself was at work."""

    rank: int
    host: str
    attempt: Annotated[int, "Elastic restarts before these steps; steps of earlier attempts are only counted."]
    earlier_steps: Annotated[int, "Recorded steps of earlier attempts."]
    first_step: int
    last_step: int
    steps: Annotated[int, "Steps that the statistics are of."]
    disturbed_steps: Annotated[int, "Steps in which the collector itself was at work; left out of the statistics."]
    lost_steps: Annotated[int, "Steps between the first and the last that the file does not hold."]
    mean_us: Us
    median_us: Us
    p95_us: Us
    p99_us: Us
    max_us: Us
    stages_us: Annotated[
        dict[str, Us], "Mean per step of each stage that was measured, and of ``other``; they add up to ``mean_us``."
    ]
    outlier_steps: Annotated[int, "Steps of at least 1.5 times the median of those around them."]
    trend: Annotated[
        float | None,
        Unit("0.25 is 25 %"),
        "Median of the last tenth of the steps over that of the first, less 1; None below 100 steps.",
    ]

    def self_check(self) -> None:
        """Raise ValueError where the stages do not add up to the step (each is rounded to a µs)."""
        total = math.fsum(self.stages_us.values())
        if not math.isclose(total, self.mean_us, rel_tol=1e-9, abs_tol=1e-6):
            raise ValueError(f"rank {self.rank}: stages add up to {total} us, the mean step is {self.mean_us} us")


@dataclass(frozen=True, kw_only=True)
class HistoryBin:
    """Consecutive steps of the job; for a picture of the whole run."""

    first_step: int
    last_step: int
    median_us: Annotated[Us, "Of the rank with the longest median."]
    max_us: Annotated[Us, "Longest step of any rank."]
    stages_us: Annotated[
        dict[str, Us],
        "Mean per step of each stage that all ranks measured, and of ``other``; mean over ranks. "
        "Empty in summaries of earlier versions.",
    ] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class OutlierStep:
    """A step that took far longer than those around it."""

    step: int
    us: Annotated[Us, "Of the rank on which it was longest."]
    ratio: Annotated[Ratio, "To the median of the steps around it."]
    ranks: Annotated[tuple[int, ...], "Ranks on which it was an outlier."]
    rank: Annotated[
        int | None,
        "The rank that took longer than its peers; where waiting was not measured, the one with most of the excess "
        "outside stages in which ranks wait for one another. None where neither is known.",
    ]
    stage: Annotated[str, "The stage that holds most of the excess, of that rank or of the longest step."]

    @property
    def longer_us(self) -> float:
        """By how much it took longer than the steps around it, µs."""
        return self.us * (1 - 1 / self.ratio)


@dataclass(frozen=True, kw_only=True)
class LongSteps:
    """Steps that take far longer than those around them, again and again: pauses of one rank, or of all."""

    steps: Annotated[tuple[int, ...], "Their numbers, ascending; of many the longest 50."]
    of_steps: Annotated[int, "Steps of the run that they are among."]
    longer_us: Annotated[Us, "Mean of what they take longer than those around them."]
    share: Annotated[Share, "What they take longer, of the time of the steps that they are among."]
    period: Annotated[int | None, "Steps from one to the next, where they come regularly."]
    rank: Annotated[int | None, "The rank that most of them are attributed to; None where there is none."]
    stage: Annotated[str, "The stage that holds most of the excess; empty where that differs."]
    on_all_ranks: Annotated[bool, "Ranks were compared, and none of them takes longer than its peers in these steps."]

    def in_words(self) -> str:
        """A sentence without its full stop: "every 20 steps (20, 40, 60 …) one takes 600 ms longer ..."."""
        longer = f"{duration(self.longer_us)} longer than those around"
        if self.period is not None:
            shown = ", ".join(f"{step:,}" for step in self.steps[:3]) + (" …" if len(self.steps) > 3 else "")
            which = f"every {self.period:,} steps ({shown}) one takes {longer} it"
        else:
            among = f"no regular ones, between {self.steps[0]:,} and {self.steps[-1]:,}"
            which = f"{len(self.steps)} of {self.of_steps:,} steps ({among}) take {longer} them"
        where = f" {STAGE_WORDS.get(self.stage, f'in {self.stage}')}" if self.stage else ""
        who = (
            f", on rank {self.rank}{where}" if self.rank is not None else ", on all ranks" if self.on_all_ranks else ""
        )
        return f"{which}{who}: {percent(self.share)} of the run's time"


@dataclass(frozen=True, kw_only=True)
class StepChange:
    """From some step on the steps of the run take another time than before."""

    first_step: Annotated[int, "The first that takes the other time."]
    about: Annotated[bool, "It is one of the steps of a bin that begins there."]
    before_us: Annotated[Us, "Median of the steps before."]
    after_us: Annotated[Us, "Median of the steps from there on."]
    share_after: Annotated[Share, "Of the time of all steps, that of the steps from there on."]

    @property
    def slower(self) -> bool:
        """Do they take longer?"""
        return self.after_us > self.before_us

    def in_words(self) -> str:
        """A sentence without its full stop: "from step 30 on steps take 80.1 ms instead of 30.2 ms"."""
        where = f"{'about ' if self.about else ''}step {self.first_step:,}"
        return f"from {where} on steps take {duration(self.after_us)} instead of {duration(self.before_us)}"


@dataclass(frozen=True, kw_only=True)
class SlowRank:
    """A rank that spends more of its steps in a stage than its peers, in one where ranks do not wait for others."""

    rank: int
    host: str
    stage: Annotated[str, "The stage of the step, such as ``forward`` or ``dataloader``."]
    excess_us: Annotated[
        Us, "Mean per step, over the median of the other ranks; how much of it the job would gain is not known."
    ]
    share_of_run: Annotated[Share, "Share of the run's segments in which that was so."]


_THROUGHOUT = 0.9
"""Share of the steps from which a steady straggler is one for the whole run."""

SEVERAL = "several"
"""Instead of a stage: no stage has half of a straggler's excess."""


CORE = "core"
"""Instead of a stage: a straggler's thread waits for a core that is free."""

EVALUATE_LESS = "Evaluate in fewer steps, or fewer batches."
"""What to do where evaluations take much of the time."""

STAGE_WORDS = {
    "dataloader": "loading data",
    "forward": "in the forward",
    "backward": "in the backward",
    "optimizer": "in the optimizer",
    "evaluation": "in evaluation",
    "checkpoint": "saving a checkpoint",
    OTHER: "outside of data loading, forward, backward and optimizer",
    SEVERAL: "in several stages",
    CORE: "waiting for a free core",
}
"""Where a rank spends its time, as a part of a sentence."""


@dataclass(frozen=True, kw_only=True)
class HistoryStraggler:
    """A rank that delayed steps of the run, found from what each rank did itself, without waiting for others."""

    ranks: Annotated[tuple[int, ...], "The rank; the ranks of a slow host; of a delay that rotates, all that had it."]
    hosts: tuple[str, ...]
    pattern: Annotated[
        str,
        "``steady``: in at least 80 % of the steps from its first slow one to its last; ``intermittent``: in fewer; "
        "``rotating``: a different rank each time.",
    ]
    stage: Annotated[
        str,
        "The stage with most of the excess, such as ``backward``; ``several`` where none has half of it, "
        "``core`` where the rank waits for a free core of its host.",
    ]
    stages_us: Annotated[dict[str, Us], "Stage -> mean excess over the peers in the slow steps; 1 µs and more."]
    steps: Annotated[int, "Slow steps, of those compared."]
    share_of_steps: Annotated[Share, "Of the compared steps."]
    first_step: int
    last_step: int
    period: Annotated[int | None, "Steps from one slow step to the next, where they come regularly."] = None
    excess_us: Annotated[Us, "Mean excess of the rank's own time over its peers' in the slow steps."]
    cost_us: Annotated[Us, "Time that the job loses to it, mean over all compared steps."]
    cost_share: Annotated[Share, "Of the time of all compared steps."]

    def in_words(self) -> str:
        """A sentence without its full stop: "rank 1 is a straggler in the backward: waiting for it costs 12% ..."."""
        cost = f"costs {percent(self.cost_share)} of the time"
        often = f"in {percent(self.share_of_steps)} of the steps"
        if self.period is not None:
            often = f"in one of every {self.period:,} steps"
        if self.pattern == "rotating":
            return f"ranks are late in turn {STAGE_WORDS[self.stage]}, {often}: waiting for them {cost}"
        host = f" ({self.hosts[0]})" if len(self.ranks) > 1 and self.hosts else ""
        one = len(self.ranks) == 1
        if self.pattern == "steady":
            part = f" in steps {self.first_step:,} to {self.last_step:,}"
            when = part if self.share_of_steps < _THROUGHOUT else ""
        else:
            when = f" {often}"
        return (
            f"{ranks_in_words(self.ranks)}{host} {'is a straggler' if one else 'are stragglers'}{when} "
            f"{STAGE_WORDS[self.stage]}: waiting for {'it' if one else 'them'} {cost}"
        )


_NOT_TRAINING = {
    "startup_us": "time to the first step",
    "warmup_us": "compile and warm-up",
    "evaluation_us": "evaluation",
    "checkpoint_us": "checkpoints",
    "restart_us": "restarts",
    "stall_us": "stalls",
    "recording_us": "recording",
}
"""What did not train, in words."""


@dataclass(frozen=True, kw_only=True)
class Goodput:
    """Where the wall time of the run went: ``wall_us``, of which ``training_us`` and the other parts are."""

    rank: Annotated[int, "The rank whose history this is: the one with the most evaluation and checkpoints."]
    wall_us: Annotated[
        Us,
        "From the start of the command to the end of the last recorded step, or of the command where it stood still.",
    ]
    training_us: Annotated[Us, "What no other part has: steps as long as those around them."]
    training_share: Annotated[Share, "``training_us`` of ``wall_us``."]
    startup_us: Annotated[
        Us | None, "From the start of the command to the end of its first step; None where the start is not known."
    ]
    warmup_us: Annotated[Us, "What the first steps took longer than later ones: compiling, warming up."]
    evaluation_us: Annotated[
        Us | None, "What steps with an evaluation took longer than those around them; None where that was not measured."
    ]
    checkpoint_us: Annotated[Us | None, "The same of steps with a checkpoint."]
    restart_us: Annotated[Us, "From the last step of an attempt to the end of the first step of the next one."]
    stall_us: Annotated[
        Us, "What other steps of at least 1.5 times the median around them took longer than it, and ``stood_still_us``."
    ]
    recording_us: Annotated[
        Us, "What steps with a profiler at work took longer, and the time that it took between steps."
    ]
    restarts: Annotated[int, "Elastic restarts."]
    steps: Annotated[int, "Recorded steps, of all attempts."]

    def parts(self) -> dict[str, float]:
        """What did not train, in words -> µs; without what is not known or nothing."""
        values = {words: getattr(self, name) for name, words in _NOT_TRAINING.items()}
        return {words: value for words, value in values.items() if value}

    def in_words(self) -> str:
        """A sentence: what trained, and where the rest went."""
        rest = ", ".join(f"{words} {percent(us / self.wall_us)}" for words, us in self.parts().items())
        trained = f"Goodput: {percent(self.training_share)} of {duration(self.wall_us)} trained"
        return f"{trained}; {rest}." if rest else f"{trained}."

    def self_check(self) -> None:
        """Raise ValueError where the parts do not add up to the wall time."""
        total = math.fsum((self.training_us, *self.parts().values()))
        if not math.isclose(total, self.wall_us, rel_tol=1e-9, abs_tol=1.0):
            raise ValueError(f"parts of the wall time add up to {total} us, it is {self.wall_us} us")


@dataclass(frozen=True, kw_only=True)
class RecordingCost:
    """What recording takes of every step outside captures: as the run itself measured it."""

    rank: Annotated[int, "Where it is the largest share of the step."]
    step_us: Annotated[Us, "Of the training thread, per step: ``between_us``, ``phases_us`` and ``waits_us``."]
    share: Annotated[Share, "``step_us`` of the rank's median step."]
    between_us: Annotated[
        Us,
        "Between the end of the optimizer's step and the begin of the next step, where only recording is at work: "
        "median of the first 256 steps.",
    ]
    phases_us: Annotated[Us, "Timing phases: how many a step has, times what one takes, measured at the start."]
    waits_us: Annotated[Us, "The same of timing waits for other ranks."]
    thread_us: Annotated[Us, "CPU time per step of the thread that writes the step history, beside the training."]

    def in_words(self) -> str:
        """A sentence."""
        beside = f", and {duration(self.thread_us)} of another thread's CPU time" if self.thread_us >= 0.1 else ""
        return (
            f"Recording step times takes {duration(self.step_us)} ({self.share:.2%}) of each step on "
            f"rank {self.rank}{beside}."
        )

    def self_check(self) -> None:
        """Raise ValueError where the parts do not add up to the cost of a step."""
        total = math.fsum((self.between_us, self.phases_us, self.waits_us))
        if not math.isclose(total, self.step_us, rel_tol=1e-9, abs_tol=1e-6):
            raise ValueError(f"parts of what recording costs add up to {total} us, it is {self.step_us} us")


@dataclass(frozen=True, kw_only=True)
class History:
    """Every step of the run."""

    ranks: tuple[RankHistory, ...]
    bins: tuple[HistoryBin, ...]
    outliers: Annotated[tuple[OutlierStep, ...], "The longest first, at most 50."]
    slow_ranks: Annotated[
        tuple[SlowRank, ...], "The largest excess first; where waiting was measured, ``stragglers`` has them instead."
    ]
    stragglers: Annotated[tuple[HistoryStraggler, ...], "The costliest first."] = ()
    compared: Annotated[bool, "Was waiting measured, so that ranks could be compared in all stages?"] = False
    long_steps: Annotated[LongSteps | None, "Steps that take far longer again and again; None where few do."] = None
    change: Annotated[StepChange | None, "From where on steps take another time; None where none plainly do."] = None
    stood_still_us: Annotated[
        Us | None,
        "From the end of the last step of any rank to that of the command, where ranks were killed then; None: they "
        "ended themselves, or it is not known.",
    ] = None
    goodput: Annotated[Goodput | None, "Where the wall time of the run went; None where that is not known."] = None
    recording_cost: Annotated[RecordingCost | None, "What recording took of each step; None where not measured."] = None
    missing_ranks: Annotated[tuple[int, ...], "Ranks of the world without a history."] = field(default=())
