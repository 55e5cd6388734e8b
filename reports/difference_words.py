"""A comparison in words: what changed, why, how sure that is, and whether predictions came true."""

from __future__ import annotations

import math
from typing import Final

from perfscope.comparison import (
    BETWEEN_RANKS,
    Comparison,
    Difference,
    MetricChange,
    RowChange,
    RunRow,
    ScalingRow,
    SettingChange,
    Tried,
)
from perfscope.reports.categories import BY_NAME
from perfscope.reports.format import ABSENT, byte_size, duration, known, plural, ranks_named, share, significant

MOST_CAUSES: Final = 3
"""Rows that the sentence about the causes names."""

BETWEEN: Final = "The slowest rank beyond the mean"

LABELS: Final = {
    "step_time": "Step time",
    "samples_per_second": "Samples a second",
    "tokens_per_second": "Tokens a second",
    "mfu": "MFU",
    "hfu": "HFU",
    "exposed_communication": "Exposed communication",
    "idle": "Idle",
    "dataloader": "Data loading",
    "hidden_communication": "Communication hidden",
    "straggler_lost": "Lost to the worst straggler",
    "memory_peak": "Peak memory",
    "memory_share": "Peak memory of capacity",
    "batch_load_time": "Time to load a batch",
}

_NOUNS: Final = {
    "compute": "computing",
    "exposed_comm_wait": "waiting for late ranks",
    "exposed_comm_transfer": "transfer that nothing hides",
    "exposed_copy": "copying that nothing hides",
    "idle_dataloader": "data loading",
    "idle_sync": "blocking in syncs",
    "idle_launch": "launching",
    "idle_host": "other host work",
    "idle_dependency": "waiting on dependencies",
    "idle_unknown": "idling for unknown reasons",
    BETWEEN_RANKS: "difference between the ranks",
}
"""Rows of the account after "more" and "less"."""

_OUTCOMES: Final = {
    "came true": "the prediction came true",
    "brought more": "it brought more than predicted",
    "brought less": "it brought less than predicted",
    "made it slower": "it made the step slower",
    "no effect": "no effect beyond the noise",
    "not judged": "that cannot be judged",
}


WELL_SCALED: Final = 0.9
"""Efficiency from which a job is said to scale well."""


def title(comparison: Comparison) -> str:
    """The whole comparison in one sentence."""
    scaling = comparison.scaling
    if scaling is not None:
        fewest, most = scaling.rows[0], scaling.rows[-1]
        return (
            f"{plural(most.devices, 'device')} do {significant(most.speedup)}× the work a second of {fewest.devices}: "
            f"{share(most.efficiency)} scaling efficiency."
        )
    if len(comparison.differences) == 1:
        return headline(comparison, comparison.differences[0])
    first = comparison.runs[0].label
    best = min(comparison.differences, key=lambda difference: difference.step.after_us)
    if best.step.verdict != "faster":
        return f"None of {len(comparison.differences)} runs is faster than {first} beyond the noise."
    step = best.step
    return (
        f"The fastest of {len(comparison.runs)} runs is {comparison.runs[best.after].label}: a step takes "
        f"{duration(step.after_us)} instead of {duration(step.before_us)} with {first}."
    )


def tone(comparison: Comparison) -> str:
    """``faster``, ``slower`` or ``same``: the colour of the whole."""
    if comparison.scaling is not None:
        return "faster" if comparison.scaling.rows[-1].efficiency >= WELL_SCALED else "slower"
    verdicts = {difference.step.verdict for difference in comparison.differences}
    if "slower" in verdicts:
        return "slower"
    return "faster" if "faster" in verdicts else "same"


def identity(run: RunRow) -> str:
    """``before (8 ranks, NVIDIA H100 80GB HBM3)``."""
    size = plural(run.world_size or run.ranks, "rank")
    return f"{run.label} ({', '.join([size, *run.devices[:2]])})"


