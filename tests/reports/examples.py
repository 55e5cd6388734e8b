"""Jobs as ``Summary`` values, written down by hand: what the page and the terminal are tested and looked at with."""

from __future__ import annotations

import math
from typing import Any

from perfscope.results.categories import CATEGORIES
from perfscope.results.findings import Action, Confidence, Evidence, Finding, Obtained, Prediction, Severity, code
from perfscope.results.notes import Note
from perfscope.results.rows import (
    ClockRow,
    CollectiveRow,
    CostRow,
    DataLoaderRow,
    Failure,
    JobInfo,
    MemoryRow,
    Replay,
    StepTimeline,
    StragglerRow,
    Utilisation,
    Verdict,
)
from perfscope.results.summary import Summary
from perfscope.results.time_breakdown import TimeBreakdown
from tests.reports import pictures

NO_MFU = Utilisation(
    mfu=None,
    hfu=None,
    model_flops_per_step=None,
    flops_coverage=None,
    peak_tflops=None,
    dtype=None,
    causal="full",
    why_absent="no peak is known for cpu",
)


def breakdown(rank: int, *, hidden: float = 0.0, host: str = "node-a", bound: bool = False, **ms: Any) -> TimeBreakdown:
    """A rank's time breakdown from its categories in ms; those left out are 0."""
    us: dict[str, Any] = {name: ms.pop(name, 0.0) * 1000 for name in CATEGORIES}
    assert not ms, f"no such row: {ms}"
    exposed = us["exposed_comm_wait"] + us["exposed_comm_transfer"]
    return TimeBreakdown(
        rank=rank,
        step_time_us=math.fsum(us.values()),
        **{f"{name}_us": value for name, value in us.items()},
        comm_us=exposed + hidden * 1000,
        hidden_comm_us=hidden * 1000,
        host=host,
        wait_is_bound=bound,
    )


def strip(rank: int, *stretches: tuple[str, float], step: int = 12) -> StepTimeline:
    """A strip from (category, length in ms), one after the other."""
    starts, now = [], 0.0
    for _, length in stretches:
        starts.append(now * 1000)
        now += length
    return StepTimeline(
        rank=rank,
        step=step,
        categories=tuple(name for name, _ in stretches),
        start_us=tuple(starts),
        duration_us=tuple(length * 1000 for _, length in stretches),
    )


def job(world: int, step_ms: tuple[float, ...], **changes: Any) -> JobInfo:
    """A DDP job on CPU whose steps took ``step_ms``, from step 10 on; ``changes`` replace fields."""
    values: dict[str, Any] = {
        "world_size": world,
        "ranks": tuple(range(world)),
        "missing_ranks": (),
        "failures": (),
        "steps": tuple(range(10, 10 + len(step_ms))),
        "step_time_us": 1000 * math.fsum(step_ms) / len(step_ms) if step_ms else 0.0,
        "step_time_us_per_step": tuple(ms * 1000 for ms in step_ms),
        "strategy": "ddp",
        "backend": "gloo",
        "devices": ("cpu",),
        "perturbation": 1.09,
        "steps_from": "ProfilerStep annotations",
        "hosts": ("node-a",),
        "command": ("torchrun", "--nproc-per-node", str(world), "train.py", "--batch-size", "16"),
        "started_at": "2025-03-04T09:15:00+00:00",
        "model": {"name": "TinyGPT", "parameters": 10_670_000, "parameter_bytes": 42_680_000, "dtypes": ["float32"]},
        "batch_shape": (16, 128),
        "settings": {"ddp": {"bucket_cap_mb": 25, "static_graph": False, "comm_hook": None}},
        "versions": {"python": "3.11.7", "torch": "2.4.1"},
        "unprofiled_step_us": 76_000.0,
        "exit_code": 0,
    }
    return JobInfo(**{**values, **changes})


