"""A summary written as JSON and read back is the same summary."""

from __future__ import annotations

import base64
import copy
import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import perfscope
from perfscope.errors import UnusableInput
from perfscope.results import file
from perfscope.results.summary import Summary
from tests.reports.examples import EXAMPLES, straggler
from tests.results.test_frames import full


@pytest.fixture
def document() -> dict[str, Any]:
    """A summary's JSON."""
    loaded: dict[str, Any] = json.loads(json.dumps(straggler().to_dict()))
    return loaded


@pytest.fixture(scope="module")
def recorded(samples: Path) -> str:
    """The JSON of a real recording's summary."""
    return json.dumps(perfscope.analyze(samples / "slow_rank", workers=1).to_dict())


@pytest.mark.parametrize("summary", [*(make() for make in EXAMPLES.values()), full()], ids=[*EXAMPLES, "full"])
def test_read_back_it_is_the_same(summary: Summary) -> None:
    written = json.loads(json.dumps(summary.to_dict()))
    again = Summary.from_dict(written)
    assert again == summary
    assert json.loads(json.dumps(again.to_dict())) == written
    for name in summary.frames:
        assert again.frames[name].equals(summary.frames[name]), name


def test_what_analyze_writes_is_read(samples: Path, tmp_path: Path) -> None:
    summary = perfscope.analyze(samples / "slow_rank")
    path = tmp_path / "result.json"
    path.write_text(json.dumps(summary.to_dict(), indent=1, allow_nan=False) + "\n", encoding="utf-8")
    assert perfscope.load_summary(path) == summary


def test_keys_of_later_versions_are_left_aside_and_later_fields_take_their_default(document: dict[str, Any]) -> None:
    document["invented_later"] = {"x": 1}
    document["job"]["invented_later"] = [1, 2]
    document["findings"][0]["action"]["invented_later"] = None
    del document["memory_timeline"], document["time_breakdown"][0]["wait_is_bound"]
    assert Summary.from_dict(document) == straggler()


def test_ranks_that_are_keys_are_numbers_again(document: dict[str, Any]) -> None:
    assert document["collectives"][1]["last_arriver"] == {"2": 0.83, "1": 0.17}
    assert Summary.from_dict(document).collectives[1].last_arriver == {2: 0.83, 1: 0.17}


@pytest.mark.parametrize(
    ("where", "value", "message"),
    [
        (
            ("schema",),
            "perfscope.summary/9",
            "expected 'perfscope.summary/1', found 'perfscope.summary/9'; write it again",
        ),
        (("job",), None, r"Expected `object`, got `null` - at `\$.job`"),
        (("time_breakdown", 1, "rank"), "one", r"Expected `int`, got `str` - at `\$.time_breakdown\[1\].rank`"),
        (("findings",), 7, r"Expected `array`, got `int` - at `\$.findings`"),
        (("findings", 0), 7, r"at `\$.findings\[0\]`"),
        (("findings", 0, "action"), "stop", r"at `\$.findings\[0\].action`"),
    ],
)
def test_what_is_wrong_and_where(document: dict[str, Any], where: tuple[Any, ...], value: Any, message: str) -> None:
    place = document
    for key in where[:-1]:
        place = place[key]
    place[where[-1]] = value
    with pytest.raises(UnusableInput, match=message):
        Summary.from_dict(document)


def test_a_key_that_is_missing_is_named(document: dict[str, Any]) -> None:
    del document["stragglers"][0]["cause"]
    with pytest.raises(UnusableInput, match=r"missing required field `cause` - at `\$.stragglers\[0\]`"):
        Summary.from_dict(document)


def test_errors_name_the_file(tmp_path: Path, document: dict[str, Any]) -> None:
    path = tmp_path / "result.json"
    with pytest.raises(UnusableInput, match=r"result.json: cannot be read \(No such file"):
        perfscope.load_summary(path)
    path.write_text("<html>")
    with pytest.raises(UnusableInput, match=r"result.json: is not whole JSON .* --json"):
        perfscope.load_summary(path)
    path.write_text("[]")
    with pytest.raises(UnusableInput, match=r"result.json: expected 'perfscope.summary/1', found 'list'"):
        perfscope.load_summary(path)
    broken = copy.deepcopy(document)
    del broken["job"]
    path.write_text(json.dumps(broken))
    with pytest.raises(UnusableInput, match=r"result.json: is no summary of schema .* `job`"):
        perfscope.load_summary(path)


@pytest.mark.parametrize(
    ("where", "value", "message"),
    [
        (("job", "step_time_us"), float("nan"), "a number of 64 bits"),
        (
            ("time_breakdown", 0, "compute_us"),
            -1.5,
            r"-1.5 is no number of µs that can be true - at `\$.time_breakdown",
        ),
        (("time_breakdown", 0, "compute_us"), 9e17, "is no number of µs that can be true"),
        (("time_breakdown", 0, "compute_us"), 1.0, "categories add up to"),
        (("job", "step_time_us"), 0.5, r"do not have the mean that is given - at `\$.step_time_us"),
        (("step_timeline", 0, "duration_us"), [], "arrays of unlike lengths"),
        (("lanes", 0, "name"), [], "arrays of a lane are not equally long"),
        (("lanes", 0, "texts"), [], "a lane names a text that it does not have"),
    ],
)
def test_what_no_recording_can_give_is_refused(
    recorded: str, tmp_path: Path, where: tuple[Any, ...], value: Any, message: str
) -> None:
    document = json.loads(recorded)
    place = document
    for key in where[:-1]:
        place = place[key]
    place[where[-1]] = value
    path = tmp_path / "result.json"
    path.write_text(json.dumps(document))
    with pytest.raises(UnusableInput, match=f"result.json: .*{message}"):
        perfscope.load_summary(path)


def test_a_name_cannot_drive_a_terminal(tmp_path: Path, document: dict[str, Any]) -> None:
    document["job"]["model"] = {"name": "\x1b[31mred", "parameters": "many"}
    document["job"]["hosts"] = ["a\x00b"]
    path = tmp_path / "result.json"
    path.write_text(json.dumps(document))
    job = perfscope.load_summary(path).job
    assert job.model == {"name": "\ufffd[31mred"}
    assert job.hosts == ("a\ufffdb",)


def test_a_deep_file_and_a_page_that_unpacks_without_end_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("perfscope.results.file._LARGEST_FILE", 10 << 20)
    path = tmp_path / "result.json"
    path.write_text("[" * 1_000_000)
    with pytest.raises(UnusableInput, match="nested too deep"):
        perfscope.load_summary(path)
    packed = base64.b64encode(gzip.compress(b"[" + b" " * (20 << 20), 1)).decode()
    page = f'<!DOCTYPE html><script type="application/json" id="summary">{json.dumps({"packed": packed})}</script>'
    path.write_text(page)
    with pytest.raises(UnusableInput, match="cut or larger than a summary can be"):
        perfscope.load_summary(path)


def test_what_a_page_holds_is_json_whatever_it_is_made_of() -> None:
    values = {"numpy": np.float64(0.1), "none": float("nan"), "names": ("é", "<b>"), "by rank": {3: 1e-05}}
    read = {"numpy": 0.1, "none": None, "names": ["é", "<b>"], "by rank": {"3": 1e-05}}
    assert json.loads(file.compact_json(values)) == read
    assert json.loads(file.compact_json({"half a pair": "\ud800"})) == {"half a pair": "\ud800"}
