"""A comparison in words: what changed, why, with what confidence, and how predictions compare with measurements."""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import Final

from perfscope.results.budget import Check
from perfscope.results.categories import BY_ID
from perfscope.results.comparison import (
    BETWEEN_RANKS,
    CategoryChange,
    Comparison,
    Difference,
    MetricChange,
    PredictionCheck,
    RunRow,
    Scaling,
    ScalingRow,
    SettingChange,
    StageChange,
    StepChange,
)
from perfscope.results.history import OTHER, STAGE_WORDS
from perfscope.text import ABSENT, byte_size, duration, factor, known, percent, plural, ranks_in_words, significant

MOST_CAUSES: Final = 3
"""Categories in the sentence about the causes."""

_NOTABLE: Final = 0.1
"""Share of the change from which a category that moved against it is named."""

_UNLIKE: Final = 0.005
"""Share of the step by which the means of all steps must differ from those of the regular ones to be named."""

BETWEEN: Final = "Job's step above the ranks' mean"

LABELS: Final = {
    "step_time": "Step time",
    "samples_per_second": "Samples/s",
    "tokens_per_second": "Tokens/s",
    "mfu": "MFU",
    "hfu": "HFU",
    "exposed_communication": "Exposed communication",
    "idle": "Idle",
    "dataloader": "Data loading",
    "overlapped_communication": "Overlapped communication",
    "straggler_cost": "Worst straggler cost",
    "memory_peak": "Peak memory",
    "memory_share": "Peak memory / capacity",
    "batch_load_time": "Batch load time",
}

WELL_SCALED: Final = 0.9
"""Efficiency from which a job scales well."""


def title(comparison: Comparison) -> str:
    """The whole comparison in one sentence."""
    scaling = comparison.scaling
    if scaling is not None:
        fewest, most = scaling.rows[0], scaling.rows[-1]
        return (
            f"{plural(most.devices, 'device')} have {factor(most.speedup)} the throughput of {fewest.devices}: "
            f"{percent(most.efficiency)} scaling efficiency."
        )
    if len(comparison.differences) == 1:
        return headline(comparison, comparison.differences[0])
    baseline = comparison.runs[0].label
    faster = [difference for difference in comparison.differences if difference.step.verdict == "faster"]
    worse = slower(comparison)
    also = f"; {', '.join(worse)} {'is' if len(worse) == 1 else 'are'} significantly slower" if worse else ""
    if not faster:
        return f"None of the {len(comparison.differences)} candidates is significantly faster than {baseline}{also}."
    best = min(faster, key=lambda difference: difference.step.candidate_us)
    label = comparison.runs[best.candidate].label
    how = f"{pace(best.step.baseline_us, best.step.candidate_us)} than {baseline}: the step time {_changed(best)}"
    return f"Of {len(comparison.differences)} candidates {label} is the fastest, {how}{also}."


def tone(comparison: Comparison) -> str:
    """``faster``, ``slower`` or ``same``: the colour of the whole. More devices that do well are not ``faster`` where
    their steps take longer.
    """
    if comparison.scaling is not None and comparison.scaling.rows[-1].efficiency < WELL_SCALED:
        return "slower"
    verdicts = {difference.step.verdict for difference in comparison.differences}
    if "slower" in verdicts:
        return "same" if comparison.scaling is not None else "slower"
    return "faster" if "faster" in verdicts or comparison.scaling is not None else "same"


def slower(comparison: Comparison) -> list[str]:
    """The candidates whose steps take significantly longer."""
    return [comparison.runs[each.candidate].label for each in comparison.differences if each.step.verdict == "slower"]


def failures(comparison: Comparison, conditions: Collection[str]) -> list[str]:
    """Why a comparison fails ``--fail-on``, a sentence for each of the conditions that are met."""
    worse = slower(comparison) if "slower" in conditions else []
    found = [
        f"--fail-on new-finding: {comparison.runs[difference.candidate].label} has a new finding, {finding.title}"
        for difference in comparison.differences
        for finding in difference.findings
        if finding.status == "new" and "new-finding" in conditions
    ]
    return [*(f"--fail-on slower: the steps of {label} are significantly slower" for label in worse), *found]