def summary(**parts: Any) -> Summary:
    """A ``Summary`` of ``parts``, empty where none is given."""
    values: dict[str, Any] = {
        "time_breakdown": (),
        "clock": (),
        "collectives": (),
        "cost_model": (),
        "stragglers": (),
        "critical_path": None,
        "dataloader": (),
        "utilisation": NO_MFU,
        "memory": (),
        "replay": Replay(),
        "findings": (),
        "notes": (),
        "step_timeline": (),
        "perfscope_version": "0.1.0",
        "source": "perfscope-recording",
    }
    result = Summary(**{**values, **parts})
    result.self_check()
    return result


def all_reduce(
    size: int, transfer_us: float, wait_us: float | None, last: dict[int, float], **changes: Any
) -> CollectiveRow:
    """An all-reduce of the whole job; its bandwidths follow from size and time."""
    ranks = changes.pop("ranks", tuple(last))
    algbw = size / transfer_us / 1000
    values: dict[str, Any] = {
        "group": "default",
        "ranks": ranks,
        "kind": "all_reduce",
        "dtype": "float32",
        "bytes": size,
        "count": 10,
        "transfer_us": transfer_us,
        "wait_us": wait_us,
        "algbw_gbps": algbw,
        "busbw_gbps": algbw * 2 * (len(ranks) - 1) / len(ranks),
        "last_arriver": last,
    }
    return CollectiveRow(**{**values, **changes})


def healthy() -> Summary:
    """Two CPU ranks, DDP, nothing to change."""
    return summary(
        job=job(2, (82.9, 83.4, 82.7, 83.0, 84.1, 82.8, 83.3, 83.1, 82.6, 83.5)),
        time_breakdown=tuple(
            breakdown(
                rank,
                compute=compute,
                exposed_comm_wait=wait,
                exposed_comm_transfer=2.1,
                idle_dataloader=0.2,
                idle_host=2.1,
                idle_launch=0.34,
                hidden=hidden,
            )
            for rank, compute, wait, hidden in ((0, 77.6, 0.8, 9.8), (1, 78.1, 0.3, 9.9))
        ),
        clock=(
            ClockRow(rank=0, offset_us=0.0, residual_us=4.1, aligned=True),
            ClockRow(rank=1, offset_us=-11.5, residual_us=4.1, aligned=True),
        ),
        collectives=(
            all_reduce(1_048_576, 620.0, 310.0, {0: 0.5, 1: 0.5}),
            all_reduce(26_214_400, 8_200.0, 460.0, {0: 0.4, 1: 0.6}),
            all_reduce(14_680_064, 4_700.0, 140.0, {0: 0.6, 1: 0.4}),
        ),
        cost_model=(CostRow(group="default", kind="all_reduce", alpha_us=301.0, busbw_gbps=3.32, residual=0.021),),
        dataloader=(
            DataLoaderRow(rank=0, wait_us=260.0, blocking_us=200.0, batch_us=41_000.0, num_workers=2),
            DataLoaderRow(rank=1, wait_us=250.0, blocking_us=200.0, batch_us=41_400.0, num_workers=2),
        ),
        verdict=Verdict(
            headline="Healthy: 94% of the step is compute and no change worth making was found.",
            healthy=True,
            first_action=None,
        ),
        step_timeline=tuple(
            strip(
                rank,
                ("compute", first),
                ("idle_host", 1.2),
                ("compute", second),
                ("exposed_comm_wait", wait),
                ("exposed_comm_transfer", 2.1),
                ("idle_host", 1.3),
            )
            for rank, first, second, wait in ((0, 40.0, 37.6, 0.8), (1, 40.4, 37.7, 0.3))
        ),
    )