def headline(comparison: Comparison, difference: Difference) -> str:
    """What came of it, in one sentence."""
    step, label = difference.step, comparison.runs[difference.after].label
    now, then = duration(step.after_us), duration(step.before_us)
    if step.verdict == "unknown":
        return f"{label} cannot be judged: a step takes {now} instead of {then}, but too few steps were recorded."
    if step.confirmed is False:
        return (
            f"No difference beyond the noise: a recorded step of {label} takes {now} instead of {then}, but the rest "
            "of the runs does not show it."
        )
    if step.verdict == "same":
        return (
            f"No difference beyond the noise: a step of {label} takes {now} instead of {then} "
            f"({signed(step.delta_us)}, noise ±{duration(step.noise_us)})."
        )
    return (
        f"{label} is {pace(step.before_us, step.after_us)}: a step takes {now} instead of {then} "
        f"({signed(step.delta_us)})."
    )


def pace(before_us: float, after_us: float) -> str:
    """``1.44× as fast``, ``12% faster``, ``8.1% slower``: of steps a second."""
    if not before_us > 0 or not after_us > 0:
        return "of unknown pace"
    ratio = before_us / after_us
    if ratio >= 1.2:
        return f"{significant(ratio)}× as fast"
    if ratio >= 1:
        return f"{share(ratio - 1)} faster"
    return f"{share(1 / ratio - 1)} slower"


def because(difference: Difference) -> str:
    """The rows of the account that changed beyond the noise, the largest first; empty where none did."""
    towards = 1 if difference.step.delta_us > 0 else -1
    rows = sorted((row for row in difference.rows if row.real), key=lambda row: -towards * row.delta_us)
    if not rows:
        return ""
    if difference.step.verdict == "same":
        moved = ", ".join(_moved(row) for row in rows[:MOST_CAUSES])
        return f"Inside the step, though, there is {moved}."
    named = [row for row in rows if row.delta_us * towards > 0][:MOST_CAUSES]
    against = [row for row in rows if row.delta_us * towards < 0][-1:]
    told = ", ".join(_moved(row) for row in named)
    counter = f"; against that, {_moved(against[0])}" if against else ""
    causes = f"A step has {told}{counter}." if told else f"A step has {_moved(rows[-1])}."
    return f"{causes} {_apart(difference)}".rstrip()


def _apart(difference: Difference) -> str:
    """The ranks whose own work changed otherwise than their peers'; empty where none did."""
    apart = [rank for rank in difference.ranks if rank.stands_out]
    if not apart:
        return ""
    own = {rank.rank: rank.delta_us - rank.rows_us["exposed_comm_wait"] for rank in apart}
    most = max(own, key=lambda rank: abs(own[rank]))
    who = ranks_named(own)
    whose = "its own work" if len(own) == 1 else f"their own work (rank {most})"
    return f"{who[0].upper()}{who[1:]} alone: {signed(own[most])} of {whose}, unlike the other ranks."


def changed(difference: Difference, most: int = 4) -> str:
    """What was changed between the runs, the user's settings first; empty where nothing is known to differ."""
    shown = [change for change in difference.settings if change.name != "hosts"]
    order = {"setting": 0, "command": 1, "job": 2, "version": 3, "device": 4}
    shown.sort(key=lambda change: order[change.about])
    told = "; ".join(setting(change) for change in shown[:most])
    more = f"; and {len(shown) - most} more" if len(shown) > most else ""
    return f"{told}{more}" if told else ""


def setting(change: SettingChange) -> str:
    """``dataloader.num_workers: 0 → 2``."""
    absent = "not set" if change.about == "command" else "not recorded"
    return f"{change.name}: {_short(change.before, absent)} → {_short(change.after, absent)}"


