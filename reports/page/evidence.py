"""The tables behind the verdict: who was late, collectives, cost model, data loader, memory, clocks, critical path."""

from __future__ import annotations

import math
from collections.abc import Sequence

from perfscope.reports import tables
from perfscope.reports.page.memory import memory_table
from perfscope.reports.page.tiles import peak_type
from perfscope.reports.tables import Cell, Filled, HtmlTable, written
from perfscope.results.attribution import attributed_ranks, causes, subject, who
from perfscope.results.categories import BY_ID
from perfscope.results.rows import ClockRow, CollectiveRow, CostRow, DataLoaderRow, PathRow, StragglerRow, Utilisation
from perfscope.results.summary import Summary
from perfscope.text import (
    byte_size,
    count_per_step,
    duration,
    flop,
    known,
    percent,
    plural,
    rank_list,
    significant,
)

_GROUPS_EACH_SHOWN = 3
"""Of more groups with the same collectives, those that differ are shown."""

_ALONE = "Only one rank of the group was recorded, so wait and transfer cannot be separated."
_NO_SIZE = "The size is not recorded; record shapes."
_NO_BANDWIDTH = "No bandwidth: the size is not recorded, or the transfer time is only an upper bound."


def stragglers_table(rows: Sequence[StragglerRow], step_us: float) -> HtmlTable:
    """The stragglers, the costliest first."""
    step_share = [row.lost_us / step_us if step_us > 0 else math.nan for row in rows]
    columns = [tables.words("Straggler", [who(row) for row in rows], definition="scope")]
    if any(row.host for row in rows):
        columns.append(tables.words("Host", [row.host for row in rows]))
    columns += [
        tables.words("Cause", [causes(row) for row in rows], definition="cause"),
        tables.words("Pattern", [row.pattern for row in rows], definition="pattern"),
        tables.durations("Cost per step", [row.lost_us for row in rows], definition="lost"),
        tables.column("of the step", step_share, percent, definition="lost", reason="The step time is not known."),
        tables.column("Share of steps", [row.share_of_steps for row in rows], percent, definition="share_of_steps"),
        tables.words("Confidence", [row.confidence for row in rows], definition="confidence"),
    ]
    worst = rows[0]
    several = worst.scope in ("ranks", "job")
    return tables.table(
        "stragglers",
        "Stragglers",
        columns,
        f"{subject(worst)} {'cost' if several else 'costs'} most: {_at_pace(worst, several=several)}.",
    )


def _at_pace(worst: StragglerRow, *, several: bool) -> str:
    if worst.scope == "link":
        return f"were it as quick as the others, the replayed step would be {duration(worst.lost_us)} shorter"
    whose, whom = ("their", "them") if several else ("its", "it")
    shorter = f"{duration(worst.lost_us)} shorter"
    if worst.replayed:
        return f"at {whose} peers' pace, the replayed step is {shorter}"
    return f"at {whose} peers' pace, the step is at most {shorter}: the recording does not show who waits for {whom}"


def collectives_table(rows: Sequence[CollectiveRow], steps: int) -> HtmlTable:
    """Collectives by group, kind, type and size, the costliest first."""
    ordered = sorted(rows, key=lambda row: -row.count * (row.transfer_us + (row.wait_us or 0.0)))
    columns = [
        tables.words("Kind", [row.kind.replace("_", "-") for row in ordered]),
        tables.words("Group", [_group(row) for row in ordered]),
        tables.words("Type", [row.dtype or "" for row in ordered]),
        tables.column("Size", [row.bytes for row in ordered], byte_size, reason=_NO_SIZE),
        tables.column("Count", [row.count for row in ordered], count_per_step),
        tables.durations("Wait", [row.wait_us for row in ordered], definition="wait", reason=_ALONE),
        _transfers(ordered),
        _bandwidths("Algorithm", [row.algbw_gbps for row in ordered], definition="algbw"),
        _bandwidths("Bus", [row.busbw_gbps for row in ordered], definition="busbw"),
        tables.words(
            "Last arrival",
            [_last(row) for row in ordered],
            definition="last_arriver",
            reason="Not known for this group.",
        ),
    ]
    made = tables.table("collectives", "Collectives", columns, _collectives_reading(ordered, steps))
    return tables.collapsed(made, "group", named=1, by=(0, 2, 3, 4), most=_GROUPS_EACH_SHOWN)


def cost_table(rows: Sequence[CostRow]) -> HtmlTable:
    """The fitted cost of a collective, by group and kind."""
    columns = [
        tables.words("Kind", [row.kind.replace("_", "-") for row in rows]),
        tables.words("Group", [row.group for row in rows]),
        tables.durations("α, latency", [row.alpha_us for row in rows], definition="cost_model"),
        _bandwidths("B, bus bandwidth", [row.busbw_gbps for row in rows], definition="cost_model"),
        tables.column("Residual", [row.residual for row in rows], percent, definition="residual"),
    ]
    return tables.table(
        "cost-model",
        "Collective cost model",
        columns,
        "t(S) = α + S·f(n)/B. Below the size α·B/f(n) latency dominates: fewer, larger collectives are faster.",
    )


