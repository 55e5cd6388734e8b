"""The first screen: its tiles, and in which steps the job was limited."""

from __future__ import annotations

import dataclasses

import pytest

from perfscope.reports.page import overview, tiles
from perfscope.results.rows import DataLoaderRow
from perfscope.results.tables import OperatorRow
from tests.reports import examples
from tests.reports.examples import gpu, healthy, starved, straggler


def test_since_counts_the_steps_that_were_delayed() -> None:
    summary = straggler()
    every, some = summary.job.steps, summary.job.steps[2:5]
    row = summary.stragglers[0]
    finding = dataclasses.replace(summary.findings[0], rule="straggling-rank")

    def since(steps: tuple[int, ...]) -> str:
        stragglers = (dataclasses.replace(row, steps=steps),)
        return overview.since(dataclasses.replace(summary, stragglers=stragglers, findings=(finding,)))

    assert since(every).startswith("In every recorded step")
    assert since(some) == f"In 3 of {len(every)} recorded steps, first in step {some[0]}, last in step {some[-1]}."
    assert overview.since(healthy()) == ""


@pytest.mark.parametrize(
    ("strategy", "settings", "rule", "said"),
    [
        ("data", {}, "straggling-rank", "data parallel"),
        ("data", {"threads": {"intra_op": 8}}, "straggling-rank", "data parallel by hand"),
        ("data", {}, "gradients-by-hand", "data parallel by hand"),
        (("data", "tensor"), {}, "straggling-rank", "data parallel + tensor parallel"),
        ("shard", {}, "straggling-rank", "sharding"),
        ("shard", {"threads": {"intra_op": 8}}, "straggling-rank", "sharding by hand"),
        ("ddp", {"threads": {"intra_op": 8}}, "straggling-rank", "DDP"),
    ],
)  # fmt: skip
def test_gradients_are_reduced_by_hand_only_where_that_is_known(strategy, settings, rule, said) -> None:
    """Traces of other tools need not show a wrapper; a loop over single gradients shows that there is none."""
    summary = straggler()
    job = dataclasses.replace(summary.job, strategy=strategy, settings=settings)
    finding = dataclasses.replace(summary.findings[0], rule=rule)
    summary = dataclasses.replace(summary, job=job, findings=(finding,))
    assert overview.strategy(summary) == said
    assert said in overview.identity(summary)


@pytest.mark.parametrize(
    ("strategy", "said"),
    [("ddp", "LM, 1.29 M parameters"), ("fsdp", "LM, 1.29 M parameters in the shard of rank 0")],
)
def test_the_parameters_of_a_shard_are_not_the_models(strategy: str, said: str) -> None:
    summary = healthy()
    model = {"name": "LM", "parameters": 1_290_000}
    job = dataclasses.replace(summary.job, strategy=strategy, model=model)
    assert said in overview.identity(dataclasses.replace(summary, job=job))


def test_throughput_counts_every_ranks_batches_outside_the_recording() -> None:
    summary = starved()
    ranks = summary.job.world_size or 0
    job = dataclasses.replace(summary.job, samples_per_step=32.0 * ranks, unprofiled_step_us=100_000.0)

    def by_label(**changes: object) -> dict[str, tiles.Tile]:
        changed = dataclasses.replace(summary, job=dataclasses.replace(job, **changes))
        return {tile.label: tile for tile in tiles.tiles(changed)}

    tile = by_label()["Throughput"]
    assert tile.value == f"{16 * 2 * ranks / 0.1:,.0f} samples/s"
    assert f"{16 * 2 * ranks} per step, 32 per rank, without profiling" in tile.detail
    assert "Throughput" not in by_label(samples_per_step=None)


@pytest.mark.parametrize(
    ("operators", "said"), [(("aten::mm",), False), (("aten::mm", "aten::embedding"), True), ((), True)]
)
def test_a_model_that_looks_nothing_up_has_no_tokens(operators: tuple[str, ...], said: bool) -> None:
    """13 dense features per sample are no tokens."""
    summary = starved()
    job = dataclasses.replace(summary.job, samples_per_step=64.0, positions_per_sample=13.0)
    rows = tuple(
        OperatorRow(
            name=name, operator_class="other", count_per_step=1.0, device_us_per_step=0.0, host_us_per_step=1.0,
            kernels_per_step=0.0, flops_per_step=None, tflops=None, share_of_peak=None, dtype=None,
        )
        for name in operators
    )  # fmt: skip
    (tile,) = (
        tile
        for tile in tiles.tiles(dataclasses.replace(summary, job=job, operators=rows))
        if tile.label == "Throughput"
    )
    assert ("tokens/s if a sample is 13 tokens" in tile.detail) is said