def starved() -> Summary:
    """Two CPU ranks that wait for their data loader."""
    return summary(
        job=job(
            2, (101.2, 99.8, 100.9, 102.3, 101.5, 100.4, 118.0, 100.7), unprofiled_step_us=97_000.0, perturbation=1.04
        ),
        time_breakdown=tuple(
            breakdown(
                rank,
                compute=compute,
                exposed_comm_wait=wait,
                exposed_comm_transfer=1.9,
                idle_dataloader=loading,
                idle_host=host,
                idle_unknown=unknown,
                hidden=hidden,
            )
            for rank, compute, wait, loading, host, unknown, hidden in (
                (0, 56.0, 0.7, 42.1, 1.9, 0.5, 8.7),
                (1, 55.7, 0.4, 42.9, 1.8, 0.4, 8.8),
            )
        ),
        collectives=(all_reduce(26_214_400, 8_200.0, 510.0, {0: 0.25, 1: 0.75}, count=8),),
        dataloader=(
            DataLoaderRow(rank=0, wait_us=42_300.0, blocking_us=42_100.0, batch_us=42_000.0, num_workers=0),
            DataLoaderRow(rank=1, wait_us=43_100.0, blocking_us=42_900.0, batch_us=42_800.0, num_workers=0),
        ),
        clock=(
            ClockRow(rank=0, offset_us=0.0, residual_us=3.0, aligned=True),
            ClockRow(rank=1, offset_us=8.0, residual_us=3.0, aligned=True),
        ),
        findings=(
            Finding(
                rule="dataloader_workers",
                title="Every rank waits for its data loader, which loads in the training process",
                severity=Severity.HIGH,
                evidence=(
                    Evidence("blocking data loading per step", 42_500.0, "us", (0, 1)),
                    Evidence("share of the step", 0.412, "share", (0, 1)),
                    Evidence("time to load one batch", 42_400.0, "us", (0, 1)),
                    Evidence("workers", 0, ranks=(0, 1)),
                ),
                action=Action(
                    setting="DataLoader.num_workers",
                    old="0",
                    new="1",
                    how=code("python", "loader = DataLoader(dataset, num_workers=1, persistent_workers=True)"),
                ),
                predicted_step_us=None,
                ceiling=0.72,
                obtained=Obtained.BOUNDED,
                confidence=Confidence.HIGH,
            ),
        ),
        verdict=Verdict(
            headline="Data loading limits the job: every rank waits 42.5 ms of its 103 ms step for the next batch.",
            healthy=False,
            first_action="Set DataLoader.num_workers from 0 to 1: at most 1.72x faster.",
        ),
        step_timeline=tuple(
            strip(
                rank,
                ("idle_dataloader", loading),
                ("compute", 27.0),
                ("idle_host", host),
                ("compute", compute),
                ("exposed_comm_wait", wait),
                ("exposed_comm_transfer", 1.9),
            )
            for rank, loading, host, compute, wait in ((0, 42.1, 1.9, 29.0, 0.7), (1, 42.9, 1.8, 28.6, 0.4))
        ),
    )


