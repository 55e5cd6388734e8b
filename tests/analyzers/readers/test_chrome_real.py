"""Real traces, read as ``json`` reads them. They are not part of the project; without them these tests skip."""

from __future__ import annotations

from pathlib import Path

import pytest

from perfscope.analyzers.readers import chrome, detect
from tests.analyzers.readers import naive

pytestmark = pytest.mark.scale

TRACES = Path(__file__).parents[3].parent / "shared" / "traces"
FILES = sorted(TRACES.glob("**/*.json.gz"))


@pytest.mark.skipif(not FILES, reason=f"no real traces at {TRACES}")
@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(TRACES)))
def test_real_trace_is_read_as_json_reads_it(path: Path) -> None:
    document = naive.load(path)
    trace = chrome.read(path)

    trace.self_check()
    assert naive.spelled_out(trace) == naive.events(document)
    assert trace.parse_report.dropped_events == trace.parse_report.repaired_events == 0
    assert not trace.parse_report.truncated
    assert detect(path) == "chrome"

    recorded = document.get("distributedInfo", {})
    assert (trace.rank, trace.world_size) == (recorded.get("rank"), recorded.get("world_size"))
    assert chrome.peek(path) == chrome.Peek(True, recorded.get("rank"), recorded.get("world_size"))
    assert [device.name for device in trace.devices] == [
        entry["name"] for entry in document.get("deviceProperties", [])
    ]
    memory = [event for event in document["traceEvents"] if event["name"] == "[memory]"]
    assert sorted(trace.memory.allocated.tolist()) == sorted(
        event["args"].get("Total Allocated", -1) for event in memory
    )
    speaking = [event for event in document["traceEvents"] if "Collective name" in event.get("args", {})]
    assert sorted(trace.strings[kind] for kind in trace.collectives.kind) == sorted(
        event["args"]["Collective name"] for event in speaking
    )
    assert sorted(trace.collectives.elements_in.tolist()) == sorted(
        event["args"]["In msg nelems"] for event in speaking
    )
