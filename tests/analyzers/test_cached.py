"""Looking twice: the second answer is the first one, whatever happened to the cache in between."""

from __future__ import annotations

import dataclasses
import gzip
import hashlib
import io
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from perfscope.analyzers import cached, read_ranks, readers, stored_traces
from perfscope.analyzers.analyze import analyze
from perfscope.analyzers.rank.analyze import analyze_rank
from perfscope.errors import TraceError
from perfscope.execution import cache as cache_module
from perfscope.execution.cache import Cache
from perfscope.execution.pickle_sizes import check_sizes
from perfscope.trace.trace import (
    CollectiveArgs,
    Device,
    GraphNodes,
    MemoryCounter,
    ParseReport,
    ProcessGroup,
    Thread,
    Trace,
)
from tests.generator import JobSpec, simulate


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("job")
    simulate(JobSpec(ranks=2, steps=5)).write(folder)
    return folder


@pytest.fixture
def trace_file(job: Path, tmp_path: Path) -> Path:
    path = tmp_path / "rank0.json.gz"
    path.write_bytes((job / "rank0.json.gz").read_bytes())
    return path


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The cache, turned on, in a folder of its own; files written now count as left alone for long."""
    monkeypatch.setenv("PERFSCOPE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(cache_module, "_SETTLED_NS", -1)
    return Cache(tmp_path / "cache").folder


@pytest.fixture
def no_reading(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        pytest.fail("parsed again")

    monkeypatch.setattr(readers, "read", refuse)


def spelled(value: Any) -> Any:
    """A value as nested plain ones, arrays with their types: equal if and only if everything in them is."""
    if isinstance(value, np.ndarray):
        return (str(value.dtype), value.shape, value.tolist())
    if dataclasses.is_dataclass(value):
        return (type(value).__name__, {f.name: spelled(getattr(value, f.name)) for f in dataclasses.fields(value)})
    if isinstance(value, dict):
        return {key: spelled(each) for key, each in value.items()}
    if isinstance(value, tuple | list):
        return (type(value).__name__, [spelled(each) for each in value])
    return (type(value).__name__, value)


def remove(folder: Path, pattern: str) -> int:
    found = list(folder.glob(pattern))
    for path in found:
        path.unlink()
    return len(found)


def odd_trace() -> Trace:
    """A trace with something in every field, and strings that are none in UTF-8."""

    def column(dtype: type, *values: int) -> np.ndarray:
        return np.array(values, dtype=dtype)

    return Trace(
        source="/elsewhere/report.sqlite (process 7)",
        strings=("", "a\0b", "ŝ…🙂", "\ud800 alone", "plain"),
        category=column(np.int8, 1, 5), name=column(np.int32, 0, 3), start_ns=column(np.int64, -5, 2**62),
        duration_ns=column(np.int64, 0, 2**40), thread=column(np.int32, 0, 1), device=column(np.int32, -1, 3),
        stream=column(np.int64, -1, 2**40), correlation=column(np.int64, -1, 1), external_id=column(np.int64, -1, 2),
        shapes=column(np.int32, -1, 2), types=column(np.int32, 4, -1), inputs=column(np.int32, -1, -1),
        threads=(Thread("1", "main", "python"), Thread("-1", "7", "")),
        collectives=CollectiveArgs(
            column(np.int64, 1), column(np.int32, 2), column(np.int32, -1), column(np.int32, 0), column(np.int32, 4),
            column(np.int64, 2**40), column(np.int64, 0), column(np.int64, 8), column(np.int64, -1),
        ),
        memory=MemoryCounter(*(column(np.int64, 1, 2, 3) for _ in range(4))),
        graph_nodes=GraphNodes(column(np.int64, 1), column(np.int64, 2**40 + 3), column(np.int64, 4)),
        rank=3, world_size=8, backend="nccl", host="node-1", devices=(Device(0, "H100", None), Device(1, "", 2**36)),
        groups=(ProcessGroup("0", "default", (0, 1)), ProcessGroup("1", "", ())), has_shapes=True,
        versions={"nccl": "2.21.5"}, parse_report=ParseReport(3, 2, True, ("something was lost",)),
    )  # fmt: skip


class TestStoredTraces:
    @pytest.fixture(autouse=True)
    def pyarrow(self) -> None:
        pytest.importorskip("pyarrow", reason="pyarrow is not installed (the cache extra)")

    def test_every_field_comes_back(self, tmp_path):
        trace = odd_trace()
        cache = Cache(tmp_path)
        stored_traces.save(trace, "x", cache, Path("/elsewhere/report.sqlite"))
        found = stored_traces.load("x", cache, Path("/elsewhere/report.sqlite"))
        assert spelled(found) == spelled(trace)
        for field in dataclasses.fields(trace):
            default = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
            assert spelled(getattr(trace, field.name)) != spelled(default), f"{field.name} is not tried here"

    def test_a_file_that_moved_is_named_by_its_new_place(self, tmp_path):
        cache = Cache(tmp_path)
        stored_traces.save(odd_trace(), "x", cache, Path("/elsewhere/report.sqlite"))
        found = stored_traces.load("x", cache, Path("here.sqlite"))
        assert found is not None
        assert found.source == "here.sqlite (process 7)"

    def test_a_trace_read_from_a_file(self, trace_file, tmp_path):
        trace = readers.read(trace_file)
        cache = Cache(tmp_path)
        stored_traces.save(trace, "x", cache, trace_file)
        assert spelled(stored_traces.load("x", cache, trace_file)) == spelled(trace)

    @pytest.mark.parametrize("part", ["strings", "collectives", "graph_nodes", "memory", "events"])
    @pytest.mark.parametrize("damage", ["cut", "flipped", "empty", "gone", "of another trace"])
    def test_damage_to_any_part_is_noticed(self, tmp_path, part, damage):
        cache = Cache(tmp_path)
        trace = odd_trace()
        stored_traces.save(trace, "x", cache, Path("x"))
        (path,) = cache.folder.glob(f"x.{part}.parquet")
        whole = path.read_bytes()
        if damage == "gone":
            path.unlink()
        elif damage == "of another trace":
            path.write_bytes(next(cache.folder.glob("x.memory.parquet")).read_bytes() if part != "memory" else b"PAR1")
        else:
            middle = len(whole) // 4
            flipped = whole[:middle] + bytes([whole[middle] ^ 0x55]) + whole[middle + 1 :]
            path.write_bytes({"cut": whole[: len(whole) // 2], "flipped": flipped, "empty": b""}[damage])
        found = stored_traces.load("x", cache, Path("x"))
        assert found is None or spelled(found) == spelled(dataclasses.replace(trace, source=found.source))
        assert found is None or damage == "flipped", "only bytes that mean nothing may be flipped unnoticed"
        stored_traces.save(trace, "x", cache, Path("x"))
        assert stored_traces.load("x", cache, Path("x")) is not None


class TestAnalyzeFile:
    def test_the_second_look_is_the_same_and_parses_nothing(self, trace_file, folder, request):
        plain = analyze_rank(readers.read(trace_file))
        first = cached.analyze_file(trace_file)
        request.getfixturevalue("no_reading")
        second = cached.analyze_file(trace_file)
        third = cached.recall(trace_file)
        assert spelled(first) == spelled(second) == spelled(third) == spelled(plain)

    def test_new_questions_do_not_parse_again(self, trace_file, folder, request):
        pytest.importorskip("pyarrow", reason="pyarrow is not installed (the cache extra)")
        first = cached.analyze_file(trace_file)
        assert remove(folder, "*.rank") == 1
        request.getfixturevalue("no_reading")
        assert spelled(cached.analyze_file(trace_file)) == spelled(first)

    def test_a_changed_reader_reads_again(self, trace_file, folder, monkeypatch):
        cached.analyze_file(trace_file)
        monkeypatch.setattr(cached, "fingerprint", lambda *modules: "another version")
        reads: list[Path] = []
        read = readers.read
        monkeypatch.setattr(readers, "read", lambda path, part=None: reads.append(path) or read(path, part))
        cached.analyze_file(trace_file)
        assert reads == [trace_file]

    def test_a_changed_file_is_never_served_stale(self, trace_file, job, folder):
        first = cached.analyze_file(trace_file)
        trace_file.write_bytes((job / "rank1.json.gz").read_bytes())
        second = cached.analyze_file(trace_file)
        assert (first.rank, second.rank) == (0, 1)

    def test_a_file_that_changes_while_it_is_read_is_not_stored(self, trace_file, job, folder, monkeypatch):
        read = readers.read

        def replaced_under_way(path: Path, part: str | None = None) -> Trace:
            trace_file.write_bytes((job / "rank1.json.gz").read_bytes())
            return read(path, part)

        monkeypatch.setattr(readers, "read", replaced_under_way)
        cached.analyze_file(trace_file)
        assert not list(folder.glob("*.rank"))
        assert not list(folder.glob("*.parquet"))

    def test_a_copy_is_known_by_its_content_and_named_by_its_place(self, trace_file, folder, tmp_path, request):
        cached.analyze_file(trace_file)
        copy = tmp_path / "copy" / "other-name.json.gz"
        copy.parent.mkdir()
        copy.write_bytes(trace_file.read_bytes())
        request.getfixturevalue("no_reading")
        assert cached.analyze_file(copy).source == str(copy)

    @pytest.mark.parametrize("damage", [b"", b"x" * 1000])
    def test_damaged_entries_are_made_again(self, trace_file, folder, damage):
        first = cached.analyze_file(trace_file)
        for path in folder.iterdir():
            path.write_bytes(damage)
        assert spelled(cached.analyze_file(trace_file)) == spelled(first)
        assert all(path.read_bytes() != damage for path in folder.iterdir())

    def test_turned_off_nothing_is_written_or_read(self, trace_file, folder, monkeypatch, tmp_path):
        monkeypatch.setenv("PERFSCOPE_CACHE", "off")
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
        cached.analyze_file(trace_file)
        assert cached.recall(trace_file) is None
        assert not folder.exists()
        assert not (tmp_path / "home").exists()

    def test_a_cache_that_cannot_be_written_fails_nothing(self, trace_file, monkeypatch):
        monkeypatch.setenv("PERFSCOPE_CACHE", "/dev/null/cache")
        assert cached.analyze_file(trace_file).rank == 0

    def test_without_pyarrow_the_second_look_is_as_quick(self, trace_file, folder, monkeypatch, request):
        monkeypatch.setattr(stored_traces, "is_supported", lambda: False)
        first = cached.analyze_file(trace_file)
        request.getfixturevalue("no_reading")
        assert spelled(cached.analyze_file(trace_file)) == spelled(first)
        assert not list(folder.glob("*.parquet"))

    def test_errors_are_not_stored(self, tmp_path, folder):
        path = tmp_path / "rank0.json"
        path.write_text("no trace")
        for _ in range(2):
            with pytest.raises(TraceError, match=r"rank0\.json"):
                cached.analyze_file(path)


def test_a_planted_entry_calls_nothing(tmp_path):
    class Evil:
        def __reduce__(self) -> tuple[Any, tuple[str]]:
            return print, ("called",)

    body = pickle.dumps(Evil())
    with pytest.raises(pickle.UnpicklingError, match="print is not a value"):
        cached._ValuesOnly(io.BytesIO(body)).load()


@pytest.mark.parametrize(
    "body",
    [
        b"\x80\x05\x96" + (1 << 62).to_bytes(8, "little") + b"1234.",  # so many bytes
        b"\x80\x05\x8e" + (1 << 28).to_bytes(8, "little") + b"1234.",
        b"\x80\x05\x8d" + (1 << 28).to_bytes(8, "little") + b"1234.",  # so long a text
        b"\x80\x05Nr" + (1 << 24).to_bytes(4, "little") + b".",  # a memo of so many places
        b"\x80\x05N",
    ],
    ids=["bytearray", "bytes", "text", "memo", "no end"],
)
def test_an_entry_that_claims_more_than_it_holds_is_not_unpickled(body, monkeypatch):
    monkeypatch.setattr(cached, "_ValuesOnly", lambda _: pytest.fail("unpickled"))
    with pytest.raises(pickle.UnpicklingError):
        cached._unpack(hashlib.blake2b(body, digest_size=16).digest() + body)


def test_whole_pickles_of_any_values_pass_the_look_at_their_sizes():
    arrays = [np.zeros(size, dtype=kind) for size in (0, 3, 300, 70_000) for kind in ("i1", "i8", "f4", "U7")]
    values = [
        None,
        True,
        5,
        300,
        1 << 20,
        1 << 80,
        -7,
        0.5,
        "a",
        "b" * 300,
        "c" * 70_000,
        b"d",
        b"e" * 300,
        b"f" * 70_000,
    ]
    held = [
        *values,
        *arrays,
        tuple(values),
        {"key": values},
        {1, 2},
        frozenset({3}),
        [values] * 3,
        [[n] for n in range(9000)],
    ]
    for protocol in (4, 5):
        check_sizes(pickle.dumps(held, protocol))


class TestAnalyze:
    def test_the_second_summary_is_the_first(self, job, folder, tmp_path, monkeypatch):
        first = analyze(job)
        monkeypatch.setattr(read_ranks.engine, "map_items", lambda *_: pytest.fail("sent to workers"))
        seen: list[tuple[int, int]] = []
        second = analyze(job, progress=lambda done, total: seen.append((done, total)))
        assert second.to_dict() == first.to_dict()
        assert seen == [(1, 2), (2, 2)]

    def test_only_the_changed_rank_is_read(self, job, folder, tmp_path, monkeypatch):
        here = tmp_path / "here"
        here.mkdir()
        for path in job.glob("*.gz"):
            (here / path.name).write_bytes(path.read_bytes())
        analyze(here)
        (here / "rank1.json.gz").write_bytes(gzip.compress(gzip.decompress((here / "rank1.json.gz").read_bytes()), 9))
        reads: list[str] = []
        read = readers.read
        monkeypatch.setattr(readers, "read", lambda path, part=None: reads.append(path.name) or read(path, part))
        analyze(here)
        assert reads == ["rank1.json.gz"]
