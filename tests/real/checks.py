"""Checks: one number or answer of the analysis each, beside what the stopwatch measured."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from perfscope.results.categories import CATEGORIES
from perfscope.results.summary import Summary
from tests.real.truth import Truth

SHARE = 0.05
"""Of a time that was lost: how far the analysis may be off."""
OF_STEP = 0.03
"""And of the step, for what else the machine did meanwhile."""
FINDINGS = "findings"
"""Checked in a recording that is called healthy."""
CALM = 0.03
"""Of the step: what a rank may cost in a recording that is called healthy."""

QUIET = 0.25
"""Of the step: how long the threads may wait for a core."""

Value = float | str | Sequence[int]


@dataclass(frozen=True)
class Check:
    """``found`` must be what was ``planted``; numbers within ``margin`` of it, or no more than that above it."""

    what: str
    planted: Value
    found: Value
    margin: float = 0.0
    at_most: bool = False

    @property
    def holds(self) -> bool:
        if not (isinstance(self.planted, float) and isinstance(self.found, float)):
            return self.found == self.planted
        error = self.found - self.planted
        return (error if self.at_most else abs(error)) <= self.margin

    def wanted(self) -> str:
        """What ``found`` must be, in words."""
        margin = f" {'+' if self.at_most else '±'} {self.margin:.1f}" if self.margin else ""
        return f"{'at most ' if self.at_most else ''}{_text(self.planted)}{margin}"

    def got(self) -> str:
        """What was found, in words."""
        return _text(self.found)

    def __str__(self) -> str:
        return f"{self.what}: {self.got()} instead of {self.wanted()}"


def lost(summary: Summary, truth: Truth, rank: int, cause: str, rule: str = "straggling-rank") -> list[Check]:
    """One rank is the first of the stragglers, for the right reason, and costs what it costs."""
    worst = summary.stragglers[0] if summary.stragglers else None
    expected = truth.lost_ms([rank])
    margin = SHARE * expected + OF_STEP * truth.step_ms()
    return [
        Check("first straggler", f"rank {rank}, {cause}", f"rank {worst.rank}, {worst.cause}" if worst else "nobody"),
        Check("it costs, ms per step", expected, worst.lost_us / 1e3 if worst else 0.0, margin),
        Check("first finding", rule, first_rule(summary)),
        Check("everybody waits for it, ms per step", *_waits(summary, truth, rank), margin),
    ]


def taking_turns(summary: Summary, truth: Truth, cause: str) -> list[Check]:
    """All ranks are slow in turn, which is one cause."""
    worst = summary.stragglers[0] if summary.stragglers else None
    everybody = tuple(range(len(truth.ranks)))
    expected = truth.lost_ms(everybody)
    margin = SHARE * expected + OF_STEP * truth.step_ms()
    return [
        Check("ranks that take turns", everybody, worst.ranks if worst else ()),
        Check("pattern", f"rotating, {cause}", f"{worst.pattern}, {worst.cause}" if worst else "nothing"),
        Check("they cost, ms per step", expected, worst.lost_us / 1e3 if worst else 0.0, margin),
    ]


def named(summary: Summary, truth: Truth, rank: int, name: str) -> list[Check]:
    """A part of the host time has a name, and is as long as what was planted."""
    (row,) = (row for row in summary.time_breakdown if row.rank == rank)
    planted = truth.mean_ms("planted", rank)
    return [Check(f"{name}, ms per step", planted, row.named_host_us.get(name, 0.0) / 1e3, 0.05 * planted + 1)]


def largest_category(summary: Summary, name: str) -> list[Check]:
    """One category is the largest on every rank."""
    rows = {max(CATEGORIES, key=lambda row: entry.categories()[row]) for entry in summary.time_breakdown}
    return [Check("largest category", name, ", ".join(sorted(rows)))]


def loading(summary: Summary, truth: Truth) -> list[Check]:
    """Data loading is the time that the loop spent in the loader, on every rank."""
    return [
        Check(
            f"idle_dataloader of rank {row.rank}, ms per step",
            truth.mean_ms("load", row.rank),
            row.idle_dataloader_us / 1e3,
            0.02 * truth.mean_ms("load", row.rank) + 1,
        )
        for row in summary.time_breakdown
    ]


def communicating(summary: Summary, truth: Truth) -> list[Check]:
    """Exposed communication is the time that the thread was blocked in the backward, on every rank."""
    return [
        Check(
            f"exposed communication of rank {row.rank}, ms per step",
            truth.mean_ms("blocked", row.rank),
            (row.exposed_comm_wait_us + row.exposed_comm_transfer_us) / 1e3,
            SHARE * truth.mean_ms("blocked", row.rank) + OF_STEP * truth.step_ms(),
        )
        for row in summary.time_breakdown
    ]


def now_and_then(summary: Summary, truth: Truth) -> list[Check]:
    """The first of the stragglers is late in some steps, among them those in which something was planted."""
    worst = summary.stragglers[0] if summary.stragglers else None
    struck = truth.struck()
    return [
        Check("pattern", "intermittent", worst.pattern if worst else "nothing"),
        Check("steps", struck, tuple(step for step in struck if worst and step in worst.steps)),
    ]


def bandwidth(summary: Summary, planted_gbps: float) -> list[Check]:
    """The gradients' bus bandwidth, mean over their collectives."""
    rows = [row for row in summary.collectives if row.kind == "all_reduce" and row.busbw_gbps]
    moved = sum(row.count for row in rows)
    reached = sum((row.busbw_gbps or 0.0) * row.count for row in rows) / moved if moved else 0.0
    return [Check("bus bandwidth, MB/s", 1e3 * planted_gbps, 1e3 * reached, 0.1 * 1e3 * planted_gbps)]


