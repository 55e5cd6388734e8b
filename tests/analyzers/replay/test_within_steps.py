"""Ranks whose work differs from one collective to the next, in traces made by hand: against the same job with even
work, and jobs in which something else makes ranks wait for one another.
"""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import pytest

import perfscope
from perfscope.analyzers.replay.stragglers.within_steps import ComputeBetween, differs, paces
from perfscope.analyzers.replay.uneven_sizes import UnevenSizes
from perfscope.analyzers.whatif.whatif import context_of
from perfscope.results.rows import StragglerRow
from perfscope.results.summary import Summary
from tests.analyzers.measured import advised, measured
from tests.generator import ExtraLayers, SlowCompute, cpu_job, simulate
from tests.planted.jobs import pipeline

RANKS, STEPS, LAYERS, TRANSFER = 4, 5, 8, 60.0
LATENCY, ELEMENTS = 20.0, 4_000_000
"""What of a transfer are no bytes, µs; what each rank sends and receives where tokens are even."""

SEND = "ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)"
DENSE, EXPERTS = 700.0, 400.0
"""Compute of a layer before its tokens are sent to experts, and of these, µs."""


@dataclass(frozen=True)
class Scene:
    """Of each step, forward and backward through 8 layers: dense compute, an all-to-all, experts, an all-to-all.

    ``tokens`` (layer, rank) is how many times the mean the experts of a rank get; ``slow``: how many times as long all
    takes on a rank, ``longer`` the same of (step, rank). Each kernel takes as many times longer or shorter as ``noise``
    says. ``pause`` is what the host of rank 1 pauses before each step. Of ``ranks`` only those below ``recorded`` are
    written.
    """

    tokens: Callable[[int, int], float] = lambda _, __: 1.0
    slow: dict[int, float] = field(default_factory=dict)
    longer: Callable[[int, int], float] = lambda _, __: 1.0
    noise: float = 0.0
    pause: float = 0.0
    ranks: int = RANKS
    recorded: int | None = None
    seed: int = 1
    bytes_us: float | None = None
    """What the bytes of an all-to-all take where tokens are even: it takes as long as the rank with most tokens needs,
    and the sizes show who that is. None: it takes ``TRANSFER``, and sizes are all the same.
    """

    def transfer(self, layer: int) -> float:
        """µs of an all-to-all."""
        if self.bytes_us is None:
            return TRANSFER
        return LATENCY + self.bytes_us * max(self.tokens(layer, rank) for rank in range(self.ranks))

    def elements(self, number: int, rank: int) -> tuple[int, int]:
        """(elements that a rank sends in its all-to-all of that number, that it receives): to experts, or back."""
        part, of_experts = divmod(number % (4 * LAYERS), 2)
        layer = part if part < LAYERS else 2 * LAYERS - 1 - part
        tokens = round(ELEMENTS * (1.0 if self.bytes_us is None else self.tokens(layer, rank)))
        return (tokens, ELEMENTS) if of_experts else (ELEMENTS, tokens)


Kernel = tuple[str, int, float, float]


def simulated(scene: Scene) -> tuple[float, list[list[Kernel]], list[list[float]]]:
    """(mean step in µs, (name, stream, start, end) of each rank's kernels, each rank's begins of steps)."""
    rng = random.Random(scene.seed)
    kernels: list[list[Kernel]] = [[] for _ in range(scene.ranks)]
    now, begins = [0.0] * scene.ranks, [[] for _ in range(scene.ranks)]  # type: list[float], list[list[float]]
    for step in range(STEPS):
        for rank in range(scene.ranks):
            begins[rank].append(now[rank])
            now[rank] += 20 + (scene.pause if rank == 1 else 0.0)
        for part in range(2 * LAYERS):
            layer, times = (part, 1.0) if part < LAYERS else (2 * LAYERS - 1 - part, 2.0)
            for of_experts in (False, True):
                for rank in range(scene.ranks):
                    length = EXPERTS * scene.tokens(layer, rank) if of_experts else DENSE
                    length *= times * scene.slow.get(rank, 1.0) * scene.longer(step, rank)
                    for _ in range(2):
                        end = now[rank] + length / 2 * (1 + rng.uniform(-scene.noise, scene.noise))
                        kernels[rank].append(("ampere_bf16_s16816gemm_bf16_128x128", 7, now[rank], end))
                        now[rank] = end + 1
                ended = max(now) + scene.transfer(layer)
                for rank in range(scene.ranks):
                    kernels[rank].append((SEND, 20, now[rank], ended))
                    now[rank] = ended + 2
        for rank in range(scene.ranks):
            kernels[rank].append(("multi_tensor_apply_kernel", 7, now[rank], now[rank] + 300))
            now[rank] += 310
    return max(now) / STEPS, kernels, [[*begin, end] for begin, end in zip(begins, now, strict=True)]