def identity(run: RunRow) -> str:
    """``before (8 ranks, NVIDIA H100 80GB HBM3)``."""
    size = plural(run.world_size or run.ranks, "rank")
    return f"{run.label} ({', '.join([size, *run.devices[:2]])})"


def headline(comparison: Comparison, difference: Difference) -> str:
    """The verdict on the step time in one sentence."""
    step, label = difference.step, comparison.runs[difference.candidate].label
    if step.verdict == "unknown":
        return f"{label} has too few steps to judge: the step time {_changed(difference)}."
    unprofiled = _unprofiled(step)
    if step.confirmed is False and unprofiled:
        return f"Not certain: the recorded step time of {label} {_changed(difference)}, but {unprofiled}."
    if step.confirmed is False:
        return f"Within noise: the step time of {label} {_changed(difference)}, but unprofiled steps do not confirm it."
    if step.verdict == "same" and unprofiled:
        return f"Not certain: the recorded steps of {label} show no difference, but {unprofiled}."
    if step.verdict == "same" and step.uncertain:
        return (
            f"Not certain: the step time of {label} {_changed(difference)} ({signed(step.delta_us)}, between "
            f"{signed(step.low_us)} and {signed(step.high_us)})."
        )
    if step.verdict == "same":
        return (
            f"Within noise: the step time of {label} {_changed(difference)} "
            f"({signed(step.delta_us)}, noise ±{duration(step.noise_us)})."
        )
    return (
        f"{label} is {pace(step.baseline_us, step.candidate_us)}: the step time {_changed(difference)} "
        f"({signed(step.delta_us)})."
    )


def _unprofiled(step: StepChange) -> str:
    """How the steps that were not profiled changed, where that is much: profiling may hide it. Else empty."""
    if not step.unprofiled_differ:
        return ""
    return (
        f"unprofiled steps changed from {duration(step.baseline_unprofiled_us)} to "
        f"{duration(step.candidate_unprofiled_us)}"
    )


def _changed(difference: Difference) -> str:
    return f"changed from {duration(difference.step.baseline_us)} to {duration(difference.step.candidate_us)}"


def pace(baseline_us: float, candidate_us: float) -> str:
    """``1.44x faster``, ``1.08x slower``: the ratio of the step times."""
    if not baseline_us > 0 or not candidate_us > 0:
        return "of unknown speed"
    ratio = baseline_us / candidate_us
    return f"{factor(ratio)} faster" if ratio >= 1 else f"{factor(1 / ratio)} slower"


def because(difference: Difference) -> str:
    """What the change of the step time is made up of; where it did not change, what did significantly."""
    if not difference.categories:
        return _by_stages(difference)
    by_name = {row.name: row for row in difference.categories}
    if difference.step.verdict == "same":
        rows = sorted((row for row in by_name.values() if row.significant), key=lambda row: -abs(row.delta_us))
        return (
            f"{_whatever_the_step(difference)} has {', '.join(_moved(row) for row in rows[:MOST_CAUSES])}."
            if rows
            else ""
        )
    if not difference.causes:
        return ""
    named = ", ".join(_moved(by_name[name]) for name in difference.causes[:MOST_CAUSES])
    against = _against(difference)
    counter = f", but {_moved(against)}" if against is not None else ""
    if difference.causes_significant:
        sentence = f"Each step has {named}{counter}."
    else:
        which = "is not significant" if len(difference.causes) == 1 else "are not all significant"
        sentence = f"The change is made up of {named}{counter}, which {which} alone."
    return f"{sentence} {_standing_out(difference)}".rstrip()


def _by_stages(difference: Difference) -> str:
    """Without a trace: the stages that changed significantly in the direction of the step time; where that did not
    change, any.
    """
    same = difference.step.verdict not in ("faster", "slower")
    delta = 0.0 if same else difference.step.delta_us
    rows = [row for row in difference.stages if row.significant and row.delta_us * delta >= 0]
    rows.sort(key=lambda row: -abs(row.delta_us))
    named = ", ".join(
        f"{duration(abs(row.delta_us))} {'more' if row.delta_us > 0 else 'less'} {stage_phrase(row.name)}"
        for row in rows[:MOST_CAUSES]
    )
    return f"{_whatever_the_step(difference) if same else 'Each step'} spends {named}." if named else ""


