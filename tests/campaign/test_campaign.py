"""A quick part of the campaign, that it finds what it is for, and every defect that it found."""

from __future__ import annotations

import json
import lzma
import os
import pickle
import random
import sqlite3
import time
import zipfile
import zlib
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from perfscope.analyzers import readers
from perfscope.analyzers.analyze import analyze
from perfscope.analyzers.compare.budget_file import read_budget
from perfscope.analyzers.compare.compare import compare
from perfscope.analyzers.history import rank_history
from perfscope.analyzers.job.system.samples import read_samples
from perfscope.analyzers.job.tables.ncu import read_export
from perfscope.analyzers.readers import chrome, flight, nsys
from perfscope.collectors.agreement import PLANS_FILE, RECORD, REQUESTS_FILE, Board
from perfscope.errors import PerfscopeError, TraceError, UnusableInput
from perfscope.recording import history
from perfscope.recording.history import Block, pack, unpack
from perfscope.recording.job import open_job
from perfscope.recording.metadata import load_run
from perfscope.reports import terminal
from perfscope.reports.page import page
from perfscope.results.file import load_summary
from tests.analyzers.job.collectives import inspector_logs
from tests.analyzers.job.tables.test_ncu import RAW
from tests.analyzers.snapshots.allocator import MIB, Allocator, stack
from tests.campaign import kinds, seeds, supervise
from tests.campaign.kinds import Kind

HUGE = 2**31


@pytest.mark.parametrize("name", [name for name in supervise.KINDS if name != "trace, checked"])
def test_inputs_of_every_kind_end_as_they_must(name: str) -> None:
    """Of what is analyzed, few: an analysis takes as long as fifty files."""
    found = supervise.run_stretch(7, 0, 2 if name.startswith("analyze") else 12, [name])
    assert not found["faults"], found["faults"]


def _raising(error: BaseException) -> Kind:
    def run(dice: random.Random, folder: Path) -> str:
        raise error

    return Kind(1, run)


