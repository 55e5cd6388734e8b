"""Hand-made traces of nothing but step ranges and kernels, as people write them to try a tool: the cost of a slow rank
against the same steps without it. Nothing in such a file says when a collective was issued, or of how many ranks it is.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

import perfscope
from perfscope.analyzers.whatif.predict import predict
from perfscope.analyzers.whatif.whatif import context_of
from tests.analyzers.measured import measured

RANKS, STEPS, BLOCKS = 4, 5, 8


@dataclass(frozen=True)
class Scene:
    """Of each step: 8 forwards of 400 µs, 8 backwards of 800, buckets of gradients that are reduced in 500 each, beside
    the backward or behind it, and an optimizer's kernel of 300. ``slow``: times as long on rank 2.
    """

    slow: float = 1.5
    buckets: int = 4
    overlapped: bool = True
    launched: float | str | None = None
    """None: no launch is recorded. A number: made up, so many µs before its kernel. ``at once``: all as the step
    begins, ``slowly``: at half the device's pace; then the host waits for the device, by no recorded call.
    """
    stated: bool = False
    """The traces list the ranks of the group."""


def simulate(scene: Scene) -> tuple[float, dict[int, list[tuple[str, int, float, float]]], list[list[float]]]:
    """(mean step in µs, (name, stream, start, end) of each rank's kernels, each rank's starts of the steps)."""
    kernels: dict[int, list[tuple[str, int, float, float]]] = {rank: [] for rank in range(RANKS)}
    now, begins = [0.0] * RANKS, [[] for _ in range(RANKS)]  # type: list[float], list[list[float]]
    for _ in range(STEPS):
        ready, free = [], []
        for rank in range(RANKS):
            begins[rank].append(now[rank])
            at, times = now[rank] + 20, scene.slow if rank == 2 else 1.0
            issued = []
            for block in range(2 * BLOCKS):
                length = (400 if block < BLOCKS else 800) * times
                kernels[rank].append(("ampere_bf16_s16816gemm_bf16_128x128", 7, at, at + length))
                at += length
                if block >= BLOCKS and (block - BLOCKS + 1) % (BLOCKS // scene.buckets) == 0:
                    issued.append(at)
            ready.append(issued if scene.overlapped else [at] * scene.buckets)
            free.append(at)
        ended = [0.0] * RANKS
        for bucket in range(scene.buckets):
            starts = [max(ready[rank][bucket], ended[rank]) + 3 for rank in range(RANKS)]
            ended = [max(starts) + 500] * RANKS
            for rank in range(RANKS):
                kernels[rank].append(("ncclDevKernel_AllReduce_Sum_bf16_RING_LL", 20, starts[rank], ended[rank]))
        for rank in range(RANKS):
            at = max(free[rank], ended[rank]) + 5
            kernels[rank].append(("multi_tensor_apply_kernel", 7, at, at + 300))
            now[rank] = at + 310
    return max(now) / STEPS, kernels, [[*begin, end] for begin, end in zip(begins, now, strict=True)]


def launch_at(how: float | str, begin: float, start: float, number: int) -> float:
    """When the kernel that starts then is launched, in a step that begins at ``begin``."""
    if isinstance(how, str):
        return begin + 2 + (2 * (number % 40) if how == "at once" else (start - begin) / 2)
    return start - how


def write(scene: Scene, folder: Path) -> None:
    _, kernels, begins = simulate(scene)
    for rank in range(RANKS):
        events: list[dict[str, Any]] = []

        def add(
            name: str, cat: str, tid: int, start: float, end: float, events: list[Any] = events, **args: Any
        ) -> None:
            event = {"ph": "X", "name": name, "cat": cat, "pid": tid, "tid": tid, "ts": start, "dur": end - start}
            events.append({**event, "args": args})

        for step in range(STEPS):
            add(f"ProfilerStep#{step}", "user_annotation", 1, begins[rank][step], begins[rank][step + 1])
        for number, (name, stream, start, end) in enumerate(sorted(kernels[rank], key=lambda kernel: kernel[2])):
            begin = max(at for at in begins[rank] if at < start)
            launched = {} if scene.launched is None else {"correlation": number + 1}
            add(name, "kernel", stream, start, end, stream=stream, device=0, **launched)
            if scene.launched is not None:
                called = launch_at(scene.launched, begin, start, number)
                add("cudaLaunchKernel", "cuda_runtime", 1, called, called + 1, **launched)
        info = {"backend": "nccl", "rank": rank, "world_size": RANKS}
        stated = {"distributedInfo": info} if scene.stated else {}
        (folder / f"rank_{rank}.json").write_text(json.dumps({**stated, "traceEvents": events}))


def lost_us(folder: Path, ranks: Sequence[int]) -> float:
    summary = perfscope.analyze(folder)
    assert [row.ranks for row in summary.stragglers] == [tuple(ranks)]
    assert summary.findings[0].rule == "straggling-rank"
    return summary.stragglers[0].lost_us


@pytest.mark.parametrize("stated", [True, False])
@pytest.mark.parametrize("launched", [None, 12.0, 500.0])
@pytest.mark.parametrize("overlapped", [True, False])
@pytest.mark.parametrize("buckets", [1, 2, 4])
def test_a_slow_rank_costs_what_it_takes_longer(
    buckets: int, launched: float | None, tmp_path: Path, *, overlapped: bool, stated: bool
) -> None:
    scene = Scene(buckets=buckets, overlapped=overlapped, launched=launched, stated=stated)
    write(scene, tmp_path)
    truth = simulate(scene)[0] - simulate(replace(scene, slow=1.0))[0]
    assert lost_us(tmp_path, [2]) == pytest.approx(truth, rel=0.02)


def test_a_rank_that_communicates_with_nobody(tmp_path: Path) -> None:
    write(Scene(), tmp_path)
    trace = json.loads((tmp_path / "rank_0.json").read_text())
    alone = [event for event in trace["traceEvents"] if not event["name"].startswith("nccl")]
    (tmp_path / "alone").mkdir()
    (tmp_path / "alone" / "trace.json").write_text(json.dumps({"traceEvents": alone}))
    summary = measured(tmp_path / "alone")
    assert summary.time_breakdown[0].compute_us == pytest.approx(BLOCKS * 1200 + 300)


def test_ranks_without_a_slow_one_are_equals(tmp_path: Path) -> None:
    write(Scene(slow=1.0), tmp_path)
    assert measured(tmp_path).stragglers == ()


@pytest.mark.parametrize("launched", ["at once", "slowly"])
@pytest.mark.parametrize("overlapped", [True, False])
def test_a_host_that_goes_on_when_its_device_is_done_has_waited_for_it(
    launched: str, tmp_path: Path, *, overlapped: bool
) -> None:
    scene = Scene(buckets=1, overlapped=overlapped, launched=launched)
    write(scene, tmp_path)
    truth = simulate(scene)[0] - simulate(replace(scene, slow=1.0))[0]
    assert lost_us(tmp_path, [2]) == pytest.approx(truth, rel=0.02)


@pytest.mark.parametrize("launched", [None, 12.0])
@pytest.mark.parametrize("setting", ["compute", "network.bandwidth"])
def test_settings_change_what_they_name(setting: str, launched: float | None, tmp_path: Path) -> None:
    """Nothing is known of the host: the device sets the pace."""
    scene = Scene(slow=1.0, buckets=2, overlapped=False, launched=launched)
    write(scene, tmp_path)
    answer = predict(context_of(tmp_path), {setting: "2x"})
    saved_us = BLOCKS * (400 + 800) / 2 + 150 if setting == "compute" else scene.buckets * 500 / 2
    truth = simulate(scene)[0] - saved_us
    assert answer.mid_ns / 1e3 == pytest.approx(truth, rel=0.02)
    assert answer.low_ns / 1e3 <= truth <= answer.high_ns / 1e3


@pytest.mark.parametrize(("launched", "told"), [(12.0, True), (None, False)])
def test_what_is_assumed_is_told(launched: float | None, tmp_path: Path, *, told: bool) -> None:
    write(Scene(launched=launched), tmp_path)
    notes = measured(tmp_path).notes
    assert [note.ranks for note in notes if note.kind == "world_assumed"] == [tuple(range(RANKS))]
    assert any("calls that launch kernels come just before" in note.text for note in notes) == told


def test_ranks_whose_collectives_end_apart_are_not_taken_for_one_group(tmp_path: Path) -> None:
    """Rank 3 has a rhythm of its own: whom it reduces with is not in the recording."""
    write(Scene(slow=1.0), tmp_path)
    path = tmp_path / "rank_3.json"
    trace = json.loads(path.read_text())
    for number, event in enumerate(trace["traceEvents"]):
        event["ts"] += 900 * (number % 7)
    path.write_text(json.dumps(trace))
    assert not [note for note in measured(tmp_path).notes if note.kind == "world_assumed"]