def test_a_mix_of_types_is_called_one():
    found = gpu().utilisation
    assert (
        tiles.peak_type(dataclasses.replace(found, dtype="bfloat16", flops_by_dtype={"bfloat16": 0.995})) == "bfloat16"
    )
    mixed = dataclasses.replace(found, dtype="tf32", flops_by_dtype={"tf32": 0.8, "float32": 0.2})
    assert tiles.peak_type(mixed) == "mixed, mostly tf32"
    assert tiles.peak_type(dataclasses.replace(found, dtype=None)) == ""


@pytest.mark.parametrize(
    ("unprofiled_us", "says"),
    [(64_000.0, "step time and predictions are of steps without the profiler"), (None, "too few were timed without")],
)
def test_what_the_step_time_and_predictions_are_of(unprofiled_us: float | None, says: str) -> None:
    job = examples.job(2, (100.0,) * 8, perturbation=1.57, unprofiled_step_us=unprofiled_us)
    said = overview.perturbation(dataclasses.replace(healthy(), job=job), 1.57)
    assert said.startswith("Profiling slowed the steps by 57%: ")
    assert says in said


@pytest.mark.parametrize(
    ("ratio", "unprofiled_us", "says"),
    [
        (1.01, 99_000.0, "Profiling did not noticeably change the step time."),
        (1.01, 117_000.0, "step time in the median; unprofiled steps take 117 ms on the mean, as some took longer."),
        (
            1.08,
            117_000.0,
            "slowed the steps by 8.0% in the median; unprofiled steps take 117 ms on the mean, as some took",
        ),
        (1.08, 93_000.0, "Profiling slowed the steps by 8.0%: shares"),
        (1.19, 100_500.0, "slowed the steps by 19% in the median, though not on the mean: shares of the step are"),
        (1.19, 98_900.0, "slowed the steps by 19% in the median, though not on the mean: shares of the step are"),
        (1.2, 93_000.0, "Profiling slowed the steps by 20% in the median: shares"),
        (0.96, 115_000.0, "4.0% faster than unprofiled ones in the median: the step time varies"),
        (19.93, 5_020.0, "Profiling made the steps 20 times as long: shares"),
        (2.07, 117_000.0, "made the steps 2.1 times as long in the median; unprofiled steps take 117 ms on the mean"),
        (0.9, 117_000.0, "10% faster than unprofiled ones: the step time varies by more than the profiler overhead."),
        (0.9, 99_000.0, "10% faster than unprofiled ones in the median, though not on the mean: the step time varies"),
    ],
)
def test_a_mean_above_the_recorded_steps_is_explained(ratio: float, unprofiled_us: float, says: str) -> None:
    job = examples.job(2, (100.0,) * 8, perturbation=ratio, unprofiled_step_us=unprofiled_us)
    assert says in overview.perturbation(dataclasses.replace(healthy(), job=job), ratio)


@pytest.mark.parametrize(
    ("batch_us", "says"),
    [
        (230_000.0, "whose loader workers are as slow: more batches were ready."),
        (100_000.0, "the step time varies by more than the profiler overhead."),
        (None, "the step time varies by more than the profiler overhead."),
    ],
)
def test_unprofiled_steps_that_wait_for_workers_are_longer(batch_us: float | None, says: str) -> None:
    """Two workers, and a batch in each step of 117 ms."""
    job = examples.job(2, (100.0,) * 8, perturbation=0.86, unprofiled_step_us=117_000.0)
    row = DataLoaderRow(
        rank=0, wait_us=0.0, blocking_us=0.0, batch_us=batch_us, num_workers=2, batches_per_step=1.0, sampler_us=0.0
    )
    assert overview.perturbation(dataclasses.replace(healthy(), job=job, dataloader=(row,)), 0.86).endswith(says)