def straggler() -> Summary:
    """Four CPU ranks; rank 2 computes longer and the others wait for it."""
    slow = 2

    def stretches(rank: int) -> tuple[tuple[str, float], ...]:
        extra = 61.0 if rank == slow else 0.0
        return (
            ("idle_dataloader", 0.3),
            ("compute", 28.0 + extra),
            ("idle_host", 1.5),
            ("compute", 31.0),
            ("exposed_comm_wait", 61.4 - extra),
            ("exposed_comm_transfer", 4.2),
        )

    def mean(rank: int) -> TimeBreakdown:
        total: dict[str, Any] = {}
        for name, ms in stretches(rank):
            total[name] = total.get(name, 0.0) + ms
        return breakdown(rank, hidden=6.1, host="node-a" if rank < 2 else "node-b", **total)

    return summary(
        job=job(
            4, (126.0, 125.7, 126.9, 127.3, 126.2, 126.0), hosts=("node-a", "node-b"), unprofiled_step_us=119_000.0
        ),
        time_breakdown=tuple(mean(rank) for rank in range(4)),
        clock=tuple(
            ClockRow(rank=rank, offset_us=(0.0, 6.2, 812.4, 809.0)[rank], residual_us=12.0, aligned=True)
            for rank in range(4)
        ),
        collectives=(
            all_reduce(26_214_400, 9_900.0, 44_100.0, {2: 1.0}, ranks=(0, 1, 2, 3), count=6),
            all_reduce(1_048_576, 640.0, 2_100.0, {2: 0.83, 1: 0.17}, ranks=(0, 1, 2, 3), count=6),
        ),
        cost_model=(CostRow(group="default", kind="all_reduce", alpha_us=255.0, busbw_gbps=4.08, residual=0.034),),
        stragglers=(
            StragglerRow(
                rank=2, cause="compute", lost_us=60_700.0, confidence="high", share_of_steps=1.0, host="node-b"
            ),
            StragglerRow(rank=1, cause="host", lost_us=310.0, confidence="low", share_of_steps=0.17, host="node-a"),
        ),
        dataloader=tuple(
            DataLoaderRow(rank=rank, wait_us=320.0, blocking_us=300.0, batch_us=None, num_workers=2)
            for rank in range(4)
        ),
        findings=(
            Finding(
                rule="straggler",
                title="Rank 2 on node-b computes 61 ms longer than its peers, and the others wait for it",
                severity=Severity.HIGH,
                evidence=(
                    Evidence("lost per step", 60_700.0, "us", (2,)),
                    Evidence("compute per step", 120_000.0, "us", (2,)),
                    Evidence("compute per step, median of the peers", 59_000.0, "us", (0, 1, 3)),
                    Evidence("share of steps in which it came last", 1.0, "share", (2,)),
                ),
                action=Action(
                    setting="rank 2 on node-b",
                    old=None,
                    new=None,
                    how=code("shell", "ssh node-b 'nproc; uptime; ps -eo pcpu,comm --sort=-pcpu | head'"),
                ),
                predicted_step_us=Prediction(low=65_000.0, mid=66_200.0, high=71_000.0),
                ceiling=0.93,
                obtained=Obtained.REPLAYED,
                confidence=Confidence.HIGH,
                whatif={"rank.2": "peers"},
            ),
            Finding(
                rule="ddp_buckets",
                title="The last gradient bucket is reduced after the backward pass ends",
                severity=Severity.LOW,
                evidence=(Evidence("exposed transfer per step", 4_200.0, "us", (0, 1, 2, 3)),),
                action=Action(
                    setting="DistributedDataParallel.bucket_cap_mb",
                    old="25",
                    new="10",
                    how=code("python", "model = DistributedDataParallel(model, bucket_cap_mb=10)"),
                ),
                predicted_step_us=None,
                ceiling=0.034,
                obtained=Obtained.BOUNDED,
                confidence=Confidence.MEDIUM,
            ),
        ),
        replay=Replay(measured_step_us=126_400.0, replayed_step_us=127_500.0, error=0.009),
        verdict=Verdict(
            headline="Rank 2 on node-b makes the others wait: 61 ms of every 126 ms step, as it computes longer.",
            healthy=False,
            first_action="Find out what slows rank 2 on node-b: 1.91x faster without it.",
        ),
        notes=(
            Note(
                about="clock",
                kind="clock_offsets",
                text="The hosts' clocks differ by 0.8 ms; they were aligned on the collectives.",
                ranks=(2, 3),
            ),
        ),
        step_timeline=tuple(strip(rank, *stretches(rank)) for rank in range(4)),
    )


