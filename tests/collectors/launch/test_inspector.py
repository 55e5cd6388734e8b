"""The variables that let NCCL load its Inspector: the command sees them, and its own stay."""

from __future__ import annotations

from pathlib import Path

from perfscope.collectors.launch import inspector


def test_what_is_set_already_stays(tmp_path: Path) -> None:
    own = {"NCCL_PROFILER_PLUGIN": "/opt/mine.so", "NCCL_INSPECTOR_DUMP_DIR": "/logs"}
    added = inspector.variables(tmp_path, own)
    assert added == {"NCCL_INSPECTOR_ENABLE": "1", "NCCL_INSPECTOR_DUMP_THREAD_INTERVAL_MICROSECONDS": "500"}


def test_the_plugin_is_looked_for_beside_the_libraries(tmp_path: Path) -> None:
    library = tmp_path / "librccl-profiler-inspector.so"
    library.touch()
    added = inspector.variables(tmp_path, {"LD_LIBRARY_PATH": f"/nowhere:{tmp_path}"})
    assert added["NCCL_PROFILER_PLUGIN"] == str(library)
    assert added["NCCL_INSPECTOR_DUMP_DIR"] == str(tmp_path / "nccl-inspector")
    assert inspector.variables(tmp_path, {})["NCCL_PROFILER_PLUGIN"] == "inspector"


def test_logs_of_a_recording_that_is_replaced_go(tmp_path: Path) -> None:
    folder = tmp_path / "nccl-inspector"
    folder.mkdir()
    (folder / "node-a-pid12.log").touch()
    (folder / "mine.txt").touch()
    inspector.remove_logs(tmp_path)
    assert [path.name for path in folder.iterdir()] == ["mine.txt"]