def _whatever_the_step(difference: Difference) -> str:
    """How a sentence about parts begins where the step time did not change significantly."""
    return "Certain is that each step" if difference.step.uncertain else "Each step nevertheless"


def _against(difference: Difference) -> CategoryChange | None:
    """The category that moved most against the step time, where that is significant or a tenth of the change."""
    delta = difference.step.delta_us
    rows = [
        row
        for row in difference.categories
        if row.delta_us * delta < 0 and (row.significant or abs(row.delta_us) >= _NOTABLE * abs(delta))
    ]
    return max(rows, key=lambda row: abs(row.delta_us), default=None)


def _standing_out(difference: Difference) -> str:
    """The ranks whose own time changed differently from their peers'; empty where there is none."""
    own = {
        rank.rank: rank.delta_us - rank.categories_us["exposed_comm_wait"]
        for rank in difference.ranks
        if rank.stands_out
    }
    if not own:
        return ""
    most = max(own, key=lambda rank: abs(own[rank]))
    which = "" if len(own) == 1 else f" (rank {most})"
    return (
        f"Only {ranks_in_words(own)} changed differently from the other ranks: {signed(own[most])} of own time{which}."
    )


def changed(difference: Difference, most: int = 4) -> str:
    """What differs between the runs, the user's settings first; empty where nothing is known to differ."""
    shown = [change for change in difference.settings if change.name != "hosts"]
    order = {"setting": 0, "command": 1, "job": 2, "version": 3, "device": 4}
    shown.sort(key=lambda change: order[change.about])
    more = f"; and {len(shown) - most} more" if len(shown) > most else ""
    return "; ".join(setting(change) for change in shown[:most]) + more


def setting(change: SettingChange) -> str:
    """``dataloader.num_workers: 0 → 2``."""
    absent = "not set" if change.about == "command" else "not recorded"
    return f"{change.name}: {_short(change.baseline, absent)} → {_short(change.candidate, absent)}"


def certainty(difference: Difference) -> str:
    """The confidence of the verdict, and what it rests on."""
    step = difference.step
    parts = [step.why]
    if known(step.low_us) and known(step.high_us) and step.confirmed is not False:
        parts.append(f"The difference is between {signed(step.low_us)} and {signed(step.high_us)}.")
    if step.confirmed is None and known(step.noise_us) and step.floor_us <= abs(step.delta_us) <= step.noise_us:
        steps = math.ceil(min(step.baseline_steps, step.candidate_steps) * (step.noise_us / abs(step.delta_us)) ** 2)
        parts.append(f"To detect a difference of this size, record about {steps:,} steps of each.")
    if known(step.noise_us) and step.noise_us == step.floor_us:
        parts.append(f"Differences below {duration(step.floor_us)} count as noise ({step.floor_from}).")
    means = step.baseline_mean_us, step.candidate_mean_us
    if max(abs(means[0] - step.baseline_us), abs(means[1] - step.candidate_us)) > _UNLIKE * step.baseline_us:
        parts.append(f"The means of all steps are {duration(means[0])} and {duration(means[1])}.")
    if step.baseline_unprofiled_us and step.candidate_unprofiled_us:
        parts.append(
            f"Unprofiled steps took {duration(step.baseline_unprofiled_us)} in the baseline and "
            f"{duration(step.candidate_unprofiled_us)} in the candidate."
        )
    return " ".join(parts)


def sentences(difference: Difference) -> list[tuple[str, str]]:
    """What changed and why, each with the word that leads it; without the verdict and its confidence."""
    led = [
        ("Why", because(difference)),
        ("Changed", changed(difference)),
        *(("Predicted", prediction(check, difference.step)) for check in difference.predictions),
        *(("Note", note) for note in difference.notes),
    ]
    return [(lead, text) for lead, text in led if text]


def checked(check: Check) -> str:
    """How many checks passed or failed."""
    total = len(check.rows)
    return f"{plural(total, 'check')} passed" if check.passed else f"{len(check.failed)} of {total} checks failed"


