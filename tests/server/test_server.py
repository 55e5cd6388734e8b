"""The server: transports, bounded answers page by page, schemas, refusals, names that are hidden, analyses kept."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from mcp import Client, StdioServerParameters

from perfscope.analyzers import analyze as analyzing
from perfscope.recording import paths
from perfscope.server.pages import DEFAULT_CHARACTERS, LEAST_CHARACTERS, text_of
from perfscope.server.serve import server
from tests.generator import JobSpec, SlowCompute, simulate
from tests.server.client import ask, call, document, refusal
from tests.waiting import PATIENCE_S, free_port, until

PAGED = (
    ("list_recordings", {}),
    ("findings", {"recording": "job"}),
    ("time_breakdown", {"recording": "job"}),
    ("stragglers", {"recording": "job"}),
    ("steps", {"recording": "job"}),
    ("step", {"recording": "job", "step": 10}),
    ("kernels", {"recording": "job"}),
    ("operators", {"recording": "job"}),
    ("collectives", {"recording": "job"}),
    ("memory", {"recording": "job"}),
    ("data_loading", {"recording": "job"}),
    ("list_tables", {"recording": "job"}),
    ("what_if_settings", {}),
    ("define", {"term": "rank"}),
    ("hang", {"recording": "job"}),
    ("what_if", {"recording": "job", "settings": {"network.bandwidth": "2x"}}),
    ("compare", {"baseline": "job", "candidate": "job", "part": "ranks"}),
    *(("table", {"recording": "job", "table": name}) for name in ("clock", "lanes", "launches", "job", "groups")),
)
"""A call of every tool with rows that this job can answer."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, samples: Path) -> Path:
    """A folder with one recording."""
    place = tmp_path_factory.mktemp("served")
    for file in (samples / "slow_rank").iterdir():
        target = place / "slow_rank" / file.name
        target.parent.mkdir(exist_ok=True)
        target.write_bytes(file.read_bytes())
    return place


@pytest.fixture(scope="module")
def served(folder: Path) -> Any:
    return server(folder)


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Any:
    place = tmp_path_factory.mktemp("jobs")
    simulate(JobSpec(ranks=4, steps=5, causes=(SlowCompute(ranks=(3,), factor=1.3),))).write(place / "job")
    return server(place, limit=LEAST_CHARACTERS)


class TestTransports:
    def test_standard_input_and_output(self, folder: Path) -> None:
        parameters = StdioServerParameters(
            command=sys.executable, args=["-m", "perfscope", "mcp", str(folder)], env=dict(os.environ)
        )

        async def work(client: Client) -> tuple[Any, Any, Any]:
            listed = await client.list_tools()
            first = await client.call_tool("stragglers", {"recording": "slow_rank"})
            return listed, first, await client.call_tool("what_if", {"recording": "none", "settings": {"a": "b"}})

        listed, found, refused = ask(parameters, work)
        assert {tool.name for tool in listed.tools} >= {"summary", "findings"}
        assert document(found)["rows"][0]["rank"] == 1
        assert refused.is_error

    @pytest.mark.scale
    def test_http_on_this_machine_alone(self, folder: Path) -> None:
        port = free_port()
        process = subprocess.Popen(
            [sys.executable, "-m", "perfscope", "mcp", str(folder), "--http", str(port)], stderr=subprocess.DEVNULL
        )
        try:
            until(lambda: _listens(port), "the server listens", process)
            answer = call(f"http://127.0.0.1:{port}/mcp", "list_recordings")
            assert [row["recording"] for row in answer["rows"]] == ["slow_rank"]
        finally:
            process.terminate()
            process.wait(PATIENCE_S)


def _listens(port: int) -> bool:
    with socket.socket() as attempt:
        return attempt.connect_ex(("127.0.0.1", port)) == 0


