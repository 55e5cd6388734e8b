"""Metadata from files that anybody may have written: a wrong value costs its field, never the analysis."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from perfscope.recording.job import open_job
from perfscope.recording.metadata import RunMetadata, load_launch, load_run
from tests.recording import mutations

RUN = "perfscope.run/1"


def loaded(folder: Path, **values: object) -> RunMetadata:
    path = folder / "rank-00000.run.json"
    path.write_text(json.dumps({"schema": RUN, "rank": 0, "world_size": 2, **values}))
    return load_run(path)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("host", 5), ("world_size", 0), ("world_size", "2"), ("attempt", -1), ("attempt", True), ("attempt", 2**63),
        ("model_flops_per_step", float("nan")), ("command", "train.py"), ("command", ["a", 1]),
        ("batch_shape", [4, -1]), ("device", []), ("versions", {"torch": 2}), ("settings", {"ddp": 25}),
        ("dataloaders", {}), ("settings", {"ddp": {"a": 2**70}}),
    ],
)  # fmt: skip
def test_a_wrong_value_gives_way_to_its_default(tmp_path: Path, name: str, value: object) -> None:
    found = loaded(tmp_path, **{name: value})
    expected = RunMetadata(world_size=1 if name == "world_size" else 2)
    assert getattr(found, name) == getattr(expected, name)
    (problem,) = found.problems
    assert problem.startswith(f"rank-00000.run.json: {name}")
    assert problem.endswith(": it is left out.")


def test_what_is_right_beside_it_stays(tmp_path: Path) -> None:
    groups = [{"name": "0", "ranks": [0, 1]}, {"ranks": [0]}, 7, {"name": "1", "ranks": ["x"]}]
    steps = {"seen": 40, "unprofiled_ns": "soon", "backwards_per_step": 2}
    found = loaded(tmp_path, steps=steps, process_groups=groups)
    assert (found.steps.seen, found.steps.unprofiled_ns, found.steps.backwards_per_step) == (40, (), 2)
    assert [(group.name, group.ranks) for group in found.process_groups] == [("0", (0, 1)), ("1", ())]
    assert found.problems == (
        "rank-00000.run.json: process_groups[1] is an object, not a complete object: it is left out.",
        "rank-00000.run.json: process_groups[2] is 7, not an object: it is left out.",
        "rank-00000.run.json: process_groups[3].ranks is a list, not a whole number from 0 on: it is left out.",
        "rank-00000.run.json: steps.unprofiled_ns is 'soon', not a list: it is left out.",
    )


def test_settings_that_are_computed_with_have_their_kinds(tmp_path: Path) -> None:
    zero = {"zero_optimization": True, "config": {"zero_optimization": 3, "steps_per_print": "often"}}
    found = loaded(tmp_path, settings={"ddp": {"bucket_cap_mb": "25", "comm_hook": 5}, "deepspeed": zero})
    assert found.settings == {"ddp": {"comm_hook": 5}, "deepspeed": {"config": {"steps_per_print": "often"}}}
    assert found.problems[0] == (
        "rank-00000.run.json: settings.ddp.bucket_cap_mb is '25', not a number from 0 on: it is left out."
    )


def test_an_exit_code_may_be_negative(tmp_path: Path) -> None:
    path = tmp_path / "perfscope.json"
    path.write_text(json.dumps({"schema": "perfscope.launch/1", "exit_code": -15, "host": ["x"]}))
    launch = load_launch(path)
    assert (launch.exit_code, launch.host) == (-15, "")
    assert launch.problems == ("perfscope.json: host is a list, not a text: it is left out.",)


def test_texts_are_clean(tmp_path: Path) -> None:
    found = loaded(tmp_path, host="a\x1b[31mb", command=["x\x00", "\ud800"], settings={"ddp": {"\x07": "\x1b"}})
    assert (found.host, found.command) == ("a\ufffd[31mb", ("x\ufffd", "\ufffd"))
    assert found.settings == {"ddp": {"\ufffd": "\ufffd"}}


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (b'{"schema": ', "is not whole JSON (line 1, column 12)"),
        (b"\xff\xfe", "is not JSON in UTF-8, or nested too deep"),
        (b"[" * 100_000, "is not JSON in UTF-8, or nested too deep"),
        (b"[]", "expected 'perfscope.run/1', found 'list'"),
    ],
)
def test_a_file_that_is_no_metadata_is_named(tmp_path: Path, content: bytes, told: str) -> None:
    path = tmp_path / "rank-00000.run.json"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"rank-00000\.run\.json: ") as error:
        load_run(path)
    assert told in str(error.value)


def test_a_pipe_with_the_name_of_metadata_is_not_waited_for(tmp_path: Path) -> None:
    path = tmp_path / "perfscope.json"
    os.mkfifo(path)
    with pytest.raises(ValueError, match=r"perfscope\.json: is no file"):
        load_launch(path)


def test_a_file_s_name_goes_before_the_rank_inside(tmp_path: Path) -> None:
    for rank in (0, 1):
        path = tmp_path / f"rank-0000{rank}.run.json"
        path.write_text(json.dumps({"schema": RUN, "rank": 0, "world_size": 1}))
        (tmp_path / f"rank-0000{rank}.capture-0.trace.json").write_text("{}")
    job = open_job(tmp_path)
    assert [(run.rank, run.world_size) for _, run in sorted(job.runs.items())] == [(0, 1), (1, 2)]
    assert "says rank 0 of 1, its name rank 1" in job.runs[1].problems[0]


@pytest.mark.scale
@pytest.mark.parametrize("base", range(4))
def test_an_analysis_survives_whatever_the_metadata_holds(tmp_path: Path, base: int) -> None:
    chosen = mutations.recordings(tmp_path / "bases")[base]
    # More: python -m tests.campaign inputs
    failed = mutations.run(chosen, tmp_path / "mutated", seed=1, numbers=range(12))
    assert not failed, failed[0]