def gpu() -> Summary:
    """Eight GPUs, FSDP, bound by gathers that nothing hides."""
    ranks = tuple(range(8))
    waits = (9.0, 8.2, 10.4, 7.7, 9.9, 8.8, 3.1, 9.4)
    gather = {"kind": "all_gather", "dtype": "bfloat16", "group": "fsdp", "ranks": ranks}
    scatter = {**gather, "kind": "reduce_scatter"}

    def collective(kind: dict[str, Any], size: int, transfer_us: float, count: int) -> CollectiveRow:
        rate = size / transfer_us / 1000
        rates: dict[str, Any] = {"algbw_gbps": rate, "busbw_gbps": rate * 7 / 8}
        return CollectiveRow(
            **kind,
            bytes=size,
            count=count,
            transfer_us=transfer_us,
            wait_us=transfer_us * 0.2,
            last_arriver={6: 0.7, 3: 0.2, 1: 0.1},
            **rates,
        )

    return summary(
        job=job(
            8,
            tuple(412 + 3 * math.sin(i) for i in range(20)),
            strategy=("fsdp", "tensor"),
            backend="nccl",
            devices=("NVIDIA H100 80GB HBM3",),
            model={
                "name": "LlamaForCausalLM",
                "parameters": 1_003_782_144,
                "parameter_bytes": 2_007_564_288,
                "dtypes": ["bfloat16"],
            },
            batch_shape=(2, 8192),
            versions={"python": "3.11.9", "torch": "2.5.1", "cuda": "12.4", "nccl": "2.21.5"},
            unprofiled_step_us=398_000.0,
            perturbation=1.035,
            settings={"fsdp": {"reshard_after_forward": True, "mixed_precision": {"param_dtype": "bfloat16"}}},
        ),
        time_breakdown=tuple(
            breakdown(
                rank,
                compute=306.0 - waits[rank],
                exposed_comm_wait=waits[rank] + 3.0,
                exposed_comm_transfer=79.4,
                exposed_copy=4.2,
                idle_dataloader=0.02,
                idle_sync=6.6,
                idle_launch=9.1,
                idle_host=1.4,
                idle_dependency=2.1,
                idle_unknown=0.35,
                hidden=61.0,
            )
            for rank in ranks
        ),
        clock=tuple(ClockRow(rank=rank, offset_us=rank * 1.7, residual_us=0.9, aligned=True) for rank in ranks),
        collectives=(
            collective(gather, 436_207_616, 1_560.0, 1280),
            collective(gather, 67_108_864, 262.0, 320),
            collective(gather, 8_388_608, 51.0, 40),
            collective(scatter, 436_207_616, 1_610.0, 640),
            collective(scatter, 67_108_864, 280.0, 160),
        ),
        cost_model=(
            CostRow(group="fsdp", kind="all_gather", alpha_us=24.0, busbw_gbps=249.0, residual=0.018),
            CostRow(group="fsdp", kind="reduce_scatter", alpha_us=27.0, busbw_gbps=241.0, residual=0.022),
        ),
        stragglers=(StragglerRow(rank=6, cause="launch", lost_us=5_900.0, confidence="medium", share_of_steps=0.7),),
        dataloader=tuple(
            DataLoaderRow(rank=rank, wait_us=40.0, blocking_us=20.0, batch_us=9_100.0, num_workers=8) for rank in ranks
        ),
        utilisation=Utilisation(
            mfu=0.413,
            hfu=0.436,
            model_flops_per_step=1.351e15,
            flops_coverage=0.97,
            peak_tflops=989.4,
            dtype="bfloat16",
            causal="full",
            why_absent=None,
            peak_source="H100 SXM datasheet",
        ),
        memory=tuple(
            MemoryRow(rank=rank, peak_bytes=58_300_000_000 + rank * 40_000_000, capacity_bytes=85_017_624_576)
            for rank in ranks
        ),
        findings=(
            Finding(
                rule="fsdp_reshard",
                title="Parameters are gathered twice per step although the memory to keep them is free",
                severity=Severity.MEDIUM,
                evidence=(
                    Evidence("exposed transfer per step", 79_400.0, "us", ranks),
                    Evidence("memory free at the peak", 26_300_000_000, "bytes", ranks),
                    Evidence("bus bandwidth of the gathers", 244.7, "GB/s", ranks),
                ),
                action=Action(
                    setting="fully_shard(reshard_after_forward)",
                    old="True",
                    new="False",
                    how=code(
                        "python",
                        "for block in model.layers:\n    fully_shard(block, mesh=mesh, reshard_after_forward=False)",
                    ),
                ),
                predicted_step_us=None,
                ceiling=0.107,
                obtained=Obtained.BOUNDED,
                confidence=Confidence.MEDIUM,
            ),
            Finding(
                rule="host_sync",
                title="The host waits for the device in every step, which then runs dry",
                severity=Severity.LOW,
                evidence=(Evidence("idle while the host is blocked", 6_600.0, "us", ranks),),
                action=Action(
                    setting="loss.item()",
                    old="every step",
                    new="every 50 steps",
                    how=code("python", "if step % 50 == 0:\n    log(loss.item())"),
                ),
                predicted_step_us=None,
                ceiling=0.016,
                obtained=Obtained.BOUNDED,
                confidence=Confidence.HIGH,
            ),
        ),
        verdict=Verdict(
            headline="Gathering parameters limits the job: 79 ms of every 412 ms step is exposed transfer.",
            healthy=False,
            first_action="Keep gathered parameters after the forward pass: at most 1.11x faster.",
        ),
        notes=(
            Note(
                about="utilisation",
                kind="shapes_missing",
                text="Shapes are missing on 3% of the matrix kernels' time: MFU is a lower bound.",
            ),
        ),
        step_timeline=tuple(_gpu_strip(rank, waits[rank]) for rank in ranks),
        lanes=pictures.lanes(ranks),
        curves=pictures.curves(),
        cost=pictures.cost(),
        history=pictures.history(),
    )


