"""Parts of the examples that only charts show: lanes of one step, what-if curves, cost, the history of the run."""

from __future__ import annotations

from collections.abc import Sequence

from perfscope.results.cost import Cost, SavingRow
from perfscope.results.history import History, HistoryBin, OutlierStep, RankHistory
from perfscope.results.tables import CurvePoint, CurveRow, Lane


def lanes(
    ranks: Sequence[int], step: int = 17, kernel: str = "sm90_xmma_gemm_bf16", group: str = "fsdp"
) -> tuple[Lane, ...]:
    """Of each rank a product, a run of short kernels, a gather that waits for rank 6, and the host's operators."""
    shown = []
    for rank in ranks:
        wait = 0.0 if rank == 6 else 9_000.0 + rank
        shown += [
            Lane(
                rank=rank, step=step, kind="compute", start_us=(0.0, 300_000.0), duration_us=(290_000.0, 60_000.0),
                texts=(kernel, "aten::mm", "elementwise"), name=(0, 2), operator=(1, None), events=(1, 40),
                busy_us=(290_000.0, 15_000.0),
            ),
            Lane(
                rank=rank, step=step, kind="communication", start_us=(100_000.0,), duration_us=(50_000.0,),
                texts=("all_gather", group), name=(0,), operator=(None,), events=(1,), busy_us=(50_000.0,), group=(1,),
                bytes=(404_750_336,), wait_us=(wait,),
            ),
            Lane(
                rank=rank, step=step, kind="host", start_us=(1_000.0,), duration_us=(250_000.0,),
                texts=("aten::linear",), name=(0,), operator=(None,), events=(1,), busy_us=(250_000.0,),
            ),
        ]  # fmt: skip
    return tuple(shown)


def curves(setting: str = "dataloader.num_workers") -> tuple[CurveRow, ...]:
    """Workers that help up to four."""
    steps = {0: 500_000.0, 1: 455_000.0, 2: 425_000.0, 4: 412_000.0, 8: 412_000.0}
    points = tuple(
        CurvePoint(value=value, low_us=0.97 * mid, mid_us=mid, high_us=1.05 * mid) for value, mid in steps.items()
    )
    return (CurveRow(setting=setting, unit="workers", current=1, best=4, points=points),)


def cost(currency: str = "USD") -> Cost:
    """Eight devices at 2.50 per hour, and what the first two findings save."""
    rows = tuple(
        SavingRow(finding=at, rule="rule", per_day=saved, per_day_low=low, per_day_high=high, bounded=low is None)
        for at, (saved, low, high) in enumerate(((48.0, None, None), (31.5, 28.0, 33.0)))
    )
    return Cost(
        price_per_device_hour=2.5, currency=currency, devices=8, step_time_us=412_000.0, per_step=0.00229,
        per_1000_steps=2.29, per_day=480.0, savings=rows,
    )  # fmt: skip


def history(stage: str = "dataloader") -> History:
    """1,000 steps that became a tenth slower, with one outlier."""
    mean = {"forward": 150_000.0, "backward": 200_000.0, "dataloader": 70_000.0}
    rank = RankHistory(
        rank=0, host="node-a", attempt=0, earlier_steps=0, first_step=0, last_step=999, steps=1000, disturbed_steps=0,
        lost_steps=0, mean_us=420_000.0, median_us=412_000.0, p95_us=450_000.0, p99_us=480_000.0, max_us=1_300_000.0,
        stages_us=mean, outlier_steps=1, trend=0.1,
    )  # fmt: skip
    bins = tuple(
        HistoryBin(first_step=at, last_step=at + 99, median_us=400_000.0 + 40 * at, max_us=450_000.0 + 40 * at)
        for at in range(0, 1000, 100)
    )
    outlier = OutlierStep(step=412, us=1_300_000.0, ratio=3.1, ranks=(0, 1), rank=0, stage=stage)
    return History(ranks=(rank,), bins=bins, outliers=(outlier,), slow_ranks=())
