"""Settings that claim to change nothing but the time: the same losses, step for step, on two real ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from perfscope.collectors.overrides.overrides import Overrides
from tests.collectors.harness import needs_torch
from tests.tune.harness import trained

pytestmark = [pytest.mark.training, needs_torch]


def assert_alike(ranks: list[Any], others: list[Any], tolerance: float) -> None:
    for one, other in zip(ranks, others, strict=True):
        assert one["losses"] == pytest.approx(other["losses"], rel=tolerance, abs=tolerance)
        assert one["parameters"] == pytest.approx(other["parameters"], rel=tolerance, abs=tolerance)
    assert ranks[0]["parameters"] == ranks[1]["parameters"], "ranks must never drift apart"


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    ranks, applied = trained(tmp_path_factory.mktemp("plain"), Overrides())
    assert applied == {}
    assert len(set(ranks[0]["losses"])) == 12, "a sequence that would show a change"
    return ranks


def test_loader_and_buckets(plain: list[Any], tmp_path: Path) -> None:
    settings: dict[str, Any] = {
        "dataloader.num_workers": 2,
        "dataloader.prefetch_factor": 3,
        "dataloader.persistent_workers": True,
        "ddp.bucket_cap_mb": 25,
        "ddp.gradient_as_bucket_view": True,
        "ddp.static_graph": True,
    }
    ranks, applied = trained(tmp_path, Overrides(settings=settings, datasets=("Samples",)))
    assert {name: entry["to"] for name, entry in applied.items()} == settings
    assert not any(entry["refused"] for entry in applied.values())
    assert_alike(ranks, plain, 1e-5)


def test_bf16_gradients_differ_a_little(plain: list[Any], tmp_path: Path) -> None:
    """What changes the numbers is marked so for a reason."""
    ranks, applied = trained(tmp_path, Overrides(settings={"ddp.comm_dtype": "bf16"}))
    assert applied["ddp.comm_dtype"]["to"] == "bf16"
    assert ranks[0]["losses"] != plain[0]["losses"]
    for one, other in zip(ranks, plain, strict=True):
        assert one["losses"] == pytest.approx(other["losses"], rel=0.05)


@pytest.mark.parametrize("more", [pytest.param((), marks=pytest.mark.frameworks), ("--uneven",)])
def test_gradients_held_back(tmp_path: Path, more: tuple[str, ...]) -> None:
    """Also where a step has a micro-batch less than the recording has."""
    (tmp_path / "before").mkdir()
    (tmp_path / "after").mkdir()
    arguments = ("--accumulate", 3, *more)
    before, _ = trained(tmp_path / "before", Overrides(), *arguments, steps=7)
    held = Overrides(settings={"ddp.no_sync": True}, microbatches=3)
    after, applied = trained(tmp_path / "after", held, *arguments, steps=7)
    assert applied["ddp.no_sync"]["times"] == 1
    assert ("not the same" in applied["ddp.no_sync"]["refused"]) == bool(more)
    assert_alike(after, before, 1e-4)


def test_variables_reach_the_ranks_before_torch(tmp_path: Path) -> None:
    _, applied = trained(tmp_path, Overrides(environment={"OMP_NUM_THREADS": "2"}), steps=6)
    from perfscope.recording.metadata import load_run
    from perfscope.recording.paths import run_file

    run = load_run(run_file(tmp_path, 1))
    assert run.environment["OMP_NUM_THREADS"] == "2"
    assert run.cpu_threads == 2
    assert applied["env.OMP_NUM_THREADS"]["to"] == "2"