@pytest.mark.parametrize(
    ("error", "found"),
    [
        (TypeError("x"), "an exception: TypeError"),
        (ValueError("no file is named"), "an exception: ValueError"),
        (UnusableInput("no file is named"), "an error with raw words, or that names no file: UnusableInput"),
        (MemoryError(), "an exception: MemoryError"),
    ],
)
def test_what_an_input_must_not_raise_is_a_fault(
    error: BaseException, found: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(supervise.KINDS, "wrong", _raising(error))
    faults = supervise.run_stretch(0, 0, 3, ["wrong"])["faults"]
    ((key, fault),) = faults.items()
    assert key.startswith(found)
    assert fault["count"] == 3


def test_inputs_that_hang_or_end_their_process_are_faults_and_the_others_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def odd(dice: random.Random, folder: Path) -> str:
        number = odd.number = getattr(odd, "number", -1) + 1  # type: ignore[attr-defined]
        if number == 1:
            time.sleep(60)
        return "read"

    def deadly(dice: random.Random, folder: Path) -> str:
        if dice.random() < 0.3:
            os._exit(9)
        return "read"

    seconds = supervise.SECONDS
    monkeypatch.setattr(supervise, "SECONDS", 1)
    monkeypatch.setitem(supervise.KINDS, "hangs", Kind(1, odd))
    assert list(supervise.run_stretch(0, 0, 3, ["hangs"])["faults"]) == ["an exception: TooLong at"]
    monkeypatch.setattr(supervise, "SECONDS", seconds)
    monkeypatch.setitem(supervise.KINDS, "dies", Kind(1, deadly))
    file = tmp_path / "results.jsonl"
    first = supervise.Results()
    for one in supervise._in_process(0, range(20), ["dies"]):
        first.add(one)
        file.write_text(json.dumps(one) + "\n")
    died = first.ends["dies: fault"]
    assert (first.inputs, first.ends["dies: read"]) == (20, 20 - died)
    assert 1 < died < 15
    assert list(first.faults) == ["the process ended (9): dies"]


def test_a_campaign_goes_on_where_it_was(tmp_path: Path) -> None:
    file = tmp_path / "results.jsonl"
    stretches = [range(5), range(5, 10)]
    first = supervise.campaign(0, stretches[:1], ["stacks"], file)
    both = supervise.campaign(0, stretches, ["stacks"], file)
    assert (first.inputs, both.inputs, len(file.read_text().splitlines())) == (5, 10, 2)
    assert first.ends.items() <= {**both.ends, **first.ends}.items()
    assert "10  stacks: " in supervise.report(both)


# --- what it found --------------------------------------------------------------------------------------------------


def test_more_ranks_than_any_job_has_are_no_ranks(tmp_path: Path) -> None:
    """Tables of two thousand million missing ranks filled the memory."""
    held = seeds.histories(2)
    run = {**json.loads(held["rank-00000.run.json"]), "world_size": HUGE}
    seeds.write({**held, "rank-00000.run.json": json.dumps(run).encode(), f"rank-{HUGE}.steps.bin": b""}, tmp_path)
    assert load_run(tmp_path / "rank-00000.run.json").world_size == 1
    assert "world_size is 2147483648, not a whole number from 1 to 1048576" in open_job(tmp_path).runs[0].problems[-1]
    assert analyze(tmp_path, workers=1).job.world_size == 2
    logs = tmp_path / "logs"
    good = [inspector_logs.line(0, number, 10.0) for number in range(3)]
    inspector_logs.write(logs, {0: [*good, inspector_logs.line(0, 4, 10.0, ranks=HUGE)]})
    found = analyze(logs)
    assert found.job.missing_ranks == (1,)
    assert "1 line cannot be read" in found.job.failures[0].error


def test_times_that_no_step_takes_make_no_history(tmp_path: Path) -> None:
    def block(us: int = 40_000, first: int = 0, began: int = 0) -> bytes:
        return pack(Block(0, first, began, [40_000, us], {"forward": [1, us]}, bytes(2)))

    path = tmp_path / "rank-00000.steps.bin"
    path.write_bytes(block(1 << 48) + block(first=1 << 40) + block(began=-(1 << 62)) + block((1 << 48) - 1))
    (kept,) = unpack(path.read_bytes())
    assert kept.steps == 2
    with np.errstate(all="raise"):
        assert rank_history.read(path).step_us[1] == (1 << 48) - 1


def test_a_block_with_a_right_checksum_that_unpacks_to_more_than_it_says_is_no_block() -> None:
    for payload in (zlib.compress(bytes(10_000_000)), b"no zlib"):
        covered = (len(payload), 1, 0, 0, 0, 0)
        checksum = zlib.crc32(history._COVERED.pack(*covered) + payload)
        assert not list(unpack(history._HEADER.pack(b"PSH1", checksum, *covered) + payload))


def test_no_error_speaks_of_codecs(tmp_path: Path) -> None:
    budget = tmp_path / "budget.toml"
    budget.write_bytes(b"fail_on = '\xff'")
    with pytest.raises(UnusableInput, match=r"budget.toml: the budget is not text in UTF-8; docs"):
        read_budget(budget)
    with pytest.raises(ValueError, match=r"^neither a pickle nor JSON that is whole$"):
        flight.parse(b'{"entries": ["\xc0"]}')


def test_a_zip_archive_packed_with_lzma_that_is_damaged(tmp_path: Path) -> None:
    path = tmp_path / "rank0.json.zip"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_LZMA) as archive:
        archive.writestr("trace.json", json.dumps(seeds.trace()))
    data = bytearray(path.read_bytes())
    at = data.index(b"trace.json") + 200
    data[at : at + 40] = bytes(40)
    path.write_bytes(bytes(data))
    with pytest.raises(lzma.LZMAError), zipfile.ZipFile(path) as archive:
        archive.read("trace.json")
    with pytest.raises(TraceError, match=r"rank0.json.zip: no event array"):
        chrome.read(path)


def test_a_request_that_is_a_list_answers_no_request(tmp_path: Path) -> None:
    own = tmp_path / ".bootstrap"
    own.mkdir()
    plan = {"start": 5, "active": 3, "attempt": 0, "reason": "", "asked": True, "request": [1]}
    (own / PLANS_FILE).write_bytes(json.dumps(plan).encode().ljust(RECORD - 1) + b"\n")
    (own / REQUESTS_FILE).write_bytes(b'{"active": 5}'.ljust(RECORD - 1) + b"\n")
    board = Board(tmp_path, 0)
    assert board.look() == []
    assert board.open_request() is not None


def test_samples_from_before_the_steps_can_be_read_back(tmp_path: Path) -> None:
    """The JSON of an analysis was refused by ``perfscope compare`` where the sampler was there before the steps."""
    path = tmp_path / "summary.json"
    path.write_bytes(kinds._SUMMARY)
    found = load_summary(path)
    assert found.system is not None
    assert min(found.system.series[0].time_us) < 0
    compare(found, found).self_check()


def test_allocations_beside_a_cache_many_times_as_large_are_drawn(tmp_path: Path) -> None:
    allocator = Allocator()
    frames = stack(("/a/train.py", 2, "main"))
    allocator.free(allocator.alloc(4096 * MIB, frames))
    document = allocator.document()
    for entry in document["device_traces"][0]:
        if not entry["action"].startswith("segment"):
            entry["size"] = 64
    (tmp_path / "rank0.pickle").write_bytes(pickle.dumps(document))
    assert "rank 0" in page.render(analyze(tmp_path, workers=1)).lower()


