"""The random what-ifs: what is asked, and how answers are counted."""

from __future__ import annotations

import fnmatch
from dataclasses import replace

from perfscope.analyzers.whatif.predict import SETTINGS, WhatIfAnswer
from tests.benchmarks.whatif_generated import Answer, describe, table
from tests.benchmarks.whatif_questions import Question, questions

NOT_ASKED = {
    "host.gc",
    "network.slow_steps",
    "env.OMP_NUM_THREADS",
    "gradients.reduce",
    "optimizer.loops",
    "loop.collectives",
    "batch_norm.sync",
    "loop.operators",
    "ddp.broadcast_buffers",
    "ddp.find_unused_parameters",
    "fsdp.backward_prefetch",
    "fsdp.reduce_dtype",
}
"""The generator collects no garbage, its operators have no threads, neither its optimizer nor its loop goes through
parameters one by one; it reduces no gradients by hand, nothing in its loop or layers, sends no buffers and prefetches
in no backward alone (the emulator has these but for such a loop)."""


def predicted(question: Question, *, off: float, assumed: bool = False, spread: float = 0.1) -> Answer:
    """An answer ``off`` by that share of a truth of 100 ms."""
    mid = 100e6 * (1 + off)
    notes = ("a latency",) if assumed else ()
    found = WhatIfAnswer(question.settings, 120e6, 120e6, mid * (1 - spread), mid, mid * (1 + spread), 0.0, notes)
    return Answer(0, question, found, 100e6)


def test_every_setting_is_asked_about() -> None:
    asked = [name for question in questions(3) for name in question.settings]
    known = {setting.name for setting in SETTINGS}
    assert {name for name in known if fnmatch.filter(asked, name)} == known - NOT_ASKED


def test_a_seed_is_a_set_of_questions() -> None:
    assert list(questions(5)) == list(questions(5))
    assert list(questions(5)) != list(questions(6))


def test_what_was_assumed_counts_apart() -> None:
    question = next(one for one in questions(0) if "ddp.no_sync" in one.settings)
    refused = Answer(0, question, None, 100e6, "why")
    known = [predicted(question, off=0.01), predicted(question, off=-0.08)]
    rows = table([*known, predicted(question, off=0.2, assumed=True), refused])
    assert rows[-1] == "| `ddp.no_sync` | 4 | 1 of 2 | 4.5% | -8.0% | 0 of 1 | 2 of 3 | 1 |"
    assert "refused: why" in describe(refused)
    assert "(+20.0%, outside, assumed)" in describe(predicted(question, off=0.2, assumed=True))
    seeded = replace(predicted(question, off=0.0), seed=7)
    assert describe(seeded).startswith("seed 7 ddp.no_sync=true: 120.00 -> 90.00 .. 100.00 .. 110.00 ms, truth 100.00")