def written(scene: Scene, folder: Path) -> float:
    """The mean step in µs of the job whose traces are now there."""
    step_us, kernels, begins = simulated(scene)
    everyone = list(range(scene.ranks))
    sent = {
        "Collective name": "all_to_allv",
        "Group size": scene.ranks,
        "dtype": "BFloat16",
        "Process Group Name": "0",
        "Process Group Ranks": str(everyone),
    }
    for rank in everyone[: scene.recorded]:
        numbers = itertools.count()
        events = [
            event("user_annotation", f"ProfilerStep#{step}", 1, begins[rank][step], begins[rank][step + 1])
            for step in range(STEPS)
        ]
        for number, (name, stream, start, end) in enumerate(kernels[rank], 1):
            begin = max(at for at in begins[rank] if at < start) + (scene.pause if rank == 1 else 0.0)
            launched = begin + 2 + 0.1 * (number % 100)
            more: dict[str, object] = {}
            if stream == 20:
                elements = scene.elements(next(numbers), rank)
                more = sent | dict(zip(("In msg nelems", "Out msg nelems"), elements, strict=True))
            events.append(
                event("kernel", name, stream, start, end, stream=stream, device=0, correlation=number, **more)
            )
            events.append(event("cuda_runtime", "cudaLaunchKernel", 1, launched, launched + 0.1, correlation=number))
        info = {"backend": "nccl", "rank": rank, "world_size": scene.ranks}
        (folder / f"rank_{rank}.json").write_text(json.dumps({"distributedInfo": info, "traceEvents": events}))
    return step_us


def event(cat: str, name: str, thread: int, start: float, end: float, **args: object) -> dict[str, object]:
    return {
        "ph": "X", "cat": cat, "name": name, "pid": thread, "tid": thread, "ts": start, "dur": end - start, "args": args
    }  # fmt: skip


def in_turn(layer: int, rank: int) -> float:
    """Each layer another rank's experts get 1.9 times the mean: of 8 layers each rank has two such."""
    return 1.9 if layer % RANKS == rank % RANKS else 0.7


def analyzed(scene: Scene, folder: Path) -> tuple[float, Summary]:
    step_us = written(scene, folder)
    summary = advised(folder)
    assert summary.job.step_time_us == pytest.approx(step_us, rel=0.01)
    return step_us, summary


def within(summary: Summary) -> list[StragglerRow]:
    return [row for row in summary.stragglers if row.within_steps]


def test_experts_that_get_more_tokens_in_each_layer_cost_what_even_ones_save(tmp_path: Path) -> None:
    scene = Scene(tokens=in_turn, noise=0.02)
    step_us, summary = analyzed(scene, tmp_path)
    even_us = simulated(replace(scene, tokens=lambda _, __: 1.0))[0]
    assert even_us < 0.8 * step_us
    (row,) = summary.stragglers
    assert (row.scope, row.ranks, row.cause, row.pattern) == ("job", (0, 1, 2, 3), "compute", "rotating")
    assert row.within_steps
    assert row.lost_us == pytest.approx(step_us - even_us, rel=0.1)
    finding = summary.findings[0]
    assert (finding.rule, finding.whatif) == ("uneven-work", {"ranks.work": "even"})
    assert finding.predicted_step_us is not None
    assert finding.predicted_step_us.mid == pytest.approx(even_us, rel=0.02)
    asked = perfscope.whatif(tmp_path, {"ranks.work": "even"})
    assert asked.mid_ns / 1e3 == pytest.approx(finding.predicted_step_us.mid, rel=0.01)
    assert "Experts that get more tokens" in finding.action.how
    assert not summary.verdict.healthy


