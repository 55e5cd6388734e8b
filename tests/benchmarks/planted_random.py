"""Random jobs with random causes (``tests.planted.draw``), analyzed as a user would: errors by category and seed.

python -m tests.benchmarks.planted_random [--seeds 0:300] [--only hsdp] [--advice]

With ``--advice`` the first advice on each job is taken, which takes several times as long: it must bring what it
promises, and be about as good as the best single change.
"""

from __future__ import annotations

import functools
import os
from collections import defaultdict
from concurrent.futures import ProcessPoolExecutor

import click

from perfscope.execution.cache import FOLDER_VARIABLE, OFF
from tests.planted.draw import draw
from tests.planted.judge import judge_seed


@click.command()
@click.option("--seeds", default="0:300", show_default=True, help="FIRST:END, or seeds with commas.")
@click.option("--only", default="", help="Only jobs of which the description contains this.")
@click.option("--advice", is_flag=True, help="Take the first advice on each job.")
@click.option("--processes", default=min(2, os.cpu_count() or 1), show_default=True)
def main(seeds: str, only: str, advice: bool, processes: int) -> None:
    """Print what is wrong, job by job, then the categories."""
    os.environ[FOLDER_VARIABLE] = OFF
    first, _, end = seeds.partition(":")
    chosen = range(int(first), int(end)) if end else [int(seed) for seed in seeds.split(",")]
    wrong: dict[str, list[int]] = defaultdict(list)
    judged = due = advised = right = 0
    judges = functools.partial(judge_seed, advice=advice)
    with ProcessPoolExecutor(processes) as pool:
        for result in pool.map(judges, [seed for seed in chosen if not only or only in str(draw(seed))]):
            judged, due = judged + 1, due + result.due
            for category, words in result.wrong:
                wrong[category].append(result.drawn.seed)
                click.echo(f"{category}: {words}\n    {result.drawn}")
            if result.advice is not None:
                advised, right = advised + 1, right + (result.advice.wrong is None)
            if result.advice is not None and result.advice.wrong is not None:
                click.echo(f"{': '.join(result.advice.wrong)}\n    {result.drawn}")
    for category, where in sorted(wrong.items(), key=lambda item: -len(item[1])):
        click.echo(f"{len(where):4} {category}: {' '.join(map(str, where))}")
    bad = {seed for where in wrong.values() for seed in where}
    click.echo(f"{judged - len(bad)} of {judged} jobs right; {due} causes were due")
    if advice:
        click.echo(f"first advice right in {right} of {advised} jobs")


if __name__ == "__main__":
    main()