class TestTools:
    def test_every_tool_says_what_it_is_for_and_changes_nothing(self, served: Any) -> None:
        for tool in ask(served, lambda client: client.list_tools()).tools:
            assert tool.description
            assert tool.title
            assert tool.annotations
            assert tool.annotations.read_only_hint
            assert not tool.annotations.open_world_hint
            for name, parameter in tool.input_schema["properties"].items():
                assert parameter.get("description"), f"{tool.name}.{name}"
            assert tool.input_schema["additionalProperties"] is False
            assert tool.output_schema
            jsonschema.Draft202012Validator.check_schema(tool.output_schema)

    def test_an_argument_that_no_tool_has_is_refused(self, served: Any) -> None:
        assert "order" in refusal(served, "steps", recording="slow_rank", order="longest")

    def test_prompts_name_tools_that_there_are(self, served: Any) -> None:
        names = {tool.name for tool in ask(served, lambda client: client.list_tools()).tools}
        for prompt in ask(served, lambda client: client.list_prompts()).prompts:
            arguments = {argument.name: "x" for argument in prompt.arguments or ()}
            got = ask(served, lambda client, name=prompt.name, given=arguments: client.get_prompt(name, given))
            text = got.messages[0].content.text
            called = {
                word.strip(".,:;") for line in text.splitlines() for word in line.partition("Call ")[2].split()[:1]
            }
            assert called
            assert called <= names

    def test_the_documentation_lists_them(self, served: Any, root: Path) -> None:
        text = (root / "docs" / "mcp.md").read_text(encoding="utf-8")
        listed = [line.split("`")[1] for line in text.splitlines() if line.startswith("| `")]
        tools = ask(served, lambda client: client.list_tools()).tools
        assert [name for name in listed if not name.startswith("-")] == [tool.name for tool in tools]
        for tool in tools:
            assert f"| `{tool.name}` | {tool.title} |" in text


class TestRefusals:
    @pytest.mark.parametrize("name", ["..", "../served/slow_rank/../..", "/etc", "slow_rank/../../x", "~", "a\0b"])
    def test_nothing_outside_of_the_folder_is_read(self, served: Any, name: str) -> None:
        message = refusal(served, "summary", recording=name)
        assert "list_recordings" in message

    def test_a_link_leads_nowhere(self, folder: Path, tmp_path: Path) -> None:
        outside = tmp_path / "outside"
        outside.mkdir()
        for file in (folder / "slow_rank").iterdir():
            (outside / file.name).write_bytes(file.read_bytes())
        root = tmp_path / "root"
        (root / "own").mkdir(parents=True)
        (root / "linked").symlink_to(outside)
        for file in outside.iterdir():
            (root / "own" / file.name).symlink_to(file)
        made = server(root)
        assert call(made, "list_recordings")["rows"] == []
        assert "outside" in refusal(made, "summary", recording="linked")
        assert "link" in refusal(made, "summary", recording="own")

    @pytest.mark.parametrize(
        ("tool", "arguments", "remedy"),
        [
            ("summary", {"recording": "slow_rnk"}, "did you mean slow_rank"),
            ("summary", {"recording": "slow_rank", "capture": 7}, "choose from 0"),
            ("step", {"recording": "slow_rank", "step": 99}, "8-13"),
            ("time_breakdown", {"recording": "slow_rank", "rank": 9}, "0-2"),
            ("kernels", {"recording": "slow_rank", "order_by": "us_per_stp"}, "did you mean us_per_step"),
            ("table", {"recording": "slow_rank", "table": "kernls"}, "did you mean kernels"),
            ("table", {"recording": "slow_rank", "table": "clock", "where": {"rnk": 1}}, "did you mean rank"),
            ("what_if", {"recording": "slow_rank", "settings": {}}, "what_if_settings"),
            ("what_if", {"recording": "slow_rank", "settings": {"rank.1": "quick"}}, "rank.1"),
            ("history", {"recording": "slow_rank"}, "perfscope run"),
            ("define", {"term": "no such thing"}, "list_tables"),
            ("steps", {"recording": "slow_rank", "cursor": "2.abc"}, "without cursor"),
        ],
    )
    def test_a_refusal_names_the_remedy(
        self, served: Any, folder: Path, tool: str, arguments: dict[str, Any], remedy: str
    ) -> None:
        message = refusal(served, tool, **arguments)
        assert remedy in message
        assert str(folder) not in message


class TestPages:
    @pytest.mark.parametrize(
        ("tool", "arguments"), PAGED, ids=[f"{tool}-{number}" for number, (tool, _) in enumerate(PAGED)]
    )
    def test_pages_add_up_to_the_whole(self, job: Any, tool: str, arguments: dict[str, Any]) -> None:
        rows, cursor, pages = [], None, 0
        while True:
            page = call(job, tool, **arguments, **({"cursor": cursor} if cursor else {}))
            assert len(text_of(page)) <= LEAST_CHARACTERS
            rows += page["rows"]
            cursor, pages = page["next_cursor"], pages + 1
            if cursor is None or pages > 60:
                break
            assert page["rows"], "a page that does not end has rows"
        assert len(rows) == page["total"] or pages > 60
        assert len({json.dumps(row, sort_keys=True) for row in rows}) >= len(rows) * 0.5  # none comes again

    def test_a_folder_around_a_recording_is_none(self, job: Any) -> None:
        assert [row["recording"] for row in call(job, "list_recordings")["rows"]] == ["job"]

    def test_a_cursor_is_of_one_question(self, job: Any) -> None:
        page = call(job, "time_breakdown", recording="job", max_rows=1)
        assert len(page["rows"]) == 1
        after = call(job, "time_breakdown", recording="job", cursor=page["next_cursor"])
        assert [row["rank"] for row in after["rows"]] == [1, 2, 3]
        assert "cursor" in refusal(job, "time_breakdown", recording="job", rank=1, cursor=page["next_cursor"])


