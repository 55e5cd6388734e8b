"""The official client against a server: over standard input and output, or in this process."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import anyio
from mcp import Client
from mcp.types import CallToolResult, TextContent

Result = TypeVar("Result")


def ask(server: Any, work: Callable[[Client], Awaitable[Result]]) -> Result:
    """What ``work`` returns, with a client connected to ``server``."""

    async def connected() -> Result:
        async with Client(server) as client:
            return await work(client)

    # In a thread of its own: a browser's tests may have left an event loop in this one.
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(anyio.run, connected).result()


def call(server: Any, tool: str, **arguments: Any) -> dict[str, Any]:
    """One tool's answer, which the client has checked against the tool's schema. Fails where it is an error."""
    return document(ask(server, lambda client: client.call_tool(tool, arguments)))


def refusal(server: Any, tool: str, **arguments: Any) -> str:
    """The message of a call that must fail."""
    result = ask(server, lambda client: client.call_tool(tool, arguments))
    assert result.is_error, result
    return text_of(result)


def document(result: CallToolResult) -> dict[str, Any]:
    """An answer, whose text is the JSON of its structured content."""
    assert not result.is_error, result.content
    assert isinstance(result.structured_content, dict)
    assert json.loads(text_of(result)) == result.structured_content
    return result.structured_content


def text_of(result: CallToolResult) -> str:
    """The only block of a result."""
    (block,) = result.content
    assert isinstance(block, TextContent)
    return block.text
