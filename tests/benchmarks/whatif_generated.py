"""What-ifs on random generated jobs against the truth: the changed job, simulated.

    python -m tests.benchmarks.whatif_generated [--seeds 10] [--only ddp] [--worst 10]

Each seed draws a job for every setting (2 to 16 ranks; size of the model, bandwidth, latency, noise, strategy), records
it, asks, and simulates the job with the change. Prints a table by setting, and the worst answers.
"""

from __future__ import annotations

import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import click

from perfscope.analyzers.whatif.change import CannotReplay, Context
from perfscope.analyzers.whatif.predict import WhatIfAnswer, predict
from perfscope.analyzers.whatif.whatif import context_of
from tests.benchmarks.whatif_questions import Question, Trained, questions
from tests.generator import JobSpec, simulate

GOOD = 0.05
"""Error that a prediction may have (docs/whatif.md)."""


@dataclass(frozen=True)
class Answer:
    """A prediction and the truth, ns; ``refused`` is why there is no prediction."""

    seed: int
    question: Question
    found: WhatIfAnswer | None
    truth_ns: float
    refused: str = ""

    @property
    def setting(self) -> str:
        """Its name, the rank's number apart."""
        name = next(iter(self.question.settings))
        return "rank.N" if name.startswith("rank.") else name

    @property
    def error(self) -> float:
        """Relative, of the predicted step time."""
        return 0.0 if self.found is None else self.found.mid_ns / self.truth_ns - 1

    @property
    def inside(self) -> bool:
        """Does the truth lie between low and high (but for a thousandth)?"""
        found = self.found
        return found is None or found.low_ns * 0.999 <= self.truth_ns <= found.high_ns * 1.001


def answers(seeds: range, only: str = "") -> Iterator[Answer]:
    """Every question of every seed, answered; those whose setting's name holds ``only``."""
    for seed in seeds:
        recordings: dict[int, Context] = {}
        recorded: list[Trained] = []
        for question in questions(seed):
            if only not in next(iter(question.settings)):
                continue
            known = next((number for number, other in enumerate(recorded) if other == question.recorded), None)
            if known is None:
                recorded.append(question.recorded)
                recordings[known := len(recorded) - 1] = record(question.recorded)
            yield answer(seed, recordings[known], question)


def record(trained: Trained) -> Context:
    """The job's recording, read."""
    with tempfile.TemporaryDirectory() as folder:
        with trained.patched():
            simulate(trained.spec).write(Path(folder))
        return context_of(folder)


def answer(seed: int, recording: Context, question: Question) -> Answer:
    """Predict, then make the change."""
    changed = question.changed
    with changed.patched():
        truth = simulate(changed.spec).truth.step_time_ns / changed.batches
    try:
        return Answer(seed, question, predict(recording, question.settings), truth)
    except CannotReplay as reason:
        return Answer(seed, question, None, truth, str(reason))


def table(found: list[Answer]) -> list[str]:
    """Markdown: a row for each setting. Where a latency had to be assumed the middle is a guess: counted apart."""
    rows = [
        "| setting | requested | within 5 % | median error | worst error | assumed: within 5 % | in range | refused |",
        "|---|---|---|---|---|---|---|---|",
    ]
    by_setting: defaultdict[str, list[Answer]] = defaultdict(list)
    for one in found:
        by_setting[one.setting].append(one)
    return rows + [_row(setting, of_setting) for setting, of_setting in sorted(by_setting.items())]


def _row(setting: str, asked: list[Answer]) -> str:
    replayed = [one for one in asked if one.found is not None]
    assumed = [one for one in replayed if one.found is not None and one.found.assumed]
    known = [one.error for one in replayed if one not in assumed]
    cells = [
        f"`{setting}`",
        str(len(asked)),
        _of(sum(abs(error) <= GOOD for error in known), len(known)),
        f"{median(map(abs, known)):.1%}" if known else "",
        f"{max(known, key=abs):+.1%}" if known else "",
        _of(sum(abs(one.error) <= GOOD for one in assumed), len(assumed)),
        _of(sum(one.inside for one in replayed), len(replayed)),
        str(len(asked) - len(replayed) or ""),
    ]
    return f"| {' | '.join(cells)} |"


def _of(part: int, whole: int) -> str:
    return f"{part} of {whole}" if whole else ""


def describe(one: Answer) -> str:
    """A line about one answer and its job."""
    asked = " ".join(f"{name}={value}" for name, value in one.question.settings.items())
    if one.found is None:
        return f"seed {one.seed} {asked}: refused: {one.refused}; {_described(one.question.recorded.spec)}"
    found = one.found
    remarks = f"{'' if one.inside else ', outside'}{', assumed' if found.assumed else ''}"
    return (
        f"seed {one.seed} {asked}: {found.measured_ns / 1e6:.2f} -> {found.low_ns / 1e6:.2f} .. "
        f"{found.mid_ns / 1e6:.2f} .. {found.high_ns / 1e6:.2f} ms, truth {one.truth_ns / 1e6:.2f} ({one.error:+.1%}"
        f"{remarks}); {_described(one.question.recorded.spec)}"
    )


def _described(spec: JobSpec) -> str:
    model, network = spec.model, spec.network
    shape = f"{spec.ranks} ranks, {spec.backend} {spec.strategy}"
    if spec.pipeline > 1 or spec.tensor > 1:
        shape += f" {spec.schedule.schedule} pp{spec.pipeline} tp{spec.tensor}"
    return (
        f"{shape}, {spec.microbatches} micro-batches, {model.layers} layers {model.width}x{model.hidden}, "
        f"{model.tokens} tokens, {network.busbw_gbps:.0f} GB/s {network.alpha_ns / 1e3:.0f} us, noise {spec.noise}"
        f"{', end sync' if spec.end_sync else ''} {spec.causes or ''}"
    )


@click.command()
@click.option("--seeds", type=int, default=10, show_default=True, help="How many seeds.")
@click.option("--first", type=int, default=0, show_default=True, help="The first of them.")
@click.option("--only", default="", help="Only settings whose name contains this.")
@click.option("--worst", type=int, default=10, show_default=True, help="How many of the worst answers to list.")
def main(seeds: int, first: int, only: str, worst: int) -> None:
    """Print the table, and the answers that are off or refused."""
    found = []
    for one in answers(range(first, first + seeds), only):
        found.append(one)
        print(f"\r{len(found)} answers, seed {one.seed}", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    print("\n".join(table(found)))
    off = [one for one in found if one.found is None or abs(one.error) > GOOD or not one.inside]
    print(f"\n{len(found)} asked, {len(off)} off or refused\n")
    for one in sorted(off, key=lambda one: (one.inside, -abs(one.error)))[:worst]:
        print(f"- {describe(one)}")


if __name__ == "__main__":
    main()
