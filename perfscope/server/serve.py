"""The tools as a server of the Model Context Protocol, over standard input and output or HTTP on this machine alone."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import anyio.from_thread
from mcp.server.mcpserver import Context, MCPServer
from mcp.server.mcpserver.exceptions import ToolError
from mcp.server.mcpserver.tools import Tool
from mcp.types import CallToolResult, TextContent, ToolAnnotations

from perfscope._version import __version__
from perfscope.errors import PerfscopeError
from perfscope.server import pages
from perfscope.server.answers import Answer
from perfscope.server.changes import ChangeTools
from perfscope.server.folder import Folder
from perfscope.server.opened import PROGRESS, Analyses
from perfscope.server.overview import OverviewTools
from perfscope.server.pages import Question, Room
from perfscope.server.prompts import PROMPTS
from perfscope.server.ranks import RankTools
from perfscope.server.run import RunTools
from perfscope.server.schemas import as_json, schema_of
from perfscope.server.tool import Cursor, MaxRows, Spec, Tools, spec_of
from perfscope.server.work import WorkTools

INSTRUCTIONS: Final = (
    "PerfScope analyzes recordings of distributed training jobs: where each step's time went, which rank the others "
    "wait for and why, and what a change would bring. Call list_recordings first, then summary of a recording. Times "
    "are in µs, shares 0..1, deltas candidate - baseline. A list continues where next_cursor is not null: ask again "
    "with it as cursor. null means that the recording does not show the number: do not guess it."
)
_SUBJECTS: Final[tuple[type[Tools], ...]] = (OverviewTools, RankTools, WorkTools, ChangeTools, RunTools)
_LONGEST_ERROR: Final = 2_000
_HOST: Final = "127.0.0.1"
"""Recordings are the user's own: nobody on the network is served."""


def server(
    folder: Path, *, anonymize: bool = False, limit: int = pages.DEFAULT_CHARACTERS, workers: int | None = None
) -> MCPServer[Any]:
    """A server over the recordings in ``folder``, whose answers have at most ``limit`` characters.

    ``anonymize`` hides names as ``perfscope analyze --anonymize`` does; ``workers`` bounds the processes that read
    traces. Raises UnusableInput where there is no such folder.
    """
    opened = Folder(folder, anonymize=anonymize)
    analyses = Analyses(anonymize=anonymize, workers=workers)
    made = MCPServer[Any](
        "perfscope",
        title="PerfScope",
        instructions=INSTRUCTIONS,
        version=__version__,
        tools=[_tool(method, spec, opened, limit) for method, spec in _methods(opened, analyses)],
        log_level="WARNING",
    )
    for prompt in PROMPTS:
        made.prompt(title=inspect.getdoc(prompt))(prompt)
    return made


def serve(made: MCPServer[Any], port: int | None = None) -> None:
    """Answer until the client closes standard input; with ``port``, over HTTP on this machine until interrupted."""
    if port is None:
        made.run("stdio")
    else:
        made.run("streamable-http", host=_HOST, port=port)


def _methods(folder: Folder, analyses: Analyses) -> Iterator[tuple[Callable[..., Answer], Spec]]:
    for subject in _SUBJECTS:
        tools = subject(folder, analyses)
        for name in vars(subject):
            method = getattr(tools, name)
            spec = spec_of(method)
            if spec is not None:
                yield method, spec


def _tool(method: Callable[..., Answer], spec: Spec, folder: Folder, limit: int) -> Tool:
    """A tool whose answers are bounded, and whose failures say what to do."""

    @functools.wraps(method)
    def call(**arguments: Any) -> CallToolResult:
        context: Context[Any] = arguments.pop("context")
        PROGRESS.set(lambda done, total: _report(context, done, total))
        try:
            document = _document(method, spec, arguments, limit)
        except PerfscopeError as error:
            text = folder.plain(str(error))
            raise ToolError(text if len(text) <= _LONGEST_ERROR else f"{text[:_LONGEST_ERROR]}…") from error
        return CallToolResult(
            content=[TextContent(type="text", text=pages.text_of(document))], structured_content=document
        )

    call.__signature__ = _signature(method, spec)  # type: ignore[attr-defined]
    made = Tool.from_function(
        call,
        name=method.__name__,
        title=spec.title,
        description=inspect.getdoc(method),
        context_kwarg="context",
        annotations=ToolAnnotations(
            read_only_hint=True, destructive_hint=False, idempotent_hint=True, open_world_hint=False
        ),
        structured_output=False,
    )
    known = made.fn_metadata.arg_model
    # An argument that no tool has is a mistake of the caller, who would take the answer for that to another question.
    made.fn_metadata.arg_model = type(known.__name__, (known,), {"model_config": {"extra": "forbid"}})
    made.parameters = made.fn_metadata.arg_model.model_json_schema(by_alias=True)
    made.fn_metadata.output_schema = output_schema(spec)
    return made


def _signature(method: Callable[..., Answer], spec: Spec) -> inspect.Signature:
    """The method's parameters; of a tool with rows, those that turn pages too."""
    own = inspect.signature(method, eval_str=True)
    paging = {"max_rows": MaxRows, "cursor": Cursor} if spec.rows else {}
    more = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=kind)
        for name, kind in paging.items()
    ]
    return own.replace(parameters=[*own.parameters.values(), *more])


def _document(method: Callable[..., Answer], spec: Spec, arguments: dict[str, Any], limit: int) -> dict[str, Any]:
    asked = dict(arguments)
    cursor, most = asked.pop("cursor", None), asked.pop("max_rows", None)
    answer = method(**asked)
    fixed = as_json(answer.fixed)
    if not spec.rows:
        return pages.whole(fixed, limit)
    question = Question(method.__name__, asked, answer.state)
    return pages.page(fixed, answer.rows, answer.to_json, question, cursor, Room(characters=limit, rows=most))


def output_schema(spec: Spec) -> dict[str, Any]:
    """The JSON Schema of a tool's answers."""
    schema = schema_of(spec.head)
    if not spec.rows:
        return schema
    definitions = dict(schema.get("$defs", {}))
    kinds = []
    for row in spec.rows:
        definitions |= row.get("$defs", {})
        kinds.append({key: value for key, value in row.items() if key != "$defs"})
    listed = {
        "total": {"type": "integer", "description": "Rows in all."},
        "rows": {"type": "array", "items": kinds[0] if len(kinds) == 1 else {"anyOf": kinds}},
        "next_cursor": {
            "type": ["string", "null"],
            "description": "Give it as cursor to have the rows that follow; null: these were the last.",
        },
    }
    whole = {**schema, "properties": {**schema["properties"], **listed}, "required": [*schema["required"], *listed]}
    return {**whole, "$defs": definitions} if definitions else whole


def _report(context: Context[Any], done: int, total: int) -> None:
    """Tell a client that asked for progress how many traces are read, so that it waits for long analyses."""
    anyio.from_thread.run(context.report_progress, done, total, "traces read")