def prediction(check: PredictionCheck, step: StepChange) -> str:
    """The predicted and the measured effect of a change."""
    change = ", ".join(
        f"{name} {check.baseline[name]} → {check.candidate[name]}"
        + ("" if check.as_advised or not check.rule else f" (advised: {value})")
        for name, value in check.settings.items()
    )
    verdict = "cannot be judged" if check.verdict == "not judged" else check.verdict
    measured = f"measured {duration(check.measured_us)}"
    if check.predicted_us is None:
        bound = f"; the predicted upper bound was {factor(1 + check.ceiling)}" if known(check.ceiling) else ""
        return f"{change}: {measured}{bound}; {verdict}."
    low, mid, high = (duration(us) for us in (check.predicted_us.low, check.predicted_us.mid, check.predicted_us.high))
    realised = ""
    if known(check.realised) and check.realised > 0 and check.verdict != "not judged":
        effect = "slowdown" if check.predicted_us.mid > step.baseline_mean_us else "saving"
        realised = f"; {percent(check.realised)} of the predicted {effect}"
    others = f". Also changed: {', '.join(check.also_changed[:3])}" if check.also_changed else ""
    return f"{change}: predicted {mid} ({low} to {high}), {measured}: {verdict}{realised}{others}."


def scaled(scaling: Scaling) -> list[str]:
    """A sentence for each run with more devices than the smallest."""
    fewest = scaling.rows[0].devices
    return [
        f"{plural(row.devices, 'device')}: {factor(row.speedup)} the throughput of {fewest}, "
        f"{percent(row.efficiency)} scaling efficiency{_largest_loss(row)}."
        for row in scaling.rows
        if row.kind not in ("base", "same")
    ]


def _largest_loss(row: ScalingRow) -> str:
    losses = [(us, name) for name, us in row.lost_us.items() if us > 0]
    return f"; the largest loss is {phrase(max(losses)[1])}" if losses and row.efficiency < 0.99 else ""


def category_name(name: str) -> str:
    """The name of a category on the page."""
    if name == BETWEEN_RANKS:
        return BETWEEN
    return BY_ID[name].label if name in BY_ID else name


def phrase(name: str) -> str:
    """The name of a category inside a sentence."""
    return "difference between ranks" if name == BETWEEN_RANKS else BY_ID[name].phrase if name in BY_ID else name


def stage_name(name: str) -> str:
    """The name of a stage in a table."""
    return "Data loading" if name == "dataloader" else name.capitalize()


def stage_phrase(name: str) -> str:
    """Where a step spends its time, inside a sentence."""
    return "outside of the timed stages" if name == OTHER else STAGE_WORDS.get(name, f"in {name}")


def signed(us: float | None) -> str:
    """A difference of times with its sign: ``−125 ms``, ``+3.1 ms``."""
    if not known(us):
        return ABSENT
    return f"{'−' if us < 0 else '+' if us > 0 else '±'}{duration(abs(us))}"


def relative(baseline: float | None, candidate: float | None) -> str:
    """A relative change with its sign: ``−31%``; absent where the baseline is 0 or not known."""
    if not known(baseline) or not known(candidate) or baseline == 0:
        return ABSENT
    change = candidate / baseline - 1
    return f"{'−' if change < 0 else '+'}{percent(abs(change))}" if change else "±0%"


def metric_value(value: float | None, unit: str) -> str:
    """A metric's value in its unit."""
    if not known(value):
        return ABSENT
    if unit == "us":
        return duration(value)
    if unit == "share":
        return percent(value)
    return byte_size(value) if unit == "bytes" else significant(value)


def improved(change: MetricChange) -> bool | None:
    """Is the candidate better? None where nothing changed, or where that is not known."""
    if not change.delta:
        return None
    return (change.delta > 0) == (change.better == "higher")


def verdict_word(is_significant: bool | None) -> str:
    """The verdict on one change."""
    return "not judged" if is_significant is None else "significant" if is_significant else "within noise"


def category_verdict(difference: Difference, row: CategoryChange | StageChange) -> str:
    """The verdict on the change of a category. One that explains a significant change of the step, with others, is no
    noise, though it is not significant alone.
    """
    if row.significant is False and row.name in difference.causes:
        return "part of the change"
    return verdict_word(row.significant)


def _moved(row: CategoryChange) -> str:
    return f"{duration(abs(row.delta_us))} {'more' if row.delta_us > 0 else 'less'} {phrase(row.name)}"


def _short(value: str | None, absent: str) -> str:
    if value is None:
        return absent
    return value if len(value) <= 40 else f"{value[:39]}…"
