"""What is planted in real trainings, and what the analysis must report of each.

Figures are compared with the script's own stopwatch over the same steps, so that what else the machine did in them is
in both. What is planted is large beside that: 300 ms and more in steps of 60 to 100.
"""

from __future__ import annotations

import os
from functools import partial
from typing import Final

from perfscope.results.summary import Summary
from tests.real import checks, network
from tests.real.checks import Check
from tests.real.jobs import Case, Job, Judge
from tests.real.truth import Truth

MEGABITS: Final = 500
"""Of the slow link, per second."""
MICRO_BATCHES: Final = 4
BLOCKS: Final = 20
"""Of two layers each, in a network of many small layers."""
THREADS_PER_RANK: Final = 4 * (os.cpu_count() or 1)


def _all(*judges: Judge) -> Judge:
    return lambda summary, truth: [check for judge in judges for check in judge(summary, truth)]


def _named(name: str) -> Judge:
    return lambda summary, truth: checks.named(summary, truth, 0, name)


def _first(rule: str) -> Judge:
    return lambda summary, truth: [Check("first finding", rule, checks.first_rule(summary))]


def _largest(category: str) -> Judge:
    return lambda summary, truth: checks.largest_category(summary, category)


def _late(rank: int, cause: str, rule: str = "straggling-rank") -> Judge:
    return partial(checks.lost, rank=rank, cause=cause, rule=rule)


def _turns(cause: str) -> Judge:
    return partial(checks.taking_turns, cause=cause)


def _exchanges(per_step: int) -> Judge:
    return lambda summary, truth: checks.exchanges(summary, float(per_step))


def _found(rule: str) -> Judge:
    return lambda summary, truth: checks.found(summary, rule)


def _found_when_quiet(rule: str) -> Judge:
    return lambda summary, truth: checks.found(summary, rule) if checks.is_quiet(truth) else []


def _link(summary: Summary, truth: Truth) -> list[Check]:
    """The link passes what it was set to, all waiting is in the time breakdown, and no rank is a straggler for it."""
    gbps = network.busbw_gbps(MEGABITS, len(truth.ranks))
    return [
        *checks.bandwidth(summary, gbps),
        *checks.communicating(summary, truth),
        *checks.not_overstated(summary, truth),
    ]


HEALTHY = Case("nothing", (), checks.healthy)
LOAD_ALL = Case(
    "the data set sleeps on all ranks",
    ("load:300:all:1",),
    _all(_largest("idle_dataloader"), checks.loading, _first("dataloader-workers"), checks.not_overstated),
)
LOAD_ONE = Case("the data set sleeps on one rank", ("load:300:1:1",), _all(_late(1, "dataloader"), checks.loading))
LOAD_NOW_AND_THEN = Case(
    "the data set sleeps on one rank, now and then",
    ("load:600:1:3",),
    _all(_late(1, "dataloader"), checks.now_and_then),
)
SLEEP = Case("one rank sleeps in its forward", ("forward:300:1:1",), _late(1, "host"))
PRODUCTS = Case("one rank computes more products", ("products:30:1:1",), _late(1, "compute"))
COLLECT = Case(
    "one rank collects garbage",
    ("collect:600:0:1",),
    _all(_late(0, "host", "garbage-collection"), _named("garbage collection")),
)
SAVE = Case("rank 0 saves", ("save:300:0:1",), _all(_late(0, "host"), _named("checkpoint")))
SLEEP_IN_TURN = Case("ranks sleep in turn", ("forward:400:turns:1",), _turns("host"))
COLLECT_IN_TURN = Case("ranks collect garbage in turn", ("collect:800:turns:1",), _turns("host"))

PAIR = Job("pair", 2, (HEALTHY, LOAD_ALL, HEALTHY, SLEEP, HEALTHY, COLLECT))
"""What is planted comes in turn with nothing."""
SECOND_PAIR = Job("second pair", 2, (PRODUCTS, HEALTHY, LOAD_ONE, HEALTHY, SAVE, HEALTHY, LOAD_NOW_AND_THEN))
TRIO = Job("trio", 3, (LOAD_NOW_AND_THEN, COLLECT_IN_TURN, SLEEP, PRODUCTS, SLEEP_IN_TURN))

NO_SYNC = Job(
    "accumulation with no_sync",
    2,
    (Case("gradients are exchanged once per step, slow link", (), _all(_exchanges(1), _link)),),
    arguments=(f"--accumulate={MICRO_BATCHES}", "--batch=128", "--no-sync"),
    prefix=network.throttled(MEGABITS),
    environment=network.GLOO,
)
ACCUMULATION = Job(
    "accumulation",
    2,
    (
        Case(
            "gradients are exchanged after every micro-batch, slow link",
            (),
            _all(_largest("exposed_comm_transfer"), _exchanges(MICRO_BATCHES), _link),
        ),
    ),
    arguments=(f"--accumulate={MICRO_BATCHES}", "--batch=128"),
    prefix=network.throttled(MEGABITS),
    environment=network.GLOO,
    fixed=NO_SYNC,
)
SLOW_LINK = Job(
    "slow link",
    2,
    (Case("slow link", (), _all(_largest("exposed_comm_transfer"), _exchanges(1), _link)),),
    arguments=("--batch=128",),
    prefix=network.throttled(MEGABITS),
    environment=network.GLOO,
)
SMALL_BUCKETS = Job(
    "small buckets",
    2,
    (Case("a bucket for every layer", (), _all(_exchanges(2 * BLOCKS), _found_when_quiet("ddp-bucket-size"))),),
    arguments=(f"--blocks={BLOCKS}", "--width=128", "--batch=128", "--bucket-mb=0.01"),
)
THREADS = Job(
    "threads",
    2,
    (Case(f"{THREADS_PER_RANK} threads per rank", (), _found("cpu-oversubscription")),),
    arguments=(f"--threads={THREADS_PER_RANK}",),
    environment={"OMP_NUM_THREADS": str(THREADS_PER_RANK)},
    options=("--sample-every", "0.1"),
)

JOBS: Final = (PAIR, SECOND_PAIR, TRIO, SLOW_LINK, ACCUMULATION, SMALL_BUCKETS, THREADS)
"""All of them; those that fix another come with it."""
