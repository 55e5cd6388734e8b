"""The tables behind the verdict: who was late, collectives, cost model, data loader, memory, clocks, critical path."""

from __future__ import annotations

import math
from collections.abc import Sequence

from perfscope.reports import tables
from perfscope.reports.categories import BY_NAME
from perfscope.reports.format import byte_size, duration, flop, plural, rank_list, ranks_named, share, significant
from perfscope.reports.memory import memory_table
from perfscope.reports.peak import peak_type
from perfscope.reports.tables import Cell, Filled, Table, absent, written
from perfscope.summary import (
    ClockRow,
    CollectiveRow,
    CostRow,
    DataLoaderRow,
    PathRow,
    StragglerRow,
    Summary,
    Utilisation,
)

_ALONE = "Only one participant is in the recording, so waiting cannot be told from transfer."
_NO_BANDWIDTH = "No bandwidth is claimed: the size is not recorded, or the transfer time is only bounded."


def stragglers_table(rows: Sequence[StragglerRow], step_us: float) -> Table:
    """Who made the others wait, worst first."""
    step_share = [row.lost_us / step_us if step_us > 0 else math.nan for row in rows]
    columns = [tables.words("Who", [_who(row) for row in rows], definition="scope")]
    if any(row.host for row in rows):
        columns.append(tables.words("Host", [row.host for row in rows]))
    columns += [
        tables.words("Cause", [row.cause for row in rows], definition="cause"),
        tables.words("When", [row.pattern for row in rows], definition="pattern"),
        tables.durations("Lost per step", [row.lost_us for row in rows], definition="lost"),
        tables.numbers(
            "of the step",
            [written(share(part), part, "The step time is not known.") for part in step_share],
            definition="lost",
        ),
        tables.numbers("Share of steps", [_share(row.share_of_steps) for row in rows], definition="share_of_steps"),
        tables.words("Confidence", [row.confidence for row in rows], definition="confidence"),
    ]
    worst = rows[0]
    return tables.table(
        "stragglers",
        "Who made the others wait",
        columns,
        f"Worst is {_who(worst)}: at the pace of the others the step would be {duration(worst.lost_us)} shorter, "
        "played from the recording.",
    )


def _who(row: StragglerRow) -> str:
    """The culprit in a table: a rank, or which ranks of what."""
    if row.scope in ("host", "stage"):
        return f"{row.scope}, {ranks_named(row.ranks)}"
    if row.scope == "ranks":
        return ranks_named(row.ranks)
    return f"{ranks_named(row.ranks)} in turn" if row.scope == "job" else f"rank {row.rank}"


def collectives_table(rows: Sequence[CollectiveRow], steps: int) -> Table:
    """Collectives by group, kind, type and size, the costliest first."""
    ordered = sorted(rows, key=_cost, reverse=True)
    columns = [
        tables.words("Kind", [row.kind.replace("_", "-") for row in ordered]),
        tables.words("Group", [_group(row) for row in ordered]),
        tables.words("Type", [row.dtype or "" for row in ordered]),
        tables.numbers("Size", [_size(row.bytes) for row in ordered]),
        tables.numbers("Count", [Cell(text=f"{row.count:,}", order=row.count) for row in ordered]),
        tables.durations("Wait", [row.wait_us for row in ordered], definition="wait", reason=_ALONE),
        _transfers(ordered),
        tables.numbers("Algorithm", [_rate(row.algbw_gbps) for row in ordered], unit="GB/s", definition="algbw"),
        tables.numbers("Bus", [_rate(row.busbw_gbps) for row in ordered], unit="GB/s", definition="busbw"),
        tables.words(
            "Last to arrive",
            [_last(row) for row in ordered],
            definition="last_arriver",
            reason="Not known for this group.",
        ),
    ]
    return tables.table("collectives", "Collectives", columns, _collectives_reading(ordered, steps))


