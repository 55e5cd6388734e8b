"""Random jobs that stand still (``tests.stuck``), analyzed as a user would: ranks and groups that are named wrongly.

python -m tests.benchmarks.stuck [--first 0] [--seeds 200] [--only FSDP] [--show]
"""

from __future__ import annotations

import os
import tempfile
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import click

from perfscope import analyze
from perfscope.execution.cache import FOLDER_VARIABLE, OFF
from tests.stuck.jobs import StuckJob, stuck_job


@dataclass(frozen=True)
class Judged:
    """One job: what is wrong, empty where nothing is."""

    seed: int
    words: str
    only_slow: bool
    wrong: tuple[str, ...]
    detail: str = ""


def judge(seed: int) -> Judged:
    """Analyze the dumps of a seed's job and compare with the truth."""
    job = stuck_job(seed)
    with tempfile.TemporaryDirectory() as name:
        job.write(Path(name))
        hang = analyze(Path(name)).hang
    if not job.roots:
        accused = hang.missing_ranks if hang is not None else ()
        return Judged(seed, str(job), True, ("accused in vain",) if accused else (), f"{accused}")
    if hang is None:
        return Judged(seed, str(job), False, ("no hang",))
    wrong = []
    if not _right_ranks(job, frozenset(hang.missing_ranks)):
        wrong.append("ranks" if hang.missing_ranks else "no rank")
    if hang.group not in job.groups:
        wrong.append("group")
    detail = (
        f"named {hang.missing_ranks} in {hang.group} ({hang.collective} {hang.sequence}), {hang.confidence}: "
        f"{hang.reason}; truth {sorted(job.roots)} in {sorted(job.groups)}"
    )
    return Judged(seed, str(job), False, tuple(wrong), detail)


def _right_ranks(job: StuckJob, named: frozenset[int]) -> bool:
    return job.roots <= named <= job.roots | job.optional


@click.command()
@click.option("--first", default=0, show_default=True)
@click.option("--seeds", default=200, show_default=True, help="How many jobs.")
@click.option("--only", default="", help="Only jobs of which the description contains this.")
@click.option("--show", is_flag=True, help="Print every job that is judged wrongly.")
@click.option("--processes", default=min(2, os.cpu_count() or 1), show_default=True)
def main(first: int, seeds: int, only: str, show: bool, processes: int) -> None:
    """Print what is wrong, job by job, then the shares that are right."""
    os.environ[FOLDER_VARIABLE] = OFF
    chosen = [seed for seed in range(first, first + seeds) if not only or only in str(stuck_job(seed))]
    with ProcessPoolExecutor(processes) as pool:
        judged = list(pool.map(judge, chosen))
    for each in judged:
        if each.wrong and show:
            click.echo(f"{', '.join(each.wrong)}: {each.words}\n    {each.detail}")
    counts = Counter(wrong for each in judged for wrong in each.wrong)
    stuck = [each for each in judged if not each.only_slow]
    roots_wrong = sum(bool({"ranks", "no rank", "no hang"} & set(each.wrong)) for each in stuck)
    groups_wrong = sum(bool({"group", "no hang"} & set(each.wrong)) for each in stuck)
    click.echo(", ".join(f"{count} {wrong}" for wrong, count in counts.most_common()) or "nothing wrong")
    click.echo(
        f"{len(stuck)} stuck: ranks right in {len(stuck) - roots_wrong}, group right in {len(stuck) - groups_wrong}; "
        f"{len(judged) - len(stuck)} only slow: {counts['accused in vain']} accused in vain"
    )


if __name__ == "__main__":
    main()
