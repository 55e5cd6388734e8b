"""Reports are read through the user's own ``nsys``; here a stand-in that copies a prepared export."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from perfscope.analyzers.readers import detect, nsys
from perfscope.errors import TraceError
from tests.analyzers.readers.nsys_exports import Export

STAND_IN = """#!{python}
import pathlib, shutil, sys
log = pathlib.Path({log!r})
log.write_text((log.read_text() if log.exists() else "") + " ".join(sys.argv[1:]) + "\\n")
if {code}:
    sys.exit("no such report version")
shutil.copy({export!r}, sys.argv[sys.argv.index("--output") + 1])
"""


class StandIn:
    """An ``nsys`` that exports what its arguments ask for."""

    def __init__(self, folder: Path, *, code: int = 0) -> None:
        export = Export(folder / "prepared.sqlite")
        export.kernel(1, "k", 10, 40)
        self._log = folder / "log"
        self.path = folder / "nsys"
        self.path.write_text(
            STAND_IN.format(python=sys.executable, log=str(self._log), code=code, export=str(export.close()))
        )
        self.path.chmod(0o755)

    @property
    def calls(self) -> list[str]:
        return self._log.read_text().splitlines() if self._log.exists() else []


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PERFSCOPE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def exports(cache: Path) -> list[Path]:
    return sorted(cache.glob("*/nsys/*"))


@pytest.fixture
def report(tmp_path: Path) -> Path:
    path = tmp_path / "job" / "rank0.nsys-rep"
    path.parent.mkdir()
    path.write_bytes(b"only nsys knows")
    return path


@pytest.fixture
def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> StandIn:
    found = StandIn(tmp_path)
    monkeypatch.setenv("PERFSCOPE_NSYS", str(found.path))
    return found


def test_a_report_is_exported_once_and_read(report: Path, stand_in: StandIn, own_cache: Path) -> None:
    assert detect(report) == "nsys-rep"
    (found,) = nsys.ranks(report)
    trace = nsys.read(report, found.part)
    assert [trace.name_of(0), trace.source] == ["k", str(report)]
    (call,) = stand_in.calls
    assert call.startswith("export --type sqlite --force-overwrite true --output ")
    assert call.endswith(str(report))
    assert len(exports(own_cache)) == 1
    assert list(report.parent.iterdir()) == [report]


def test_a_report_that_changed_is_exported_again(report: Path, stand_in: StandIn) -> None:
    nsys.ranks(report)
    report.write_bytes(b"another recording")
    nsys.ranks(report)
    assert len(stand_in.calls) == 2


def test_nsys_on_the_path_is_found(report: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PERFSCOPE_NSYS", raising=False)
    stand_in = StandIn(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    assert len(nsys.ranks(report)) == 1
    assert len(stand_in.calls) == 1


def test_without_nsys_the_remedy_is_named(report: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PERFSCOPE_NSYS", raising=False)
    monkeypatch.setenv("PATH", str(report.parent))
    with pytest.raises(
        TraceError, match=r"rank0\.nsys-rep: .*nsys export --type sqlite rank0\.nsys-rep.*PERFSCOPE_NSYS"
    ):
        nsys.ranks(report)


def test_the_output_of_a_failing_nsys_is_passed_on(
    report: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, own_cache: Path
) -> None:
    monkeypatch.setenv("PERFSCOPE_NSYS", str(StandIn(tmp_path, code=3).path))
    with pytest.raises(
        TraceError, match=r"rank0\.nsys-rep: .*failed with 1 \(no such report version\).*at least as new"
    ):
        nsys.read(report)
    assert not exports(own_cache)


def test_a_session_that_never_became_a_report(tmp_path: Path) -> None:
    path = tmp_path / "report.qdstrm"
    path.write_bytes(b"x")
    with pytest.raises(TraceError, match=r"report\.qdstrm: .*QdstrmImporter"):
        nsys.read(path)


def test_a_cache_that_is_off_leaves_nothing_behind(
    report: Path, stand_in: StandIn, tmp_path: Path, own_cache: Path
) -> None:
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    script = (
        "import pathlib, sys; from perfscope.analyzers.readers import nsys; path = pathlib.Path(sys.argv[1])\n"
        "print(nsys.read(path, nsys.ranks(path)[0].part).name_of(0))\n"
        f"print(*pathlib.Path({str(temporary)!r}).glob('*/*'))"
    )
    environment = {**os.environ, "PERFSCOPE_CACHE": "off", "TMPDIR": str(temporary)}
    done = subprocess.run(
        [sys.executable, "-c", script, str(report)], env=environment, capture_output=True, text=True, check=True
    )
    name, during = done.stdout.splitlines()
    assert name == "k"
    assert during.endswith(".sqlite")  # made once, for every process that shares the work
    assert len(stand_in.calls) == 1
    assert not list(temporary.glob("*/*"))
    assert not own_cache.exists()


def test_old_exports_go_when_there_are_too_many(
    report: Path, stand_in: StandIn, own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nsys.ranks(report)
    (first,) = exports(own_cache)
    size = first.stat().st_size
    monkeypatch.setenv("PERFSCOPE_CACHE_SIZE", f"{2 * size}B")
    for index in range(3):
        old = first.with_name(f"old{index}.sqlite")
        shutil.copy(first, old)
        os.utime(old, (time.time() - 1000 + index, time.time() - 1000 + index))
    report.write_bytes(b"the newest recording")
    nsys.ranks(report)
    left = exports(own_cache)
    assert first in left
    assert len(left) == 2
