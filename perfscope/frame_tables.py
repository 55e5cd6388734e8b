"""Which tables a summary has as DataFrames, and what makes each: its columns and its rows."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cache
from typing import Any, Final

from perfscope import frame_rows
from perfscope.frame_columns import Column, columns_of
from perfscope.summary import (
    AccountRow,
    ClockRow,
    CollectiveRow,
    CostRow,
    DataLoaderRow,
    Failure,
    FindingRow,
    Job,
    MemoryRow,
    Note,
    PathRow,
    Plan,
    Replay,
    StragglerRow,
    Summary,
    Utilisation,
)
from perfscope.summary_cost import Cost, SavingRow
from perfscope.summary_history import HistoryBin, OutlierStep, RankHistory, SlowRank
from perfscope.summary_system import DeviceRow, HostRow, ProcessRow
from perfscope.summary_tables import GroupRow, KernelRow, LaunchRow, ModuleRow, OperatorRow, Pipeline, StageRow


@cache
def columns(name: str) -> tuple[Column, ...]:
    """The columns of a table, in order."""
    return TABLES[name][0]()


def rows(name: str, summary: Summary) -> Iterable[Any]:
    """The rows of a table."""
    return TABLES[name][1](summary)


def _rows(kind: type, **options: Any) -> Callable[[], tuple[Column, ...]]:
    return lambda: columns_of(kind, **options)


def _findings() -> tuple[Column, ...]:
    """Of a finding, with the predicted step times, a mapping by name, spread out."""
    plain = columns_of(
        FindingRow,
        without=("evidence", "predicted_step_us"),
        renamed={"action_old": "action_from", "action_new": "action_to"},
    )
    predicted = tuple(
        Column(f"predicted_step_us_{name}", "float64", "µs", f"Predicted step time, {said} estimate.", _predicted(name))
        for name, said in (("low", "lowest"), ("mid", "middle"), ("high", "highest"))
    )
    at = [column.name for column in plain].index("ceiling")
    return (*plain[:at], *predicted, *plain[at:])


def _predicted(name: str) -> Callable[[FindingRow], float | None]:
    return lambda row: None if row.predicted_step_us is None else row.predicted_step_us.get(name)


TABLES: Final[dict[str, tuple[Callable[[], tuple[Column, ...]], Callable[[Summary], Iterable[Any]]]]] = {
    "job": (
        _rows(
            Job,
            without=("failures", "step_time_us_per_step", "account_us_per_step", "model", "settings", "versions"),
        ),
        lambda summary: (summary.job,),
    ),
    "steps": (_rows(frame_rows.StepRow), frame_rows.steps),
    "accounting": (_rows(AccountRow, without=("named_host_us", "own_us_per_step")), lambda summary: summary.accounting),
    "named_host": (_rows(frame_rows.NamedHostRow), frame_rows.named_host),
    "clock": (_rows(ClockRow), lambda summary: summary.clock),
    "collectives": (
        _rows(CollectiveRow, without=("last_arriver", "transfer_us_per_step")),
        lambda summary: summary.collectives,
    ),
    "last_arrivers": (_rows(frame_rows.LastArriverRow), frame_rows.last_arrivers),
    "cost_model": (_rows(CostRow), lambda summary: summary.cost_model),
    "groups": (_rows(GroupRow), lambda summary: summary.groups),
    "stragglers": (_rows(StragglerRow), lambda summary: summary.stragglers),
    "critical_path": (_rows(PathRow), lambda summary: summary.critical_path or ()),
    "dataloader": (_rows(DataLoaderRow), lambda summary: summary.dataloader),
    "utilisation": (_rows(Utilisation, without=("flops_by_dtype",)), lambda summary: (summary.utilisation,)),
    "flops_by_dtype": (_rows(frame_rows.FlopsRow), frame_rows.flops_by_dtype),
    "memory": (_rows(MemoryRow), lambda summary: summary.memory),
    "memory_timeline": (_rows(frame_rows.MemoryPointRow), frame_rows.memory_timeline),
    "kernels": (_rows(KernelRow), lambda summary: summary.kernels),
    "operators": (_rows(OperatorRow), lambda summary: summary.operators),
    "modules": (_rows(ModuleRow), lambda summary: summary.modules),
    "launches": (_rows(LaunchRow), lambda summary: summary.launches),
    "plan": (_rows(Plan), lambda summary: () if summary.plan is None else (summary.plan,)),
    "curves": (_rows(frame_rows.CurvePointRow), frame_rows.curves),
    "pipeline": (
        _rows(Pipeline, without=("stages",)),
        lambda summary: () if summary.pipeline is None else (summary.pipeline,),
    ),
    "stages": (_rows(StageRow), lambda summary: () if summary.pipeline is None else summary.pipeline.stages),
    "history": (_rows(HistoryBin), lambda summary: summary.history.bins if summary.history else ()),
    "history_ranks": (
        _rows(RankHistory, without=("stages_us",)),
        lambda summary: summary.history.ranks if summary.history else (),
    ),
    "history_stages": (_rows(frame_rows.HistoryStageRow), frame_rows.history_stages),
    "outlier_steps": (_rows(OutlierStep), lambda summary: summary.history.outliers if summary.history else ()),
    "slow_ranks": (_rows(SlowRank), lambda summary: summary.history.slow_ranks if summary.history else ()),
    "hosts": (_rows(HostRow), lambda summary: summary.system.hosts if summary.system else ()),
    "devices": (
        _rows(DeviceRow, without=("throttled",)),
        lambda summary: summary.system.devices if summary.system else (),
    ),
    "throttled": (_rows(frame_rows.ThrottledRow), frame_rows.throttled),
    "processes": (_rows(ProcessRow), lambda summary: summary.system.processes if summary.system else ()),
    "system_timeline": (_rows(frame_rows.SystemPointRow), frame_rows.system_timeline),
    "cost": (
        _rows(Cost, without=("savings", "plan")),
        lambda summary: () if summary.cost is None else (summary.cost,),
    ),
    "savings": (_rows(SavingRow), frame_rows.savings),
    "replay": (_rows(Replay), lambda summary: (summary.replay,)),
    "findings": (_findings, lambda summary: summary.findings),
    "evidence": (_rows(frame_rows.EvidenceOfRow), frame_rows.evidence),
    "notes": (_rows(Note), lambda summary: summary.notes),
    "failures": (_rows(Failure), lambda summary: summary.job.failures),
    "strips": (_rows(frame_rows.StretchRow), frame_rows.strips),
    "lanes": (_rows(frame_rows.LaneEventRow), frame_rows.lanes),
}
"""Name of a table -> (its columns, its rows)."""