def healthy(summary: Summary, truth: Truth) -> list[Check]:
    """No finding that would send anybody looking, and no rank reported to cost more than it does.

    Nothing where the machine's other work made a rank late: whose time that was, the stopwatch cannot tell.
    """
    if not is_calm(truth):
        return []
    serious = [finding.title for finding in summary.findings if finding.severity in ("high", "medium")]
    return [Check(FINDINGS, "none", "; ".join(serious) or "none"), *not_overstated(summary, truth)]


def is_calm(truth: Truth) -> bool:
    """Did the machine leave all ranks alike alone, by the stopwatch?

    To the stopwatch a thread that waits for the others' gradients, but stands in the queue for a core, is at work of
    its own; no trace can tell the two apart. So what was queued may be a rank's cost too.
    """
    ranks = range(len(truth.ranks))
    late = max(truth.lost_ms([rank]) for rank in ranks)
    queued = max(truth.mean_ms("queued", rank) for rank in ranks)
    return late + queued <= CALM * truth.step_ms()


def is_quiet(truth: Truth) -> bool:
    """Did the threads mostly get a core at once? Only then can one see what takes microseconds."""
    ranks = range(len(truth.ranks))
    return sum(truth.mean_ms("queued", rank) for rank in ranks) <= QUIET * sum(
        truth.mean_ms("step", rank) for rank in ranks
    )


def not_overstated(summary: Summary, truth: Truth) -> list[Check]:
    """No rank is reported to cost more than it does."""
    return [
        Check(
            f"rank {row.rank} costs, ms per step",
            truth.lost_ms([row.rank]),
            row.lost_us / 1e3,
            SHARE * truth.lost_ms([row.rank]) + OF_STEP * truth.step_ms(),
            at_most=True,
        )
        for row in summary.stragglers
        if row.scope == "rank"
    ]


def exchanges(summary: Summary, per_step: float) -> list[Check]:
    """All-reduces per step."""
    count = sum(row.count for row in summary.collectives if row.kind == "all_reduce")
    return [Check("all-reduces per step", per_step, count / max(len(summary.job.steps), 1))]


def found(summary: Summary, rule: str) -> list[Check]:
    """A rule has a finding, whatever other rules have."""
    return [Check("among the findings", rule, next((row.rule for row in summary.findings if row.rule == rule), "not"))]


def saved(planted: Truth, fixed: Truth, before: Summary, after: Summary) -> list[Check]:
    """Without the cause, the step is shorter by what exposed communication lost; the machine's other work apart."""
    expected = _undisturbed_ms(planted) - _undisturbed_ms(fixed)
    margin = SHARE * expected + OF_STEP * planted.step_ms()
    return [Check("without the cause, saved, ms per step", expected, _exposed_ms(before) - _exposed_ms(after), margin)]


def first_rule(summary: Summary) -> str:
    """The rule of the finding that can bring most."""
    return summary.findings[0].rule if summary.findings else "none"


def _undisturbed_ms(truth: Truth) -> float:
    ranks = range(len(truth.ranks))
    return sum(truth.mean_ms("step", rank) - truth.mean_ms("queued", rank) for rank in ranks) / len(ranks)


def _exposed_ms(summary: Summary) -> float:
    exposed = [row.exposed_comm_wait_us + row.exposed_comm_transfer_us for row in summary.time_breakdown]
    return sum(exposed) / len(exposed) / 1e3


def _waits(summary: Summary, truth: Truth, straggler: int) -> tuple[float, float]:
    """How much longer the others were blocked than the straggler, on average: by stopwatch and by time breakdown."""
    others = [rank for rank in range(len(truth.ranks)) if rank != straggler]
    exposed = {row.rank: row.exposed_comm_wait_us + row.exposed_comm_transfer_us for row in summary.time_breakdown}
    by_watch = [truth.mean_ms("blocked", rank) - truth.mean_ms("blocked", straggler) for rank in others]
    in_breakdown = [(exposed[rank] - exposed[straggler]) / 1e3 for rank in others]
    return sum(by_watch) / len(others), sum(in_breakdown) / len(others)


def _text(value: Value) -> str:
    if isinstance(value, float):
        return f"{value:.1f}"
    return value if isinstance(value, str) else f"({', '.join(map(str, value))})"
