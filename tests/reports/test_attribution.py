"""Whoever one place of a page names is not contradicted in another, and shares of one thing have one denominator."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from perfscope.reports import terminal
from perfscope.reports.figures.timeline import first_shown
from perfscope.reports.page import breakdown, charts, evidence
from perfscope.results.attribution import attributed_ranks
from perfscope.results.rows import StragglerRow
from perfscope.results.summary import Summary
from perfscope.results.time_breakdown import shares
from tests.analyzers.measured import advised
from tests.generator import MS, HostSync, JobSpec, Pause, RotatingPause, SlowCompute, SlowHost, SlowLoader, simulate
from tests.planted.jobs import data_parallel, pipeline

pytestmark = pytest.mark.scale

ROOT = Path(__file__).parents[2]
SHARED = ROOT.parent / "shared" / "traces"
DDP = replace(data_parallel(8, "ddp"), ranks_per_host=4)

IN_TURN = RotatingPause(pause_ns=3 * MS, steps=tuple(range(11, 18)), every=1)

GENERATED: dict[str, JobSpec] = {
    "healthy": DDP,
    "slow rank": replace(DDP, causes=(SlowCompute(ranks=(3,), factor=1.4),)),
    "two that hide each other": replace(
        DDP, causes=(SlowCompute(ranks=(2,), factor=1.6), SlowHost(ranks=(5,), factor=20))
    ),
    "slow host": replace(DDP, causes=(SlowCompute(ranks=(4, 5, 6, 7), factor=1.3),)),
    "pauses in turn": replace(DDP, steps=8, causes=(IN_TURN,)),
    "pause on one rank, all launch slowly": replace(
        DDP, causes=(SlowHost(factor=14), Pause(ranks=(1,), pause_ns=4 * MS))
    ),
    "slow loader": replace(DDP, causes=(SlowLoader(ranks=(6,), load_ns=14 * MS),)),
    "all synchronize": replace(DDP, causes=(HostSync(),)),
    "all pause": replace(DDP, causes=(Pause(pause_ns=2 * MS),)),
    "ranks begin apart": replace(DDP, steps=1, start_skew_ns={rank: rank * MS for rank in range(8)}),
    "slow stage": replace(pipeline(8), causes=(SlowCompute(ranks=(2, 3), factor=1.4),)),
    "fsdp": replace(data_parallel(4, "fsdp"), causes=(SlowCompute(ranks=(0,), factor=1.3),)),
}

RANKS = r"[Rr]anks? (?P<ranks>[0-9][0-9, -]*)"
BLAMED = tuple(
    re.compile(pattern)
    for pattern in (rf"wait for [^.;:]*?{RANKS}", rf"{RANKS}\)? (?:is a|are) straggler", rf"{RANKS}[^.;:]* costs? most")
)
"""Ranks in a sentence that says that somebody waits for them, or that they are stragglers."""


def samples() -> dict[str, Callable[[Path], Summary]]:
    made: dict[str, Callable[[Path], Summary]] = {}
    for folder in sorted(path for path in (ROOT / "sample_traces").iterdir() if path.is_dir()):
        made[f"sample {folder.name}"] = lambda _, folder=folder: advised(folder)  # type: ignore[misc]
    for name, spec in GENERATED.items():

        def generated(folder: Path, spec: JobSpec = spec) -> Summary:
            simulate(spec).write(folder)
            return advised(folder)

        made[name] = generated
    for folder in sorted(SHARED.iterdir()) if SHARED.is_dir() else ():
        if folder.is_dir() and folder.name not in ("flight_recorder", "quirks"):
            made[f"shared {folder.name}"] = lambda _, folder=folder: advised(folder)  # type: ignore[misc]
    return made


SAMPLES = samples()


@pytest.fixture(scope="module", params=list(SAMPLES))
def summary(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Summary:
    return SAMPLES[request.param](tmp_path_factory.mktemp("job"))


def numbers(text: str) -> set[int]:
    found: set[int] = set()
    for part in re.findall(r"\d+(?:-\d+)?", text):
        first, _, last = part.partition("-")
        found.update(range(int(first), int(last or first) + 1))
    return found


def blamed(text: str) -> set[int]:
    return {rank for pattern in BLAMED for match in pattern.finditer(text) for rank in numbers(match["ranks"])}


def places(summary: Summary) -> dict[str, str]:
    """Every sentence of a page about where the time went."""
    said = {
        "headline": summary.verdict.headline,
        "caption of the time breakdown": breakdown.breakdown_reading(summary),
        "caption of one step": charts.strips_reading(summary),
        "caption of the critical path": charts.path_reading(summary),
        "terminal": terminal.verdict(summary).split("\n1. ")[0],
    }
    if summary.stragglers:
        table = evidence.stragglers_table(summary.stragglers, summary.job.step_time_us)
        said["caption of the stragglers"] = table.reading
    return said


def everyone(rows: tuple[StragglerRow, ...]) -> set[int]:
    return {rank for row in rows for rank in (row.rank, *row.ranks)}


def test_whoever_the_others_wait_for_is_a_straggler_in_every_place(summary: Summary) -> None:
    stragglers = everyone(summary.stragglers)
    for place, text in places(summary).items():
        assert blamed(text) <= stragglers, (place, text)
    for finding in summary.findings:
        assert blamed(finding.title) <= stragglers, finding.title


def test_the_places_that_name_somebody_agree(summary: Summary) -> None:
    """Each names the costliest straggler, or nobody."""
    if not summary.stragglers:
        return
    worst = {summary.stragglers[0].rank, *summary.stragglers[0].ranks}
    for place, text in places(summary).items():
        named = blamed(text)
        if named and place not in ("headline", "terminal"):  # An action about another one may be worth more.
            assert named & worst, (place, text)


def test_the_critical_path_passes_through_a_straggler_that_costs_much(summary: Summary) -> None:
    for row in summary.stragglers:
        if row.lost_us >= 0.1 * summary.job.step_time_us and summary.critical_path:
            assert {row.rank, *row.ranks} & {part.rank for part in summary.critical_path}


def test_the_sentences_about_generated_jobs_name_those_who_were_slowed(summary: Summary) -> None:
    """The patterns above find somebody where a sentence names somebody."""
    if summary.stragglers and summary.findings and summary.findings[0].rule == "straggling-rank":
        assert blamed(summary.verdict.headline) == everyone(summary.stragglers[:1])
        assert blamed(places(summary)["caption of the stragglers"]) == everyone(summary.stragglers[:1])


def test_the_ranks_shown_first_are_those_that_are_named(summary: Summary) -> None:
    recorded = {lane.rank for lane in summary.lanes}
    first = [rank for rank in attributed_ranks(summary.stragglers) if rank in recorded][:2]
    assert set(first) <= first_shown(summary)
    strips = {strip.rank for strip in charts.shown_strips(summary)}
    assert not strips or {row.rank for row in summary.stragglers[:2]} <= strips


def test_nobody_who_did_not_delay_the_job_has_host_time_on_the_path(summary: Summary) -> None:
    """Host time on the path beyond what the rank's own time breakdown has: it would be the skew of the beginning."""
    host = {row.rank: row.idle_host_us * max(len(summary.job.steps), 1) for row in summary.time_breakdown}
    for row in summary.critical_path or ():
        if row.category == "idle_host":
            assert row.us <= host[row.rank] + 0.01 * summary.job.step_time_us, row


def test_shares_of_one_category_agree_or_say_of_what(summary: Summary) -> None:
    """A category in a title is a share of all ranks' time, as in the bar, or the title says of what else."""
    taken = shares(summary.time_breakdown) if summary.time_breakdown else {}
    for rule, category in (("launch-bound", "idle_launch"), ("host-syncs", "idle_sync"), ("host-pauses", "idle_host")):
        title = next((finding.title for finding in summary.findings if finding.rule == rule), None)
        if title is None or "pageable" in title or " of rank" in title or "a step takes" in title:
            continue  # of some ranks, of some copies, or what a replay saves: not the category's
        share = int(re.search(r"(\d+)% of the (?:step|recording)", title)[1]) / 100  # type: ignore[index]
        assert abs(share - taken[category]) < 0.03 or "median rank" in title, title
