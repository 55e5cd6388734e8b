"""When a process counts as standing still, on a clock that is moved by hand."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from perfscope.collectors.config import CollectorConfig
from perfscope.collectors.hang import watch
from perfscope.recording.paths import BOOTSTRAP_FOLDER, stacks_file


def test_what_a_process_has_waited_for_its_ranks_is_no_standing_still(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It waits for an hour, and does something else just when the hang timeout is over once more."""
    (tmp_path / BOOTSTRAP_FOLDER).mkdir()
    machine = SimpleNamespace(now_s=0.0, waits=True)
    monkeypatch.setattr(watch, "time", SimpleNamespace(monotonic=lambda: machine.now_s))
    monkeypatch.setattr(watch, "waits_for_processes", lambda: machine.waits)
    watching = watch.HangWatch(CollectorConfig(output=str(tmp_path), package_root="", hang_timeout=4.0))

    def passes(seconds: float) -> bool:
        """Look every half a second; has it written where it stands?"""
        for _ in range(int(2 * seconds)):
            machine.now_s += 0.5
            watching._look()
        return stacks_file(tmp_path, 0).exists()

    assert not passes(3603.5)
    machine.waits = False
    assert not passes(3.5)
    assert passes(0.5)


def test_a_recording_that_has_ended_is_watched_no_longer(tmp_path: Path) -> None:
    """Also where the same process begins another one, at whose first step all watches begin."""
    (tmp_path / BOOTSTRAP_FOLDER).mkdir()
    config = CollectorConfig(output=str(tmp_path), package_root="", hang_timeout=4.0)
    first = watch.make(config)
    watch.begin()
    assert first._background is not None
    watch.drop()
    watch.begin()
    assert first._background is None
    assert watch.watches == []
