"""``perfscope schema``: the JSON Schema of each file and answer in JSON."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import click

from perfscope.cli.outputs import write_json


def _summary() -> dict[str, Any]:
    from perfscope.results.schema import json_schema

    return json_schema()


def _comparison() -> dict[str, Any]:
    from perfscope.results import comparison, schema

    return schema.schema_of(comparison.Comparison, "comparison", comparison.SCHEMA)


def _check() -> dict[str, Any]:
    from perfscope.results import budget, schema

    more = {"passed": {"type": "boolean", "description": "No check failed."}}
    return schema.schema_of(budget.Check, "check", budget.SCHEMA, more=more)


def _whatif() -> dict[str, Any]:
    from perfscope.cli import answers
    from perfscope.results import schema

    return schema.schema_of(answers.WhatIf, "whatif", answers.WHATIF_SCHEMA)


def _sweep() -> dict[str, Any]:
    from perfscope.cli import answers
    from perfscope.results import schema

    return schema.schema_of(answers.Sweep, "sweep", answers.SWEEP_SCHEMA)


def _tune() -> dict[str, Any]:
    from perfscope.results.schema import schema_of
    from perfscope.tune import document

    return schema_of(document.Tune, "tune", document.SCHEMA, renamed=("TuneSetting",))


def _doctor() -> dict[str, Any]:
    from perfscope.cli import answers
    from perfscope.results import schema

    return schema.schema_of(answers.Doctor, "doctor", answers.DOCTOR_SCHEMA)


def _hang() -> dict[str, Any]:
    from perfscope.results.hang import Hang
    from perfscope.results.schema import schema_of

    return schema_of(Hang, "hang", "")


def _history() -> dict[str, Any]:
    from perfscope.results.history import History
    from perfscope.results.schema import schema_of

    return schema_of(History, "history", "")


def _run() -> dict[str, Any]:
    from perfscope.recording.metadata import RUN_SCHEMA, RunMetadata
    from perfscope.results.schema import schema_of

    return schema_of(RunMetadata, "run", RUN_SCHEMA)


def _launch() -> dict[str, Any]:
    from perfscope.recording.metadata import LAUNCH_SCHEMA, LaunchMetadata
    from perfscope.results.schema import schema_of

    return schema_of(LaunchMetadata, "launch", LAUNCH_SCHEMA)


def _compiled() -> dict[str, Any]:
    from perfscope.recording import compiled
    from perfscope.results.schema import schema_of

    return schema_of(compiled.CompiledCode, "compiled", compiled.SCHEMA)


def _samples() -> dict[str, Any]:
    from perfscope.recording import samples
    from perfscope.results.schema import ADDRESS, DIALECT, schema_of

    number, whole = {"type": "number"}, {"type": "integer"}
    more = {
        "perfscope_version": {"type": "string"},
        "period_s": {**number, "description": "Seconds between two samples."},
        "started_ns": {**whole, "description": "ns since 1970."},
    }
    header = schema_of(samples.SamplerHeader, "samples", samples.SCHEMA, more=more)
    unread = {
        "SamplerHeader": ("swap_bytes",),
        "SampledDevice": ("memory_mhz_max", "pcie_generation", "pcie_generation_max"),
    }
    for kind, keys in unread.items():
        header["$defs"][kind]["properties"] |= {key: {"type": ["integer", "null"]} for key in keys}
    process = schema_of(samples.SampledProcess, "samples", "")
    row = {"type": "array", "items": {"type": ["number", "null"]}}
    rows = {"type": "array", "items": row}
    return {
        "$schema": DIALECT,
        "$id": f"{ADDRESS}samples.json",
        "title": "Line of host-*.samples.jsonl",
        "description": "Each line is one JSON value: who samples, a process met, a problem, or a sample.",
        "anyOf": [
            {"$ref": header["$ref"]},
            {"$ref": process["$ref"]},
            {"type": "object", "properties": {"problem": {"type": "string"}}, "required": ["problem"]},
            {
                "type": "array",
                "description": "A sample: time in ns since 1970, the host's values, those of each device, and process "
                "id and values of each process, in the order of the header's columns.",
                "prefixItems": [whole, row, rows, rows],
                "minItems": 4,
                "maxItems": 4,
            },
        ],
        "$defs": {**header["$defs"], **process["$defs"]},
    }


def _live() -> dict[str, Any]:
    from perfscope.analyzers.live.state import LiveState
    from perfscope.reports.live.line import SCHEMA
    from perfscope.results.schema import schema_of

    return schema_of(LiveState, "live", SCHEMA, more={"perfscope_version": {"type": "string"}})


SCHEMAS: Final[dict[str, tuple[str, Callable[[], dict[str, Any]]]]] = {
    "summary": ("perfscope analyze --json, and Summary.to_dict", _summary),
    "hang": ("hang in the summary: why a job stands still", _hang),
    "history": ("history in the summary: the steps of the whole run", _history),
    "comparison": ("perfscope compare --json", _comparison),
    "check": ("perfscope check --json", _check),
    "whatif": ("perfscope whatif --set … --json", _whatif),
    "sweep": ("perfscope whatif --sweep … --json", _sweep),
    "tune": ("tune.json, written by perfscope tune", _tune),
    "doctor": ("perfscope doctor --json", _doctor),
    "live": ("a line of perfscope watch --json", _live),
    "launch": ("perfscope.json of a recording", _launch),
    "run": ("rank-*.run.json of a recording: one rank's metadata", _run),
    "compiled": ("rank-*.compiled.json of a recording: where compiled code comes from", _compiled),
    "samples": ("a line of host-*.samples.jsonl of a recording", _samples),
}
"""Name -> (what follows it, how it is made)."""


@click.command("schema")
@click.argument("name", type=click.Choice(list(SCHEMAS)), required=False)
@click.option(
    "--output",
    "-o",
    type=click.Path(file_okay=False, path_type=Path),
    metavar="DIR",
    help="Write every schema into DIR, as NAME.json.",
)
def command(name: str | None, output: Path | None) -> None:
    """Print the JSON Schema of what PerfScope writes or prints as JSON. Without NAME, list the names.

    \b
    perfscope schema summary > summary.schema.json
    perfscope schema --output schemas
    """
    if output is not None:
        output.mkdir(parents=True, exist_ok=True)
    for each, (what, make) in SCHEMAS.items():
        if output is not None and name in (None, each):
            write_json(output / f"{each}.json", make(), "--output")
        elif output is None and name == each:
            write_json(Path("-"), make(), "--output")
        elif name is None:
            click.echo(f"{each:<12} {what}")