def dataloader_table(rows: Sequence[DataLoaderRow]) -> HtmlTable:
    """Data loading per rank and step."""
    columns = [
        tables.ranks("Rank", [row.rank for row in rows]),
        tables.durations("Dataloader wait", [row.wait_us for row in rows], definition="loader_wait"),
        tables.durations("of it blocking the step", [row.blocking_us for row in rows], definition="loader_blocking"),
    ]
    batches, workers = [row.batch_us for row in rows], [row.num_workers for row in rows]
    if any(row.sampler_us for row in rows):
        columns.append(tables.durations("Sampler", [row.sampler_us for row in rows], definition="loader_sampler"))
    if any(known(batch) for batch in batches):
        reason = "The time to load one batch is not known from this recording."
        columns.append(tables.durations("Load time per batch", batches, definition="loader_batch", reason=reason))
    if any(number is not None for number in workers):
        columns.append(tables.column("Workers", workers, str, reason="The loader's settings were not recorded."))
    most = max(rows, key=lambda row: row.blocking_us)
    reading = "Data loading blocks no rank."
    if most.blocking_us > 0:
        reading = f"Data loading blocks rank {most.rank} longest: {duration(most.blocking_us)} per step."
    return tables.table("dataloader", "Data loading", columns, reading)


def clock_table(rows: Sequence[ClockRow]) -> HtmlTable:
    """The clock offset of each rank to the lowest rank's clock."""
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
        reading += f" {plural(len(unaligned), 'rank')} not aligned ({rank_list(unaligned)}), and not compared in waits."
    return tables.table("clock", "Clocks", columns, reading.strip())


def path_table(rows: Sequence[PathRow]) -> HtmlTable:
    """The critical path, added up by rank and category."""
    total: dict[tuple[int, str], float] = {}
    for row in rows:
        total[row.rank, row.category] = total.get((row.rank, row.category), 0.0) + row.us
    length = math.fsum(total.values())
    ordered = sorted(total.items(), key=lambda item: item[1], reverse=True)
    labels = [BY_ID[name].label if name in BY_ID else name for (_, name), _ in ordered]
    columns = [
        tables.ranks("Rank", [rank for (rank, _), _ in ordered]),
        tables.words("Category", labels, definition="critical_path"),
        tables.durations("Per step", [us for _, us in ordered], definition="critical_path"),
        tables.column("of the step", [us / length if length > 0 else None for _, us in ordered], percent),
    ]
    reading = "The chain of work that fixes the step time. Its parts add up to the step."
    return tables.collapsed(tables.table("critical-path", "Critical path", columns, reading), by=(1,))


def utilisation_table(utilisation: Utilisation) -> HtmlTable | None:
    """The numbers behind MFU; None where nothing is known."""
    reason = utilisation.why_absent or "Not computed from this recording."
    flops = utilisation.model_flops_per_step
    coverage, peak = utilisation.flops_coverage, utilisation.peak_tflops
    lines = [
        ("MFU", "mfu", written(percent(utilisation.mfu), utilisation.mfu, reason)),
        ("HFU", "hfu", written(percent(utilisation.hfu), utilisation.hfu, reason)),
        ("Model FLOPs per step", "model_flops", written(flop(flops), flops, reason)),
        ("FLOPs coverage", "flops_coverage", written(percent(coverage), coverage, reason)),
        (
            "Peak per device",
            "peak",
            written(f"{significant(peak or 0)} TFLOP/s {peak_type(utilisation)}".rstrip(), peak, reason),
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
        "utilisation", "Utilization", columns, f"Causal attention is {causal}.{source}" if causal else source.strip()
    )


def evidence_tables(summary: Summary) -> tuple[HtmlTable, ...]:
    """The tables that belong to no chart, in the order of the page; empty ones are left out."""
    # Tables with a row for each rank stand side by side: one beside a short table leaves a gap.
    of_ranks = [
        dataloader_table(summary.dataloader) if summary.dataloader else None,
        memory_table(summary.memory),
        clock_table(summary.clock) if len(summary.clock) > 1 else None,
    ]
    stragglers = {str(rank) for rank in attributed_ranks(summary.stragglers)}
    shown = [
        path_table(summary.critical_path) if summary.critical_path else None,
        utilisation_table(summary.utilisation),
        *(tables.collapsed(table, marked=stragglers) for table in of_ranks if table is not None),
    ]
    return tuple(table for table in shown if table is not None)


def _group(row: CollectiveRow) -> str:
    name = row.group or "unnamed"
    has_ranks = f"[{rank_list(row.ranks)}]" in name
    return f"{name} ({rank_list(row.ranks, 4)})" if row.ranks and not has_ranks else name


def _bandwidths(label: str, values: Sequence[float | None], *, definition: str) -> Filled:
    return tables.column(label, values, significant, unit="GB/s", definition=definition, reason=_NO_BANDWIDTH)


def _transfers(rows: Sequence[CollectiveRow]) -> Filled:
    """Transfer times; an upper bound where participants are missing from the recording."""
    filled = tables.durations("Transfer", [row.transfer_us for row in rows], definition="transfer")
    bound = "An upper bound: not every rank of the group was recorded."
    cells = tuple(
        cell if row.complete or cell.absent else Cell(text=f"≤ {cell.text}", order=cell.order, reason=bound)
        for cell, row in zip(filled.cells, rows, strict=True)
    )
    return Filled(column=filled.column, cells=cells)


def _last(row: CollectiveRow) -> str:
    """The ranks that come last most often: ``3 (100%)``, ``3 (60%), 1 (25%)``."""
    often = sorted(row.last_arriver.items(), key=lambda item: (-item[1], item[0]))[:2]
    return ", ".join(f"{rank} ({percent(part)})" for rank, part in often if part >= 0.1 or rank == often[0][0])


def _collectives_reading(rows: Sequence[CollectiveRow], steps: int) -> str:
    top = rows[0]
    reading = plural(sum(row.count for row in rows), "collective") + (f" in {plural(steps, 'step')}" if steps else "")
    size = f" of {byte_size(top.bytes)}" if top.bytes is not None else ""
    wait = f"{duration(top.wait_us)} wait and " if top.wait_us is not None else ""
    return (
        f"{reading}, the costliest first: {top.kind.replace('_', '-')}{size}, each {wait}"
        f"{duration(top.transfer_us)} transfer."
    )