@pytest.mark.parametrize("base_ns", [2**61, 2**62, -(2**61), 2**63 - 1])
def test_a_base_of_times_centuries_away_is_not_believed(tmp_path: Path, base_ns: int) -> None:
    path = tmp_path / "rank0.json"
    path.write_text(json.dumps({**seeds.trace(), "baseTimeNanoseconds": base_ns}))
    assert not analyze(tmp_path, workers=1).job.failures
    assert chrome.read(path).parse_report.dropped_events == 0
    path.write_text(json.dumps({**seeds.trace(), "baseTimeNanoseconds": 2**61 - 1_000_000}))
    assert 0 < chrome.read(path).parse_report.dropped_events < 20


def test_a_step_s_range_that_takes_no_time_is_no_step(tmp_path: Path) -> None:
    """The mean of steps that take no time was divided by."""
    made = seeds.trace(steps=1)
    made["traceEvents"] = made["traceEvents"][:8]
    made["traceEvents"][2]["dur"] = 0
    assert made["traceEvents"][2]["name"] == "ProfilerStep#0"
    (tmp_path / "rank0.json").write_text(json.dumps(made))
    found = analyze(tmp_path, workers=1)
    assert found.job.step_time_us > 0
    assert not found.job.failures


@pytest.mark.parametrize(("threads", "apart_us"), [(10, 4e14), (4000, 2.5e12)], ids=["years", "weeks"])
def test_events_far_away_do_not_change_how_others_nest(tmp_path: Path, threads: int, apart_us: float) -> None:
    """Years away they are left out; weeks away their threads' parts of one axis overflowed 64 bits."""
    made = seeds.trace()
    path = tmp_path / "rank0.json"
    path.write_text(json.dumps(made))
    before = analyze(tmp_path, workers=1)
    odd = {"ph": "X", "cat": "cpu_op", "name": "odd", "pid": 1, "dur": 1}
    made["traceEvents"] += [{**odd, "tid": 900 + at, "ts": apart_us} for at in range(threads)]
    path.write_text(json.dumps(made))
    now = analyze(tmp_path, workers=1)
    assert now.job.step_time_us == before.job.step_time_us
    assert [row.name for row in now.operators][:1] == [row.name for row in before.operators][:1]
    assert now.time_breakdown == before.time_breakdown


def test_an_export_with_times_that_cannot_be(tmp_path: Path) -> None:
    path = tmp_path / "report.sqlite"
    path.write_bytes(seeds.EXPORTS[2])
    with closing(sqlite3.connect(path)) as database:
        database.execute("UPDATE NVTX_EVENTS SET start = ? WHERE rowid = 3", (-(2**62),))
        database.execute("UPDATE OSRT_API SET end = ? WHERE rowid = 1", (2**62,))
        database.commit()
    found = analyze(tmp_path, workers=1)
    assert len(found.job.ranks) == 2
    assert not found.job.failures
    assert sum(nsys.read(path, part).parse_report.dropped_events for part in readers.parts(path)) == 2


def test_an_export_whose_schema_is_no_text(tmp_path: Path) -> None:
    path = tmp_path / "report.sqlite"
    at = seeds.EXPORTS[2].index(b"CREATE TABLE StringIds")
    path.write_bytes(seeds.EXPORTS[2][:at] + b"\xa0" + seeds.EXPORTS[2][at + 1 :])
    with pytest.raises(UnusableInput, match=r"report.sqlite"):
        analyze(tmp_path, workers=1)


def test_control_characters_in_dumps_and_stacks_are_not_shown(tmp_path: Path) -> None:
    held = seeds.stuck()
    held["rank-00000.stacks.txt"] = held["rank-00000.stacks.txt"].replace(b"train.py", b"tr\0ai\x1b[31mn.py")
    dump = held["nccl_trace_rank_0"].replace(b"/site/train.py", b"/site/t\x1bain.py")
    found = analyze(seeds.write({**held, "nccl_trace_rank_0": dump}, tmp_path), workers=1)
    shown = page.render(found) + terminal.verdict(found) + json.dumps(found.to_dict(), ensure_ascii=False)
    assert not {"\0", "\x1b"} & set(shown)
    assert "\ufffd" in shown


def test_a_line_of_samples_that_is_nested_too_deep_costs_itself(tmp_path: Path) -> None:
    path = tmp_path / "host-node0.samples.jsonl"
    path.write_bytes(seeds.samples() + b'{"process": 1, "x": ' + b"[" * 100_000 + b"\n[1, " + b"[" * 100_000 + b"\n")
    (found,) = read_samples(path, -(2**63), 2**63 - 1)
    assert len(found.table.time_ns) == 6


def test_a_table_of_kernels_with_a_row_cut_short(tmp_path: Path) -> None:
    path = tmp_path / "kernels.csv"
    path.write_text('"ID","Metric Value","Metric Unit","Kernel Name","Metric Name"\n"0","1","%"\n' + RAW)
    with pytest.raises(PerfscopeError, match=r"kernels.csv"):
        read_export(path)
