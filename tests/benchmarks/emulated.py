"""The product on randomly drawn emulated jobs (``tests.emulator``): causes, predictions, the first advice.

    python -m tests.benchmarks.emulated [--seeds 20] [--first 0] [--only 7,12] [--show] [--causes] [--long 30]

Each job is run, recorded and analyzed; then it is run again without each planted cause, with each setting of
``perfscope whatif`` changed, and with the first advice taken. Prints how often the analysis was right, and with
``--show`` a line for each miss with its seed. ``--only`` takes seeds from earlier output; ``--causes`` asks for no
predictions, which is several times as fast. A prediction is compared with the recorded steps, run again with the change
and the same random numbers; with ``--long`` also with the mean of so many steps from their first one on, which holds
what a few steps hold by chance or not at all (waits for a loader that come once in ten steps, pauses, uneven batches).
A cause then has to cost 5 % of those, too.
What the recorded steps hold by chance, they hold before and after the change: so the change itself is compared, too.
"""

from __future__ import annotations

import os
import sys
import traceback
from collections import Counter, defaultdict
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from statistics import median

import click

from perfscope.execution.cache import FOLDER_VARIABLE, OFF
from tests.emulator.draw import draw
from tests.emulator.judge import DUE, Answer, Judged, judge


def _judged(seed: int, predictions: bool, long_run: int) -> Judged | str:
    try:
        return judge(draw(seed), predictions, long_run)
    except Exception:
        return f"seed {seed}: {traceback.format_exc()}"


def report(found: list[Judged]) -> list[str]:
    """Markdown: causes, advice, predictions by setting."""
    due, named, sized = (sum(getattr(one, name) for one in found) for name in ("due", "named", "sized"))
    healthy = [one for one in found if one.healthy]
    advised = Counter(one.advice for one in found)
    answers = [answer for one in found for answer in one.answers]
    return [
        f"{len(found)} jobs",
        f"causes of 5 % and more: {due}, named {_of(named, due)}, cost within 5 % of the step {_of(sized, due)}",
        (
            f"healthy jobs: {len(healthy)}, somebody accused in {sum(one.accused > 0 for one in healthy)}; "
            f"accused without cause in {sum(one.accused > 0 for one in found)} of all"
        ),
        f"first advice right: {_of(advised['right'], advised['right'] + advised['wrong'])}",
        "",
        *_table(answers),
    ]


def _table(answers: list[Answer]) -> list[str]:
    """Predictions by setting, against the recorded steps run again, and against many steps where that was asked for."""
    by_setting: defaultdict[str, list[Answer]] = defaultdict(list)
    for answer in answers:
        by_setting[answer.setting].append(answer)
    many = any(answer.long_run_ns for answer in answers)
    head = ["setting", "asked", "within 5 %", "in range", "median error", "worst error"]
    head += ["of many steps: within 5 %", "in range", "worst error", "the change within 5 %"] if many else []
    head += ["refused", "defects"]
    rows = [*sorted(by_setting.items()), ("all", answers)]
    return [
        f"| {' | '.join(head)} |",
        f"|{'---|' * len(head)}",
        *(f"| {' | '.join(map(str, [name, len(own), *_cells(own, many=many)]))} |" for name, own in rows),
    ]


def _cells(answers: list[Answer], *, many: bool) -> list[str | int]:
    known = [answer for answer in answers if answer.found is not None]
    close, inside, errors = _against(known, [answer.truth_ns for answer in known])
    cells: list[str | int] = [close, inside, f"{median(map(abs, errors)):.1%}" if errors else "", _worst(errors)]
    if many:
        close, inside, errors = _against(known, [each.long_run_ns or each.truth_ns for each in known])
        of_change = sum(abs(each.change_error) <= DUE for each in known)
        cells += [close, inside, _worst(errors), _of(of_change, len(known))]
    return [*cells, len(answers) - len(known), sum("defect" in answer.refused for answer in answers)]


def _against(known: list[Answer], truths_ns: list[float]) -> tuple[str, str, list[float]]:
    """(how many are within 5 % of these truths, how many hold them in their ranges, the errors)."""
    errors = [answer.error_of(truth_ns) for answer, truth_ns in zip(known, truths_ns, strict=True)]
    inside = sum(answer.holds(truth_ns) for answer, truth_ns in zip(known, truths_ns, strict=True))
    return _of(sum(abs(error) <= DUE for error in errors), len(errors)), _of(inside, len(errors)), errors


def _worst(errors: list[float]) -> str:
    return f"{max(errors, key=abs):+.1%}" if errors else ""


def _of(part: int, whole: int) -> str:
    return f"{part} of {whole} ({part / whole:.0%})" if whole else ""


def classes(found: Iterable[Judged]) -> list[str]:
    """The classes of misses with their seeds, the largest first."""
    by_kind: defaultdict[str, list[int]] = defaultdict(list)
    for one in found:
        for miss in one.misses:
            by_kind[miss.kind].append(one.drawn.seed)
    ordered = sorted(by_kind.items(), key=lambda item: -len(item[1]))
    return [f"{len(seeds):4} {kind}: {' '.join(map(str, seeds))}" for kind, seeds in ordered]


@click.command()
@click.option("--seeds", default=20, show_default=True, help="How many.")
@click.option("--first", default=0, show_default=True, help="The first of them.")
@click.option("--only", default="", help="These seeds, with commas.")
@click.option("--show", is_flag=True, help="Each job, and a line for each of its misses.")
@click.option("--causes", is_flag=True, help="Causes and advice alone, without predictions.")
@click.option("--long", "long_run", default=0, help="Compare with the mean of so many steps, too.")
@click.option("--processes", default=1, show_default=True)
def main(seeds: int, first: int, only: str, show: bool, causes: bool, long_run: int, processes: int) -> None:
    """Print how often the analysis is right."""
    os.environ[FOLDER_VARIABLE] = OFF
    chosen = [int(seed) for seed in only.split(",")] if only else list(range(first, first + seeds))
    found = []
    with ProcessPoolExecutor(processes) as pool:
        for one in pool.map(partial(_judged, predictions=not causes, long_run=long_run), chosen):
            if isinstance(one, str):
                click.echo(one)
                continue
            found.append(one)
            for line in [str(one.drawn), *(f"    {miss.kind}: {miss.words}" for miss in one.misses)] if show else ():
                click.echo(line)
            sys.stdout.flush()
            print(f"\r{len(found)} of {len(chosen)} jobs", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    click.echo("\n".join([*report(found), "", *classes(found)]))


if __name__ == "__main__":
    main()
