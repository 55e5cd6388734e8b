"""What a loader's workers count of their own fetching, and that their batches are the same as ever."""

from __future__ import annotations

import json
import mmap
import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from perfscope.collectors.config import CollectorConfig
from perfscope.collectors.launch.folder import package_root
from perfscope.collectors.launch.run import Launch, child_environment
from perfscope.collectors.phases.fetching import COUNT, counting
from perfscope.collectors.phases.workers import Workers
from perfscope.recording.paths import BOOTSTRAP_FOLDER
from tests.collectors.harness import SCRIPTS, needs_torch

SLEEP_S = 0.004
"""Of a sample in scripts/loaders.py."""


def test_what_is_fetched_is_counted_and_what_fails_is_not() -> None:
    def fetch(index: int) -> int:
        time.sleep(SLEEP_S)
        return [7][index]

    count = mmap.mmap(-1, mmap.PAGESIZE)
    fetcher = counting(lambda: SimpleNamespace(fetch=fetch), count)()
    assert [fetcher.fetch(0), fetcher.fetch(0)] == [7, 7]
    with pytest.raises(IndexError):
        fetcher.fetch(1)
    batches, fetch_ns = COUNT.unpack_from(count)
    assert batches == 2
    assert fetch_ns >= 2 * SLEEP_S * 1e9


def test_a_fetcher_that_cannot_be_changed_stays_as_it_is() -> None:
    assert counting(lambda: (1, 2), mmap.mmap(-1, mmap.PAGESIZE))() == (1, 2)


def test_a_process_that_counts_nothing_has_fetched_nothing() -> None:
    workers = Workers((os.getpid(),))
    assert workers.look() is None
    worked = workers.look()
    if sys.platform == "linux":
        assert worked is not None
        assert (worked.batches, worked.fetch_ns) == (0, 0)


@needs_torch
@pytest.mark.training
@pytest.mark.skipif(sys.platform != "linux", reason="memory without a name is the kernel's of Linux")
def test_workers_of_every_kind_count_and_deliver_what_they_would(tmp_path: Path) -> None:
    folder = tmp_path / "r"
    Launch(CollectorConfig(output=str(folder), package_root=package_root()), ["python"]).prepare()
    environment = child_environment(os.environ, folder / BOOTSTRAP_FOLDER)
    command = [sys.executable, str(SCRIPTS / "loaders.py")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    found = json.loads(done.stdout)
    assert {"fork", "spawn", "forkserver", "stream"} <= set(found)
    for kind, (numbers, batches, fetch_ns) in found.items():
        samples = 1 if kind == "samples" else 2
        expected = list(range(0, 12, samples))
        if "stream" in kind:  # worker 0 has the even samples, worker 1 the odd ones, and they deliver in turn
            expected = [0, 1, 4, 5, 8, 9]
            samples = 2
        assert numbers == expected * (1 if kind in ("spawn", "forkserver") else 2), kind
        assert 0 < batches <= len(numbers), kind
        assert fetch_ns >= batches * samples * SLEEP_S * 1e9, kind
    assert not (folder / BOOTSTRAP_FOLDER / "failures.txt").exists()