def _gpu_strip(rank: int, wait: float) -> StepTimeline:
    layer = (
        ("exposed_comm_wait", wait / 20),
        ("exposed_comm_transfer", 4.0),
        ("compute", (306 - wait) / 20),
        ("idle_launch", 0.45),
    )
    return strip(rank, *(layer * 20), ("idle_sync", 6.6), ("idle_host", 1.4), step=17)


def broken() -> Summary:
    """One rank of four could be read, nothing marks its steps, and the command failed."""
    return summary(
        job=job(
            4,
            (),
            ranks=(0,),
            missing_ranks=(3,),
            failures=(
                Failure(
                    rank=1,
                    path="perfscope-recording/rank-00001.capture-0.trace.json.gz",
                    error="the gzip stream ends early after 1.2 MB; record the run again",
                ),
                Failure(rank=2, path="perfscope-recording/rank-00002.capture-0.trace.json.gz", error="no events"),
            ),
            step_time_us=812_000.0,
            steps_from="nothing: no ProfilerStep annotation and no optimizer step",
            strategy="unknown",
            perturbation=None,
            unprofiled_step_us=None,
            model=None,
            batch_shape=None,
            settings={},
            exit_code=-9,
        ),
        time_breakdown=(
            breakdown(
                0,
                compute=500.0,
                exposed_comm_wait=90.0,
                exposed_comm_transfer=160.0,
                idle_host=40.0,
                idle_unknown=22.0,
                bound=True,
            ),
        ),
        collectives=(
            all_reduce(
                26_214_400, 8_200.0, None, {}, ranks=(0, 1, 2, 3), complete=False, algbw_gbps=None, busbw_gbps=None
            ),
            all_reduce(
                1,
                300.0,
                None,
                {},
                ranks=(0, 1, 2, 3),
                complete=False,
                algbw_gbps=None,
                busbw_gbps=None,
                bytes=None,
                dtype=None,
            ),
        ),
        verdict=Verdict(
            headline="Not enough to judge the job: 1 of 4 ranks could be read, and nothing marks its steps.",
            healthy=False,
            first_action="Record again, all ranks, for at least 5 steps: perfscope run --active 10 -- torchrun …",
        ),
        notes=(
            Note(
                about="collectives",
                kind="one_participant",
                text="Only one participant is in the recording: wait and transfer are bounds.",
                ranks=(0,),
            ),
        ),
    )


def nothing() -> Summary:
    """No rank could be analyzed."""
    return summary(
        job=job(
            0,
            (),
            world_size=None,
            failures=(Failure(rank=None, path="recording/trace.json", error="not JSON"),),
            command=(),
            model=None,
        ),
        verdict=Verdict(
            headline="Nothing could be analyzed: the only trace is not JSON.", healthy=False, first_action=None
        ),
    )


