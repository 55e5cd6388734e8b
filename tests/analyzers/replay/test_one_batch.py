"""Ranks that load longer in a recording of one step: one batch each says who was late, not who is slow."""

from __future__ import annotations

from pathlib import Path

import pytest

from perfscope.results.rows import StragglerRow
from tests.analyzers.measured import measured
from tests.emulator.emulate import emulate
from tests.emulator.spec import MS, Cause, Job, Loader, Model, Recording


def stragglers(took: tuple[float, ...], steps: int, folder: Path) -> tuple[StragglerRow, ...]:
    """Of a job whose ranks load each batch themselves, for so many times 4 ms, and read the loss of each."""
    causes = tuple(Cause("slow loader", times, (rank,)) for rank, times in enumerate(took))
    loader = Loader(workers=0, load_ns=4 * MS, jitter=0.0)
    job = Job(
        ranks=len(took), ranks_per_host=8, item_every=1, noise=0.0, model=Model(blocks=2), loader=loader,
        recording=Recording(steps=steps), causes=causes,
    )  # fmt: skip
    emulate(job).write(folder)
    return measured(folder).stragglers


@pytest.mark.parametrize(
    ("took", "named"),
    [
        pytest.param((1.0, 1.02, 1.04, 1.01, 1.03, 2.0), {5}, id="one far above the others"),
        pytest.param((1.0, 1.2, 1.4, 1.6, 1.8, 2.0), set(), id="evenly spread"),
        pytest.param((1.0, 1.02, 1.04, 1.01, 2.0, 1.9), {4, 5}, id="two far above the others"),
        pytest.param((1.0, 1.2, 1.4, 1.6, 2.0, 1.9), set(), id="two among others that differ"),
        pytest.param((1.0, 1.2, 1.1, 1.7), set(), id="three others are as far apart by chance"),
        pytest.param((1.0, 1.2, 1.1, 2.2), {3}, id="three others are not"),
    ],
)
def test_a_rank_is_slow_in_one_step_where_it_is_far_above_the_others(
    took: tuple[float, ...], named: set[int], tmp_path: Path
) -> None:
    rows = stragglers(took, 1, tmp_path)
    assert {rank for row in rows for rank in row.ranks} == named


def test_ranks_that_load_longer_in_each_of_several_steps_are_slow(tmp_path: Path) -> None:
    rows = stragglers((1.0, 1.2, 1.4, 1.6, 2.0, 1.9), 3, tmp_path)
    assert {rank for row in rows for rank in row.ranks} >= {4, 5}