def unlike(layer: int, rank: int) -> float:
    """The same, of unlike shares: what the others of four ranks get less, one of them gets more, in each layer."""
    less = (0.1, 0.3, 0.5, 0.7)[layer % RANKS]
    return 1 + 3 * less if (layer + layer // RANKS) % RANKS == rank else 1 - less


def test_all_to_alls_of_even_work_are_as_long_as_the_mean_of_their_sizes_needs(tmp_path: Path) -> None:
    scene = Scene(tokens=unlike, noise=0.02, bytes_us=150.0)
    step_us, summary = analyzed(scene, tmp_path)
    even_us = simulated(replace(scene, tokens=lambda _, __: 1.0))[0]
    (row,) = summary.stragglers
    assert row.within_steps
    # The busiest ranks have 2.2 times the mean on average: 32 all-to-alls are a third of what is lost.
    assert (step_us - even_us) / 3 == pytest.approx(4 * LAYERS * 150 * 1.2, rel=0.01)
    assert row.lost_us == pytest.approx(step_us - even_us, rel=0.04)
    asked = perfscope.whatif(tmp_path, {"ranks.work": "even"})
    assert asked.mid_ns / 1e3 == pytest.approx(even_us, rel=0.02)
    finding = summary.findings[0]
    assert finding.predicted_step_us is not None
    assert finding.predicted_step_us.mid == pytest.approx(even_us, rel=0.02)
    assert finding.title.startswith(f"Uneven work costs {row.lost_us / step_us:.0%} of the step: ranks wait ")


def test_a_rank_that_gets_more_tokens_than_others_makes_all_to_alls_longer(tmp_path: Path) -> None:
    """Rank 2 gets 1.9 times the mean of each layer, the others 0.7 times. Somebody gets its tokens: where they are
    even, and where it gets as many as its peers, the busiest rank of each of 32 all-to-alls moves the mean.
    """
    saved: dict[tuple[str, bool], float] = {}
    for sized in (False, True):
        scene = Scene(tokens=lambda _, rank: 1.9 if rank == 2 else 0.7, bytes_us=150.0 if sized else None)
        folder = tmp_path / str(sized)
        folder.mkdir()
        written(scene, folder)
        for setting in ("ranks.work=even", "rank.2=peers"):
            asked = perfscope.whatif(folder, dict([setting.split("=")]))
            saved[setting, sized] = (asked.measured_ns - asked.mid_ns) / 1e3
    # One size is recorded, so that 50 us of 305 are taken for latency.
    of_sizes = 4 * LAYERS * (305 - 50) * (1 - 1 / 1.9)
    for setting in ("ranks.work=even", "rank.2=peers"):
        assert saved[setting, True] - saved[setting, False] == pytest.approx(of_sizes, rel=0.05)
    sizes = UnevenSizes(context_of(tmp_path / "True").result)
    assert sizes.shares_left([2]) == pytest.approx(1 / 1.9)
    assert sizes.shares_left([0, 1, 3]) == pytest.approx(1.0)  # rank 2 moves as much as before


@pytest.mark.parametrize("noise", [0.05, 0.2, 0.4])
@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_durations_that_vary_are_no_uneven_work(noise: float, ranks: int, tmp_path: Path) -> None:
    """The slowest of eight is then up to a fifth above their mean between any two collectives."""
    _, summary = analyzed(Scene(noise=noise, ranks=ranks), tmp_path)
    assert not within(summary)
    assert "uneven-work" not in {finding.rule for finding in summary.findings}


def test_of_ranks_that_are_not_all_recorded_nothing_is_said(tmp_path: Path) -> None:
    _, summary = analyzed(Scene(tokens=in_turn, ranks=8, recorded=2), tmp_path)
    assert not within(summary)
    assert "uneven-work" not in {finding.rule for finding in summary.findings}


def test_a_rank_that_is_slow_in_all_layers_is_the_straggler(tmp_path: Path) -> None:
    _, summary = analyzed(Scene(slow={2: 1.3}, noise=0.02), tmp_path)
    (row,) = summary.stragglers
    assert (row.scope, row.ranks, row.within_steps) == ("rank", (2,), False)
    assert summary.findings[0].rule == "straggling-rank"


def test_a_rank_with_more_to_do_in_the_same_two_layers_is_the_straggler(tmp_path: Path) -> None:
    scene = Scene(tokens=lambda layer, rank: 2.5 if rank == 2 and layer in (1, 5) else 1.0)
    _, summary = analyzed(scene, tmp_path)
    assert not within(summary)
    assert summary.stragglers[0].ranks == (2,)


def test_a_slow_rank_beside_uneven_work_is_told_apart_from_it(tmp_path: Path) -> None:
    scene = Scene(tokens=in_turn, slow={2: 1.25}, noise=0.01)
    step_us, summary = analyzed(scene, tmp_path)
    rows = {row.ranks: row for row in summary.stragglers}
    assert rows.keys() == {(2,), (0, 1, 2, 3)}
    assert rows[2,].lost_us == pytest.approx(step_us - simulated(replace(scene, slow={}))[0], abs=0.02 * step_us)
    even_us = simulated(replace(scene, tokens=lambda _, __: 1.0))[0]
    assert rows[0, 1, 2, 3].lost_us == pytest.approx(step_us - even_us, abs=0.03 * step_us)
    assert {"straggling-rank", "uneven-work"} <= {finding.rule for finding in summary.findings}


def test_pauses_of_a_host_are_no_part_of_uneven_work(tmp_path: Path) -> None:
    scene = Scene(tokens=in_turn, pause=6_000.0)
    step_us, summary = analyzed(scene, tmp_path)
    rows = {(row.ranks, row.cause): row for row in summary.stragglers}
    even_us = simulated(replace(scene, tokens=lambda _, __: 1.0))[0]
    assert rows[(0, 1, 2, 3), "compute"].lost_us == pytest.approx(step_us - even_us, abs=0.02 * step_us)
    assert ((1,), "host") in rows


def test_what_cores_make_of_ranks_on_cpus_is_no_uneven_work(tmp_path: Path) -> None:
    """What they compute between two collectives varies by a third, and in each step one of them takes twice as long."""
    rng = random.Random(3)
    slow = tuple(SlowCompute(ranks=(rng.randrange(4),), steps=(step,), factor=2.0) for step in range(10, 18))
    simulate(cpu_job(steps=8, noise=0.3, bucket_bytes=512 * 1024, causes=slow)).write(tmp_path)
    summary = measured(tmp_path)
    assert summary.job.devices == ("CPU",)
    assert not within(summary)


def test_pipeline_stages_with_unlike_work_are_no_peers(tmp_path: Path) -> None:
    simulate(replace(pipeline(8), causes=(ExtraLayers(stages=(1,), layers=2),))).write(tmp_path)
    assert not within(measured(tmp_path))


def test_batches_that_differ_are_told_by_the_step_not_by_its_parts(tmp_path: Path) -> None:
    """In each step another rank takes 1.4 times as long for all it computes."""
    scene = Scene(noise=0.02, longer=lambda step, rank: 1.4 if step % RANKS == rank else 1.0)
    _, summary = analyzed(scene, tmp_path)
    (row,) = summary.stragglers
    assert (row.scope, row.pattern, row.within_steps) == ("job", "rotating", False)


def between(*lines: list[int]) -> np.ndarray[tuple[int, ...], np.dtype[np.int64]]:
    return np.array(lines, dtype=np.int64) * 1000


def test_what_differs_by_hand() -> None:
    """Two ranks of 10 between most collectives; each has 30 once: the slower one is 10 above the mean, twice."""
    own = between([10, 30, 10, 10, 10, 10, 10, 10], [10, 10, 10, 30, 10, 10, 10, 10])
    assert paces(own) == pytest.approx([1.0, 1.0])
    assert differs(own, 200_000.0) == pytest.approx(20_000.0)
    assert differs(own, 500_000.0) == 0.0  # a twenty-fifth of the steps
    assert differs(own[:, :4], 100_000.0) == 0.0  # too few to tell
    assert differs(own[:, [0, 1, 2, 4, 5, 6, 7, 1]], 200_000.0) == 0.0  # the same rank each time


def test_a_rank_s_pace_in_a_step_is_no_difference_of_work() -> None:
    """The second rank takes 1.5 times as long in the first step, the first one in the other."""
    times = [10, 20, 30, 10, 20, 30, 10, 20]
    slower = [15, 30, 45, 15, 30, 45, 15, 30]
    assert paces(between(times, slower)) == pytest.approx([0.8, 1.2])
    own = between(times + slower, slower + times)
    both = ComputeBetween(own, paces(own))
    assert both.longer_ns(np.repeat([0, 1], 8), np.ones(2, dtype=bool), 375_000.0) == 0.0
