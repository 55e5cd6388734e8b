"""Reference pages made from the code: commands of click, numbers of the fields' metadata, keys of the JSON Schemas."""

from __future__ import annotations

import importlib
from typing import Any, Final

import click

import perfscope
from perfscope.cli.main import VERBS, main
from perfscope.cli.schema import SCHEMAS
from perfscope.results.comparison import Comparison
from perfscope.results.fields import classes_of, fields_of
from perfscope.results.summary import Summary

MADE: Final = "This page is made from the code as the site is built."


def command_line() -> str:
    """The help of every command."""
    parts = [
        "# Help of every command",
        f"{MADE} [The command line](../cli.md) explains the options.",
        _help("perfscope", main),
    ]
    for verb in VERBS:
        command = importlib.import_module(f"perfscope.cli.{verb}").command
        parts += [f"## perfscope {verb}", _help(f"perfscope {verb}", command)]
    return "\n\n".join(parts) + "\n"


def _help(name: str, command: click.Command) -> str:
    context = click.Context(command, info_name=name, terminal_width=100, max_content_width=100)
    return f"```text\n{command.get_help(context)}\n```"


def python() -> str:
    """The public API, for mkdocstrings."""
    parts = ["# Python API", f"{MADE} [Python and tables](../api.md) has examples, and every table."]
    for name in sorted(set(perfscope.__all__) - {"__version__"}):
        found = getattr(perfscope, name)
        parts.append(f"::: {found.__module__}.{found.__qualname__}")
    return "\n\n".join(parts) + "\n"


def numbers() -> str:
    """Every number with a unit: what it is, and which table or object it stands in."""
    rows: dict[tuple[str, str, str], list[str]] = {}
    for kind in sorted(classes_of(Summary) | classes_of(Comparison), key=lambda each: each.__name__):
        for field in fields_of(kind).values():
            if field.unit and field.meaning:
                rows.setdefault((field.name, field.unit, field.meaning), []).append(kind.__name__)
    lines = [
        f"| `{name}` | {unit} | {_cell(meaning)} | {', '.join(f'`{kind}`' for kind in kinds)} |"
        for (name, unit, meaning), kinds in sorted(rows.items())
    ]
    head = ["| number | unit | definition | in |", "|---|---|---|---|"]
    text = f"{MADE} [What every number means](../metrics.md) has them in context."
    return "\n\n".join(["# Every number", text, "\n".join([*head, *lines])]) + "\n"


def schemas() -> str:
    """The keys of every schema."""
    parts = ["# Every key", f"{MADE} [JSON Schemas](../schemas/README.md) has the files."]
    for name, (what, make) in SCHEMAS.items():
        parts += [f"## {name}", f"{what[0].upper()}{what[1:]}. [Schema](../schemas/{name}.json)"]
        for kind, defined in sorted(make()["$defs"].items()):
            if defined.get("properties"):
                parts += [
                    f"### {name}: {kind}",
                    _cell(str(defined.get("description", ""))),
                    _keys(defined["properties"]),
                ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _keys(properties: dict[str, Any]) -> str:
    rows = [
        f"| `{key}` | {_type(of)} | {of.get('unit', '')} | {_cell(of.get('description', ''))} |"
        for key, of in properties.items()
    ]
    return "\n".join(["| key | type | unit | meaning |", "|---|---|---|---|", *rows])


def _type(of: dict[str, Any]) -> str:
    """The type in a word or two: ``number or null``, ``array of StepTimeline``."""
    if "$ref" in of:
        return str(of["$ref"]).rsplit("/", 1)[-1]
    if "const" in of:
        return f"`{of['const']}`"
    if "anyOf" in of:
        return " or ".join(_type(each) for each in of["anyOf"])
    if "enum" in of:
        return ", ".join(f"`{each}`" for each in of["enum"])
    if of.get("type") == "array" and isinstance(of.get("items"), dict):
        return f"array of {_type(of['items'])}"
    kinds = of.get("type", "any")
    return " or ".join(kinds) if isinstance(kinds, list) else str(kinds)


def _cell(text: str) -> str:
    return text.replace("``", "`").replace("|", "\\|").replace("\n", " ")