def cost_table(rows: Sequence[CostRow]) -> Table:
    """The fitted cost of a collective, by group and kind."""
    columns = [
        tables.words("Kind", [row.kind.replace("_", "-") for row in rows]),
        tables.words("Group", [row.group for row in rows]),
        tables.durations("α, latency", [row.alpha_us for row in rows], definition="cost_model"),
        tables.numbers(
            "B, bus bandwidth", [_rate(row.busbw_gbps) for row in rows], unit="GB/s", definition="cost_model"
        ),
        tables.numbers("Residual", [_share(row.residual) for row in rows], definition="residual"),
    ]
    return tables.table(
        "cost-model",
        "What a collective costs",
        columns,
        "t(S) = α + S·f(n)/B. Below a size of α·B/f(n) latency costs more than bandwidth: fewer, larger ones pay.",
    )


def dataloader_table(rows: Sequence[DataLoaderRow]) -> Table:
    """Data loading per rank and step."""
    reason = "The time to load one batch cannot be told from this recording."
    workers = [
        absent("The loader's settings were not recorded.")
        if row.num_workers is None
        else Cell(text=str(row.num_workers), order=row.num_workers)
        for row in rows
    ]
    columns = [
        tables.ranks("Rank", [row.rank for row in rows]),
        tables.durations("Wait in the loader", [row.wait_us for row in rows], definition="loader_wait"),
        tables.durations("of it blocking", [row.blocking_us for row in rows], definition="loader_blocking"),
        tables.durations(
            "Time to load a batch", [row.batch_us for row in rows], definition="loader_batch", reason=reason
        ),
        tables.numbers("Workers", workers),
    ]
    most = max(rows, key=lambda row: row.blocking_us)
    reading = "Data loading holds up no rank."
    if most.blocking_us > 0:
        reading = f"The longest hold-up is {duration(most.blocking_us)} a step, on rank {most.rank}."
    return tables.table("dataloader", "Data loading", columns, reading)


def clock_table(rows: Sequence[ClockRow]) -> Table:
    """How each rank's clock was brought to the lowest rank's."""
    columns = [
        tables.ranks("Rank", [row.rank for row in rows]),
        tables.durations("Offset", [row.offset_us for row in rows], definition="offset"),
        tables.durations(
            "Residual",
            [row.residual_us for row in rows],
            definition="clock_residual",
            reason="Not aligned: this rank shares no collective with the others.",
        ),
        tables.words("Aligned", ["yes" if row.aligned else "no" for row in rows], definition="offset"),
    ]
    residuals = [row.residual_us for row in rows if row.residual_us is not None]
    unaligned = [row.rank for row in rows if not row.aligned]
    reading = f"After alignment clocks agree to {duration(max(residuals))} or better." if residuals else ""
    if unaligned and len(rows) > 1:
        reading += (
            f" {plural(len(unaligned), 'rank')} not aligned ({rank_list(unaligned)}): their waits are not compared."
        )
    return tables.table("clock", "Clocks", columns, reading.strip())


def path_table(rows: Sequence[PathRow]) -> Table:
    """The critical path, added up by rank and category."""
    total: dict[tuple[int, str], float] = {}
    for row in rows:
        total[row.rank, row.category] = total.get((row.rank, row.category), 0.0) + row.us
    length = math.fsum(total.values())
    ordered = sorted(total.items(), key=lambda item: item[1], reverse=True)
    labels = [BY_NAME[name].label if name in BY_NAME else name for (_, name), _ in ordered]
    columns = [
        tables.ranks("Rank", [rank for (rank, _), _ in ordered]),
        tables.words("What", labels, definition="critical_path"),
        tables.durations("Per step", [us for _, us in ordered], definition="critical_path"),
        tables.numbers("of the step", [_share(us / length if length > 0 else None) for _, us in ordered]),
    ]
    return tables.table(
        "critical-path", "Critical path", columns, "The work that fixes the step time; its stretches add up to it."
    )


