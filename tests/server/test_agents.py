"""The configurations of agents in docs/mcp.md: each starts the server as it is written, and the server answers."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import anyio
import pytest
from mcp import Client, StdioServerParameters

from tests.server.client import document

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

FOLDER = "/data/recordings"
"""The folder of the documentation."""
AGENTS = {"claude", "codex", "gemini", "code"}


def of_command(line: str) -> list[str]:
    """The words with which an agent starts the server after it was added by this command."""
    agent, *words = shlex.split(line)
    if agent == "code":
        assert words[0] == "--add-mcp"
        server = json.loads(words[1])
        return [server["command"], *server["args"]]
    assert words[:2] == ["mcp", "add"]
    # Name, then the command: after -- where the agent has options of its own to tell from the server's.
    return words[4:] if words[3] == "--" else words[3:]


def documented(text: str) -> dict[str, list[str]]:
    """What is configured -> the words that start the server."""
    found = {line.split()[0]: of_command(line) for line in re.findall(r"^\| [\w ]+ \| `(.+)` \|$", text, re.MULTILINE)}
    for language, block in re.findall(r"^```(json|toml)\n(.*?)^```", text, re.MULTILINE | re.DOTALL):
        (key, servers), *others = (json if language == "json" else tomllib).loads(block).items()
        assert not others
        server = servers["perfscope"]
        assert server.get("type", "stdio") == "stdio"
        found[key] = [server["command"], *server["args"]]
    return found


@pytest.fixture(scope="module")
def commands(root: Path) -> dict[str, list[str]]:
    return documented((root / "docs" / "mcp.md").read_text(encoding="utf-8"))


def test_every_agent_has_its_configuration(commands: dict[str, list[str]]) -> None:
    assert set(commands) == AGENTS | {"mcpServers", "servers", "mcp_servers"}
    assert set(map(tuple, commands.values())) == {("perfscope", "mcp", FOLDER)}


def test_the_configured_command_starts_a_server_that_answers(
    commands: dict[str, list[str]], samples: Path, tmp_path: Path
) -> None:
    """As agents do it: from a folder of their own, with nothing but the program's name and a path."""
    (words,) = {tuple(words) for words in commands.values()}
    program = shutil.which(words[0], path=str(Path(sys.executable).parent))
    assert program is not None, "the command perfscope is not installed in this environment"
    arguments = [str(samples) if word == FOLDER else word for word in words[1:]]
    # The sources of this checkout, where the environment has others.
    environment = dict(os.environ) | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    parameters = StdioServerParameters(command=program, args=arguments, env=environment, cwd=tmp_path)

    async def asked() -> tuple[str, list[str], str]:
        async with Client(parameters) as client:
            named = client.server_info.name
            listed = document(await client.call_tool("list_recordings", {}))
            answer = document(await client.call_tool("summary", {"recording": "starved"}))
            return named, [row["recording"] for row in listed["rows"]], answer["headline"]

    with ThreadPoolExecutor(1) as pool:
        name, recordings, headline = pool.submit(anyio.run, asked).result()
    assert name == "perfscope"
    assert {"healthy", "slow_rank", "starved"} <= set(recordings)
    assert "Data loading" in headline