def certainty(difference: Difference) -> str:
    """How sure the verdict is, and what it rests on."""
    step = difference.step
    parts = [step.why]
    if known(step.low_us) and known(step.high_us) and step.confirmed is not False:
        parts.append(f"The difference lies between {signed(step.low_us)} and {signed(step.high_us)}.")
    if (
        step.confirmed is None
        and known(step.noise_us)
        and step.verdict == "same"
        and step.floor_us <= abs(step.delta_us) <= step.noise_us
    ):
        needed = math.ceil(min(step.steps_before, step.steps_after) * (step.noise_us / abs(step.delta_us)) ** 2)
        parts.append(f"To tell a difference of this size, record about {needed:,} steps of each.")
    if known(step.noise_us) and step.noise_us == step.floor_us:
        parts.append(f"Below {duration(step.floor_us)} nothing is claimed ({step.floor_from}).")
    if step.unprofiled_before_us and step.unprofiled_after_us:
        parts.append(
            f"Without profiling a step took {duration(step.unprofiled_before_us)} before and "
            f"{duration(step.unprofiled_after_us)} after."
        )
    return " ".join(parts)


def prediction(tried: Tried) -> str:
    """What was predicted of a change, and what it brought."""
    made = ", ".join(
        f"{name} {tried.before[name]} → {tried.after[name]}"
        + ("" if tried.as_advised or not tried.rule else f" (advised: {value})")
        for name, value in tried.settings.items()
    )
    if tried.predicted_us is None:
        bound = f"; at most {share(tried.ceiling)} more steps a second were possible" if known(tried.ceiling) else ""
        return f"{made}: a step takes {duration(tried.measured_us)} now{bound}; {_OUTCOMES[tried.verdict]}."
    predicted = tried.predicted_us
    span = f"{duration(predicted['mid'])} (between {duration(predicted['low'])} and {duration(predicted['high'])})"
    realised = (
        f"; {share(tried.realised)} of the predicted saving" if known(tried.realised) and tried.realised > 0 else ""
    )
    beside = f". Other things changed too: {', '.join(tried.also_changed[:3])}" if tried.also_changed else ""
    return (
        f"{made}: predicted {span}, measured {duration(tried.measured_us)}: "
        f"{_OUTCOMES[tried.verdict]}{realised}{beside}."
    )


def scaled(row: ScalingRow) -> str:
    """One run of a scaling series in a sentence."""
    lost = [(us, name) for name, us in row.lost_us.items() if us > 0]
    worst = f"; most of the loss is {row_name(max(lost)[1]).lower()}" if lost and row.efficiency < 0.99 else ""
    return (
        f"{plural(row.devices, 'device')}: {significant(row.speedup)}× the work a second, "
        f"{share(row.efficiency)} efficiency{worst}."
    )


def row_name(name: str) -> str:
    """A row of the account as the page calls it."""
    if name == BETWEEN_RANKS:
        return BETWEEN
    return BY_NAME[name].label if name in BY_NAME else name


def signed(us: float | None) -> str:
    """A difference of times with its sign: ``−125 ms``, ``+3.1 ms``."""
    if not known(us):
        return ABSENT
    return f"{'−' if us < 0 else '+' if us > 0 else '±'}{duration(abs(us))}"


def relative(before: float | None, after: float | None) -> str:
    """A relative change with its sign: ``−31%``; absent where there is nothing to relate to."""
    if not known(before) or not known(after) or before == 0:
        return ABSENT
    change = after / before - 1
    return f"{'−' if change < 0 else '+'}{share(abs(change))}" if change else "±0%"


def metric_value(value: float | None, unit: str) -> str:
    """A metric's value in its unit."""
    if not known(value):
        return ABSENT
    if unit == "us":
        return duration(value)
    if unit == "share":
        return share(value)
    return byte_size(value) if unit == "bytes" else significant(value)


def improved(change: MetricChange) -> bool | None:
    """Is it better than before? None where it did not change, or is not known."""
    if not change.delta:
        return None
    return (change.delta > 0) == (change.better == "higher")


def verdict_word(real: bool | None) -> str:
    """Of a single change."""
    return "not judged" if real is None else "beyond noise" if real else "within noise"


def _moved(row: RowChange) -> str:
    return f"{duration(abs(row.delta_us))} {'more' if row.delta_us > 0 else 'less'} {_NOUNS[row.name]}"


def _short(value: str | None, absent: str) -> str:
    if value is None:
        return absent
    return value if len(value) <= 40 else f"{value[:39]}…"