def utilisation_table(utilisation: Utilisation) -> Table | None:
    """What MFU was computed from; None where nothing is known."""
    reason = utilisation.why_absent or "Not computed from this recording."
    flops = utilisation.model_flops_per_step
    peak = utilisation.peak_tflops
    lines = [
        ("MFU", "mfu", _share(utilisation.mfu, reason)),
        ("HFU", "hfu", _share(utilisation.hfu, reason)),
        ("Model FLOPs per step", "model_flops", written(flop(flops), flops, reason)),
        ("FLOPs coverage", "flops_coverage", _share(utilisation.flops_coverage, reason)),
        (
            "Peak of a device",
            "peak",
            written(f"{significant(peak or 0)} TFLOP/s {peak_type(utilisation)}".rstrip(" ,"), peak, reason),
        ),
    ]
    if all(cell.absent for _, _, cell in lines):
        return None
    causal = {"full": "counted in full", "half": "halved"}.get(utilisation.causal, utilisation.causal)
    source = f" Peak from: {utilisation.peak_source}." if utilisation.peak_source else ""
    columns = [
        tables.words("Number", [label for label, _, _ in lines]),
        tables.numbers("Value", [cell for _, _, cell in lines], definition="mfu"),
    ]
    return tables.table(
        "utilisation", "Utilisation", columns, f"Causal attention is {causal}.{source}" if causal else source.strip()
    )


def evidence_tables(summary: Summary) -> tuple[Table, ...]:
    """The tables that stand behind the verdict and fit no chart, in the order of the page; empty ones are left out."""
    found = [
        path_table(summary.critical_path) if summary.critical_path else None,
        utilisation_table(summary.utilisation),
        # Tables with a row for each rank stand side by side: one beside a short table leaves a gap.
        dataloader_table(summary.dataloader) if summary.dataloader else None,
        memory_table(summary.memory),
        clock_table(summary.clock) if len(summary.clock) > 1 else None,
    ]
    return tuple(table for table in found if table is not None)


def _cost(row: CollectiveRow) -> float:
    return row.count * (row.transfer_us + (row.wait_us or 0.0))


def _group(row: CollectiveRow) -> str:
    name = row.group or "unnamed"
    named = "[" + ",".join(str(rank) for rank in row.ranks) + "]" in name.replace(" ", "")
    return f"{name} ({rank_list(row.ranks, 4)})" if row.ranks and not named else name


def _size(size: int | None) -> Cell:
    return written(byte_size(size), size, "The size is not recorded; record with shapes on.")


def _rate(value: float | None) -> Cell:
    return written(significant(value or 0.0), value, _NO_BANDWIDTH)


def _share(value: float | None, reason: str = "not known") -> Cell:
    return written(share(value), value, reason)


def _transfers(rows: Sequence[CollectiveRow]) -> Filled:
    """Transfer times; an upper bound where participants are missing from the recording."""
    filled = tables.durations("Transfer", [row.transfer_us for row in rows], definition="transfer")
    bound = "An upper bound: not every participant is in the recording."
    cells = tuple(
        cell if row.complete or cell.absent else Cell(text=f"≤ {cell.text}", order=cell.order, reason=bound)
        for cell, row in zip(filled.cells, rows, strict=True)
    )
    return Filled(column=filled.column, cells=cells)


def _last(row: CollectiveRow) -> str:
    """The ranks that come last most often: ``3 (100%)``, ``3 (60%), 1 (25%)``."""
    often = sorted(row.last_arriver.items(), key=lambda item: (-item[1], item[0]))[:2]
    return ", ".join(f"{rank} ({share(part)})" for rank, part in often if part >= 0.1 or rank == often[0][0])


def _collectives_reading(rows: Sequence[CollectiveRow], steps: int) -> str:
    top = rows[0]
    reading = f"Costliest first. {plural(sum(row.count for row in rows), 'collective')}"
    reading += f" in {plural(steps, 'step')}" if steps else ""
    size = f" of {byte_size(top.bytes)}" if top.bytes is not None else ""
    reading += f"; at the top {top.kind.replace('_', '-')}{size} with {duration(top.transfer_us)} of transfer"
    if top.wait_us is not None:
        reading += f" and {duration(top.wait_us)} of waiting before it"
    return reading + ", each."
