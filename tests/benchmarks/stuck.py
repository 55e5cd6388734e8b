"""Random jobs that stand still (``tests.stuck``), analyzed as a user would: ranks and groups that are named wrongly.

python -m tests.benchmarks.stuck [--first 0] [--seeds 200] [--only FSDP] [--show]
"""

from __future__ import annotations

import os
import tempfile
from collections import Counter
from collections.abc import Collection
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import click

from perfscope import analyze
from perfscope.execution.cache import FOLDER_VARIABLE, OFF
from perfscope.results.hang import Hang
from tests.stuck.jobs import StuckJob, stuck_job
from tests.stuck.resiliency import KINDS, Injected, inject
from tests.stuck.twins import twins


@dataclass(frozen=True)
class Judged:
    """One job: what is wrong, empty where nothing is."""

    seed: int
    words: str
    only_slow: bool
    wrong: tuple[str, ...]
    detail: str = ""
    untold: bool = False
    """No rank is named, and a fault of another one would have left the same dumps."""


def judge(seed: int) -> Judged:
    """Analyze the dumps of a seed's job and compare with the truth."""
    job = stuck_job(seed)
    hang = _analyzed(job)
    if not job.roots:
        accused = hang.missing_ranks if hang is not None else ()
        return Judged(seed, str(job), True, ("accused in vain",) if accused else (), f"{accused}")
    if hang is None:
        return Judged(seed, str(job), False, ("no hang",))
    named = frozenset(hang.missing_ranks)
    right = job.roots <= named <= job.roots | job.optional
    untold = not named and _has_twin(job, job.without_dump)
    wrong = ["ranks" if named else "no rank"] if not right and not untold else []
    if hang.group not in job.groups and not untold:
        wrong.append("group")
    return Judged(seed, str(job), False, tuple(wrong), _detail(hang, job.roots, job.groups), untold)


def judge_injected(seed: int) -> Judged:
    """The same for a job as NVIDIA's tests of resiliency break them; each seed has another kind of fault."""
    kinds = sorted(KINDS)
    job = inject(seed // len(kinds), kinds[seed % len(kinds)])
    hang = _analyzed(job)
    if hang is None:
        return Judged(seed, str(job), False, ("no hang",))
    named = frozenset(hang.missing_ranks)
    untold = not named and _has_twin(job, ())
    wrong = () if named == job.ranks or untold else ("ranks" if named else "no rank",)
    return Judged(seed, str(job), False, wrong, _detail(hang, job.ranks, ()), untold)


def _analyzed(job: StuckJob | Injected) -> Hang | None:
    with tempfile.TemporaryDirectory() as name:
        job.write(Path(name))
        return analyze(Path(name)).hang


def _has_twin(job: StuckJob | Injected, without_dump: Collection[int]) -> bool:
    return all(twins(job.healthy, job.machine, job.faults, fault, job.recorder, without_dump) for fault in job.faults)


def _detail(hang: Hang, ranks: Collection[int], groups: Collection[str]) -> str:
    return (
        f"named {hang.missing_ranks} in {hang.group} ({hang.collective} {hang.sequence}), {hang.confidence}: "
        f"{hang.reason}; truth {sorted(ranks)} in {sorted(groups)}"
    )


@click.command()
@click.option("--first", default=0, show_default=True)
@click.option("--seeds", default=200, show_default=True, help="How many jobs.")
@click.option("--only", default="", help="Only jobs of which the description contains this.")
@click.option("--show", is_flag=True, help="Print every job that is judged wrongly.")
@click.option("--injected", is_flag=True, help="Jobs as NVIDIA's tests of resiliency break them.")
@click.option("--processes", default=min(2, os.cpu_count() or 1), show_default=True)
def main(first: int, seeds: int, only: str, show: bool, injected: bool, processes: int) -> None:
    """Print what is wrong, job by job, then the shares that are right."""
    os.environ[FOLDER_VARIABLE] = OFF
    chosen = [seed for seed in range(first, first + seeds) if injected or not only or only in str(stuck_job(seed))]
    with ProcessPoolExecutor(processes) as pool:
        judged = list(pool.map(judge_injected if injected else judge, chosen))
    for each in judged:
        if each.wrong and show:
            click.echo(f"{', '.join(each.wrong)}: {each.words}\n    {each.detail}")
    counts = Counter(wrong for each in judged for wrong in each.wrong)
    stuck = [each for each in judged if not each.only_slow]
    roots_wrong = sum(bool({"ranks", "no rank", "no hang"} & set(each.wrong)) for each in stuck)
    groups_wrong = sum(bool({"group", "no hang"} & set(each.wrong)) for each in stuck)
    click.echo(", ".join(f"{count} {wrong}" for wrong, count in counts.most_common()) or "nothing wrong")
    click.echo(
        f"{len(stuck)} stuck: ranks right in {len(stuck) - roots_wrong}, group right in {len(stuck) - groups_wrong} "
        f"(none named in {sum(each.untold for each in stuck)}, where another rank's fault leaves the same dumps); "
        f"{len(judged) - len(stuck)} only slow: {counts['accused in vain']} accused in vain"
    )


if __name__ == "__main__":
    main()