class TestManyRanks:
    @pytest.mark.scale
    @pytest.mark.timeout(900)
    @pytest.mark.parametrize("ranks", [64, pytest.param(1024, marks=pytest.mark.frameworks)])
    def test_answers_stay_bounded(self, tmp_path: Path, ranks: int) -> None:
        model = replace(JobSpec().model, layers=1)
        slow = SlowCompute(ranks=(ranks - 3,), factor=1.5)
        simulate(JobSpec(ranks=ranks, steps=2, warmup=1, model=model, causes=(slow,))).write(tmp_path / "job")
        made = server(tmp_path)
        assert [row["recording"] for row in call(made, "list_recordings")["rows"]] == ["job"]
        summary = call(made, "summary", recording="job")
        assert summary["ranks"] == f"0-{ranks - 1}"
        assert summary["stragglers"][0]["rank"] == ranks - 3
        assert len(text_of(summary)) <= DEFAULT_CHARACTERS
        for tool, arguments in PAGED:
            if tool == "what_if" and ranks > 64:  # reads all traces again, where there is no cache
                continue
            answer = call(made, tool, **arguments)
            assert len(text_of(answer)) <= DEFAULT_CHARACTERS, tool
            assert answer["rows"] or not answer["total"], tool
        slowest = call(made, "time_breakdown", recording="job", order_by="-compute_us", max_rows=1)
        assert slowest["rows"][0]["rank"] == ranks - 3


class TestAnalyses:
    def test_one_analysis_answers_many_questions(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        read: list[Path] = []
        real = analyzing.analyze
        monkeypatch.setattr(analyzing, "analyze", lambda path, **options: read.append(path) or real(path, **options))
        made = server(folder)
        for tool in ("summary", "findings", "stragglers"):
            call(made, tool, recording="slow_rank")
        assert len(read) == 1
        changed = paths.run_file(folder / "slow_rank", 0)
        os.utime(changed, ns=(1, 1))
        call(made, "summary", recording="slow_rank")
        assert len(read) == 2

    def test_nothing_is_written(self, folder: Path) -> None:
        before = sorted((path, path.stat().st_mtime_ns) for path in folder.rglob("*"))
        call(server(folder), "summary", recording="slow_rank")
        assert sorted((path, path.stat().st_mtime_ns) for path in folder.rglob("*")) == before

    def test_a_result_is_answered_from(self, tmp_path: Path, served: Any, folder: Path) -> None:
        import perfscope

        summary = perfscope.analyze(folder / "slow_rank")
        (tmp_path / "review.json").write_text(json.dumps(summary.to_dict()), encoding="utf-8")
        made = server(tmp_path)
        (row,) = call(made, "list_recordings")["rows"]
        assert (row["recording"], row["kind"]) == ("review.json", "result")
        assert call(made, "stragglers", recording="review.json")["rows"][0]["rank"] == 1
        assert "traces" in refusal(made, "what_if", recording="review.json", settings={"rank.1": "peers"})


def test_names_are_hidden(tmp_path: Path, folder: Path) -> None:
    place = tmp_path / "secret-project"
    place.mkdir()
    for file in (folder / "slow_rank").iterdir():
        (place / file.name).write_bytes(file.read_bytes())
    (tmp_path / "broken-secret").mkdir()
    (tmp_path / "broken-secret" / "rank-00000.capture-0.trace.json.gz").write_bytes(b"no trace")
    made = server(tmp_path, anonymize=True)
    listed = call(made, "list_recordings")
    assert [row["recording"] for row in listed["rows"]] == ["recording-1", "recording-2"]
    texts = [text_of(listed), refusal(made, "summary", recording="recording-1")]
    texts += [text_of(call(made, tool, recording="recording-2")) for tool in ("summary", "findings", "stragglers")]
    texts.append(refusal(made, "summary", recording="secret-project"))
    for text in texts[:-1]:
        assert "secret" not in text
        assert str(tmp_path) not in text
        assert "train.py" not in text
    assert '"host":"host-1"' in texts[4]
    assert "no such recording" in texts[-1]