def large(ranks: int = 1024) -> Summary:
    """A thousand ranks on many hosts; the slowest is rank 517."""
    slow = ranks // 2 + 5

    def compute(rank: int) -> float:
        return 341.0 if rank == slow else 290.0 + 6 * math.sin(rank / 9) + rank % 7 * 0.4

    def parts(rank: int) -> dict[str, Any]:
        return {
            "compute": compute(rank),
            "exposed_comm_wait": 342.0 - compute(rank),
            "exposed_comm_transfer": 31.0,
            "exposed_copy": 1.2,
            "idle_launch": 6.0 + 2 * math.cos(rank / 40),
            "idle_host": 9.0 - 2 * math.cos(rank / 40),
        }

    group = tuple(range(ranks))
    return summary(
        job=job(
            ranks,
            tuple(389 + (31 if i == 7 else i % 3) for i in range(12)),
            hosts=tuple(f"node-{i:03d}" for i in range(ranks // 8)),
            strategy=("fsdp", "pipeline"),
            backend="nccl",
            devices=("NVIDIA H100 80GB HBM3",),
            perturbation=None,
        ),
        time_breakdown=tuple(
            breakdown(rank, hidden=80.0, host=f"node-{rank // 8:03d}", **parts(rank)) for rank in group
        ),
        clock=tuple(
            ClockRow(rank=rank, offset_us=37.0 * math.sin(rank), residual_us=2.0, aligned=rank != 9) for rank in group
        ),
        collectives=(all_reduce(536_870_912, 9_200.0, 40_000.0, {slow: 0.92, 3: 0.08}, ranks=group, group="world"),),
        stragglers=(
            StragglerRow(
                rank=slow,
                cause="compute",
                lost_us=45_500.0,
                confidence=Confidence.HIGH,
                share_of_steps=0.92,
                host=f"node-{slow // 8:03d}",
            ),
        ),
        memory=tuple(MemoryRow(rank=rank, peak_bytes=70_000_000_000, capacity_bytes=85_017_624_576) for rank in group),
        dataloader=tuple(
            DataLoaderRow(rank=rank, wait_us=55.0, blocking_us=0.0, batch_us=None, num_workers=None) for rank in group
        ),
        utilisation=Utilisation(
            mfu=0.38,
            hfu=None,
            model_flops_per_step=1.53e17,
            flops_coverage=1.0,
            peak_tflops=989.4,
            dtype="bfloat16",
            causal="half",
            why_absent=None,
        ),
        findings=(
            Finding(
                rule="straggler",
                title=f"Rank {slow} computes 45 ms longer than its peers, and {ranks - 1:,} ranks wait for it",
                severity=Severity.MEDIUM,
                evidence=(Evidence("lost per step", 45_500.0, "us", (slow,)),),
                action=Action(
                    setting=f"rank {slow}",
                    old=None,
                    new=None,
                    how=code("shell", f"scontrol update nodename=node-{slow // 8:03d} state=drain reason=slow"),
                ),
                predicted_step_us=None,
                ceiling=0.132,
                obtained=Obtained.BOUNDED,
                confidence=Confidence.HIGH,
            ),
        ),
        verdict=Verdict(
            headline=f"Rank {slow} on node-{slow // 8:03d} makes {ranks - 1:,} ranks wait: 45 ms of every 390 ms step.",
            healthy=False,
            first_action=f"Drain node-{slow // 8:03d} or find out what slows it: at most 1.13x faster.",
        ),
        step_timeline=tuple(
            strip(
                rank,
                ("compute", compute(rank) / 2),
                ("idle_host", 9.0),
                ("compute", compute(rank) / 2),
                ("exposed_comm_wait", 342 - compute(rank)),
                ("exposed_comm_transfer", 31.0),
            )
            for rank in group
        ),
    )


EXAMPLES = {
    "healthy": healthy,
    "starved": starved,
    "straggler": straggler,
    "gpu": gpu,
    "broken": broken,
    "nothing": nothing,
    "large": large,
}
"""Name -> what makes it."""
