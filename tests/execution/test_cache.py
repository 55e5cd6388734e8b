"""The cache: never a stale answer, never a failure, never more than its bound."""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import time
from pathlib import Path

import pytest

from perfscope.errors import PerfscopeError
from perfscope.execution import cache as module
from perfscope.execution.cache import Cache, fingerprint


@pytest.fixture
def cache(tmp_path: Path) -> Cache:
    return Cache(tmp_path / "cache")


@pytest.fixture
def old(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files written now count as left alone for long."""
    monkeypatch.setattr(module, "_SETTLED_NS", -1)


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "rank0.json"
    path.write_bytes(b"a" * 100)
    return path


def entries(cache: Cache) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in cache.folder.iterdir()}


class TestContent:
    def test_the_same_bytes_are_the_same_content_wherever_they_lie(self, cache, trace, tmp_path):
        copy = tmp_path / "copy.json"
        copy.write_bytes(trace.read_bytes())
        assert cache.content(trace).key == cache.content(copy).key
        copy.write_bytes(b"b" * 100)
        assert cache.content(trace).key != cache.content(copy).key

    def test_a_file_that_did_not_change_is_not_read_again(self, cache, trace, old, monkeypatch):
        first = cache.content(trace)
        monkeypatch.setattr(module, "_hash", lambda path: pytest.fail("read again"))
        assert cache.content(trace).key == first.key
        assert cache.known_content(trace).key == first.key

    def test_a_change_of_equal_size_and_time_is_seen(self, cache, trace, old):
        before = cache.content(trace)
        status = trace.stat()
        time.sleep(0.02)  # the file system's clock must tick
        with trace.open("r+b") as file:
            file.write(b"z")
        os.utime(trace, ns=(status.st_atime_ns, status.st_mtime_ns))
        assert trace.stat().st_mtime_ns == status.st_mtime_ns
        assert not before.is_current()
        assert cache.known_content(trace) is None
        assert cache.content(trace).key != before.key

    def test_another_file_of_equal_size_and_time_in_its_place_is_seen(self, cache, trace, old, tmp_path):
        before = cache.content(trace)
        other = tmp_path / "other"
        other.write_bytes(b"b" * 100)
        status = trace.stat()
        os.utime(other, ns=(status.st_atime_ns, status.st_mtime_ns))
        other.replace(trace)
        assert cache.content(trace).key != before.key

    def test_a_file_just_written_is_always_read_again(self, cache, trace, monkeypatch):
        """It could change again within a tick of the file system's clock, unseen in its times."""
        monkeypatch.setattr(module, "_SETTLED_NS", 10**12)  # however slow this test is
        content = cache.content(trace)
        assert cache.known_content(trace) is None
        assert content.is_current()
        status = trace.stat()
        object.__setattr__(content, "state", module.FileState.of(trace))
        trace.write_bytes(b"b" * 100)
        os.utime(trace, ns=(status.st_atime_ns, status.st_mtime_ns))
        object.__setattr__(content, "state", module.FileState.of(trace))  # as if nothing had ticked
        assert not content.is_current()

    def test_a_file_that_changes_while_it_is_hashed_has_none(self, cache, trace, monkeypatch):
        def hash_and_append(path: Path) -> str:
            with path.open("ab") as file:
                file.write(b"more")
            return "0" * 40

        monkeypatch.setattr(module, "_hash", hash_and_append)
        assert cache.content(trace) is None

    def test_a_file_that_is_gone_has_none(self, cache, tmp_path):
        assert cache.content(tmp_path / "gone") is None
        assert cache.content(tmp_path) is None

    def test_a_damaged_note_is_not_believed(self, cache, trace, old):
        key = cache.content(trace).key
        (note,) = cache.folder.iterdir()
        note.write_bytes(b"")
        assert cache.content(trace).key == key
        assert note.read_text() == key


class TestEntries:
    def test_what_is_saved_is_loaded(self, cache):
        cache.save("x.rank", lambda path: path.write_bytes(b"value"))
        assert cache.load("x.rank", Path.read_bytes) == b"value"
        assert cache.load("y.rank", Path.read_bytes) is None

    def test_one_that_cannot_be_read_is_removed_and_made_again(self, cache):
        cache.save("x.rank", lambda path: path.write_bytes(b"no number"))
        assert cache.load("x.rank", lambda path: int(path.read_bytes())) is None
        assert entries(cache) == {}
        cache.save("x.rank", lambda path: path.write_bytes(b"7"))
        assert cache.load("x.rank", lambda path: int(path.read_bytes())) == 7

    def test_half_written_ones_are_never_seen(self, cache):
        def fail_half_way(path: Path) -> None:
            path.write_bytes(b"half")
            raise OSError(28, "No space left on device")

        cache.save("x.rank", fail_half_way)
        assert entries(cache) == {}

    def test_what_a_killed_process_left_is_cleared_away(self, cache):
        cache.save("x.rank", lambda path: path.write_bytes(b"value"))
        abandoned, current = cache.folder / "x-1.tmp", cache.folder / "x-2.tmp"
        abandoned.write_bytes(b"half")
        current.write_bytes(b"half")
        os.utime(abandoned, (0, 0))
        cache.trim()
        assert set(entries(cache)) == {"x.rank", "x-2.tmp"}

    def test_it_is_the_user_s_alone(self, cache):
        cache.save("x.rank", lambda path: path.write_bytes(b"value"))
        assert cache.folder.stat().st_mode & 0o077 == 0


class TestBound:
    def test_what_was_not_used_for_longest_goes_first(self, tmp_path):
        cache = Cache(tmp_path, limit_bytes=250)
        for age, name in enumerate(("c", "b", "a")):
            cache.save(f"{name}.rank", lambda path: path.write_bytes(b"x" * 80))
            os.utime(cache.folder / f"{name}.rank", (1000 - age, 1000 - age))
        assert cache.load("a.rank", Path.read_bytes) is not None  # used now
        cache.save("d.rank", lambda path: path.write_bytes(b"x" * 80))
        assert set(entries(cache)) == {"a.rank", "c.rank", "d.rank"}

    def test_an_entry_larger_than_the_bound_is_not_stored(self, tmp_path):
        cache = Cache(tmp_path, limit_bytes=50)
        cache.save("a.rank", lambda path: path.write_bytes(b"x" * 40))
        cache.save("b.rank", lambda path: path.write_bytes(b"x" * 80))
        assert set(entries(cache)) == {"a.rank"}

    def test_nothing_of_others_is_removed(self, tmp_path):
        (tmp_path / "thesis.tex").write_bytes(b"x" * 1000)
        cache = Cache(tmp_path, limit_bytes=10)
        cache.save("a.rank", lambda path: path.write_bytes(b"x" * 8))
        cache.save("b.rank", lambda path: path.write_bytes(b"x" * 8))
        assert (tmp_path / "thesis.tex").exists()
        assert set(entries(cache)) == {"b.rank"}


@pytest.mark.parametrize("place", ["a file", "read-only", "absent device"])
def test_a_place_that_cannot_be_written_fails_nothing(tmp_path, trace, place, monkeypatch):
    folder = tmp_path / "cache"
    if place == "a file":
        folder.write_bytes(b"")
    elif place == "read-only":
        # Permissions do not stop root, and tests may run as root.
        monkeypatch.setattr(tempfile, "mkstemp", _refuse)
    else:
        folder = Path("/dev/null/cache")
    cache = Cache(folder)
    assert cache.content(trace) is not None
    cache.save("x.rank", lambda path: path.write_bytes(b"value"))
    assert cache.load("x.rank", Path.read_bytes) is None
    cache.trim()


def _refuse(**_: object) -> None:
    raise PermissionError(13, "Permission denied")


class TestSettings:
    def test_off(self, monkeypatch):
        monkeypatch.setenv("PERFSCOPE_CACHE", "off")
        assert Cache.from_environment() is None

    def test_elsewhere(self, monkeypatch, tmp_path):
        monkeypatch.setenv("PERFSCOPE_CACHE", str(tmp_path))
        cache = Cache.from_environment()
        assert cache is not None
        assert cache.folder.parent == tmp_path
        assert cache.limit_bytes == 5_000_000_000

    @pytest.mark.skipif(os.name == "nt" or os.uname().sysname == "Darwin", reason="these have a place of their own")
    def test_by_default_where_the_platform_wants_it(self, monkeypatch, tmp_path):
        monkeypatch.delenv("PERFSCOPE_CACHE")
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
        cache = Cache.from_environment()
        assert cache is not None
        assert cache.folder.parent == tmp_path / "perfscope"

    @pytest.mark.parametrize(
        ("text", "size"),
        [("1234", 1234), ("500MB", 500_000_000), ("1.5 g", 1_500_000_000), ("2TiB", 2_000_000_000_000)],
    )
    def test_size(self, monkeypatch, tmp_path, text, size):
        monkeypatch.setenv("PERFSCOPE_CACHE", str(tmp_path))
        monkeypatch.setenv("PERFSCOPE_CACHE_SIZE", text)
        cache = Cache.from_environment()
        assert cache is not None
        assert cache.limit_bytes == size

    def test_a_size_that_is_none(self, monkeypatch, tmp_path):
        monkeypatch.setenv("PERFSCOPE_CACHE", str(tmp_path))
        monkeypatch.setenv("PERFSCOPE_CACHE_SIZE", "plenty")
        with pytest.raises(PerfscopeError, match="PERFSCOPE_CACHE_SIZE=plenty: not a size"):
            Cache.from_environment()


def test_a_fingerprint_follows_the_sources(tmp_path, monkeypatch):
    import importlib

    (tmp_path / "made_for_test.py").write_text("x = 1\n")
    (tmp_path / "made_package").mkdir()
    (tmp_path / "made_package" / "__init__.py").write_text("")
    (tmp_path / "made_package" / "part.py").write_text("x = 1\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    for name, changed in (("made_for_test", "made_for_test.py"), ("made_package", "made_package/part.py")):
        made = importlib.import_module(name)
        before = fingerprint(made)
        (tmp_path / changed).write_text("x = 2\n")
        fingerprint.cache_clear()
        assert fingerprint(made) != before
    fingerprint.cache_clear()


def _hammer(folder: str, worker: int, rounds: int, limit: int) -> None:
    cache = Cache(Path(folder), limit)
    for turn in range(rounds):
        name = f"{turn % 7}.rank"
        body = bytes([turn % 7]) * 5000
        cache.save(name, lambda path, body=body: path.write_bytes(body))
        seen = cache.load(name, Path.read_bytes)
        assert seen in (None, body), f"worker {worker} saw something else"


@pytest.mark.parametrize("limit", [10_000_000, 12_000])
def test_many_processes_at_once(tmp_path, limit):
    """With the smaller bound they remove each other's entries while these are read."""
    context = multiprocessing.get_context("spawn")
    processes = [context.Process(target=_hammer, args=(str(tmp_path), worker, 200, limit)) for worker in range(3)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0, 0, 0]
    cache = Cache(tmp_path, limit)
    cache.trim()
    left = entries(cache)
    assert all(body == bytes([int(name[0])]) * 5000 for name, body in left.items())
    assert sum(map(len, left.values())) <= limit
    assert left
