"""Memory snapshots from anybody: read where they are what torch writes, refused where they are anything else."""

from __future__ import annotations

import copy
import pickle
import random
from pathlib import Path
from typing import Any

import pytest

from perfscope.analyzers.analyze import analyze
from perfscope.analyzers.readers import snapshot as reader
from perfscope.analyzers.snapshots.job_snapshots import of_snapshot
from perfscope.errors import PerfscopeError, TraceError, UnusableInput
from perfscope.recording import snapshots
from perfscope.reports import terminal
from perfscope.reports.page import page
from tests.analyzers.readers.flight_fuzz import mutations, strange
from tests.analyzers.snapshots.allocator import MIB, Allocator, stack, train


class Evil:
    """Would run a command, were it unpickled."""

    def __reduce__(self) -> tuple[Any, ...]:
        return print, ("looked up",)


def small() -> Allocator:
    allocator = Allocator()
    train(allocator, 5, layers=2, leak=MIB)
    return allocator


@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
def test_every_protocol_is_read_alike(protocol: int, tmp_path: Path) -> None:
    allocator = small()
    path = tmp_path / "snapshot.pickle"
    path.write_bytes(pickle.dumps(allocator.document(), protocol))
    assert snapshots.is_snapshot(path)
    assert of_snapshot(reader.read(path)).devices[0].peak_bytes == allocator.peak


@pytest.mark.parametrize("where", ["segments", "device_traces", "allocator_settings"])
def test_a_snapshot_with_a_class_in_it_is_refused(
    where: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "rank0.pickle"
    path.write_bytes(pickle.dumps({**small().document(), where: [Evil()]}))
    with pytest.raises(TraceError, match=r"rank0.pickle: cannot be read as a memory snapshot \(not plain data"):
        reader.read(path)
    with pytest.raises(UnusableInput, match=r"rank0.pickle"):
        analyze(tmp_path)
    assert capsys.readouterr().out == ""


def test_cut_and_changed_files_are_read_or_refused() -> None:
    data = pickle.dumps(small().document())
    for mutated in mutations(data, random.Random(5), 300):
        try:
            found = reader.parse(mutated)
        except ValueError:
            continue
        of_snapshot(found, 0, 80 << 30)


def test_values_of_other_types_count_as_absent() -> None:
    document = small().document()
    rng = random.Random(6)
    for _ in range(150):
        of_snapshot(reader.parse(pickle.dumps(strange(document, rng))), 0, 80 << 30)


def test_extreme_sizes_and_addresses() -> None:
    document = copy.deepcopy(small().document())
    for entry in document["device_traces"][0]:
        entry["size"] = 2**63 - 1
        entry["addr"] = -1
    found = of_snapshot(reader.parse(pickle.dumps(document)), 0, 1)
    assert found.devices


@pytest.mark.parametrize(
    "document", [{"segments": [], "device_traces": []}, {"segments": None}, {"device_traces": [[], [None, 3]]}]
)
def test_empty_snapshots_are_no_recording(document: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "rank0.pickle").write_bytes(pickle.dumps(document))
    with pytest.raises(PerfscopeError, match="no memory of a device"):
        analyze(tmp_path)


def test_markup_in_names_is_text(tmp_path: Path) -> None:
    allocator = Allocator()
    frames = stack(("my<img src=x onerror=alert(1)>.py", 1, "<b>run</b>"), ("/a/train.py", 2, "main"))
    for _ in range(3):
        allocator.alloc(MIB, frames, label="</script><i>label</i>")
    allocator.dump(tmp_path / "rank0.pickle")
    summary = analyze(tmp_path)
    html = page.render(summary)
    for markup in ("<img src", "<b>run", "</script><i>"):
        assert markup not in html
    assert "&lt;b&gt;run" in html
    assert "Rank 0 allocates 3.00 MiB at its peak" in terminal.verdict(summary)


def test_secrets_in_names_stay_out() -> None:
    allocator = Allocator()
    allocator.alloc(MIB, stack(("train.py", 2, "main")), label="step token=hunter2-abcdef")
    (row,) = of_snapshot(reader.parse(pickle.dumps(allocator.document()))).holders
    assert "hunter2" not in row.label
    assert "[redacted]" in row.label


def test_a_flight_recorder_dump_is_none(tmp_path: Path) -> None:
    path = tmp_path / "rank0.pickle"
    path.write_bytes(pickle.dumps({"version": "2.9", "entries": [], "pg_config": {}, "pg_status": {}}))
    assert snapshots.find([path]) == []
