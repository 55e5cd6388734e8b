"""CUDA graphs that are recorded as one kernel each: what happens in them is not replayed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from perfscope.analyzers.whatif.change import CannotReplay
from perfscope.analyzers.whatif.predict import predict
from perfscope.analyzers.whatif.whatif import context_of
from tests.analyzers.readers.helpers import event, save


def recorded(folder: Path, graph_us: int) -> Path:
    """Five steps of 1 ms, in which a graph takes ``graph_us`` of the device's 800 us, and the host pauses behind it."""
    events: list[dict[str, Any]] = []
    for step in range(5):
        begin = 1_000 * step
        events.append(event(f"ProfilerStep#{step}", cat="user_annotation", ts=begin, dur=1_000))
        for at, (name, starts, takes) in enumerate(
            (("CUDA graph 5", 10, graph_us), ("gemm", 10 + graph_us, 800 - graph_us))
        ):
            args = {"correlation": 10 * step + at}
            events.append(event("cudaLaunchKernel", cat="cuda_runtime", ts=begin + at, dur=1, args=args))
            args |= {"device": 0, "stream": 7}
            events.append(event(name, cat="kernel", pid=0, tid=7, ts=begin + starts, dur=takes, args=args))
    about = {"deviceProperties": [{"id": 0, "name": "NVIDIA H100"}]}
    return save(folder, json.dumps({**about, "traceEvents": events}))


def test_what_happens_in_graphs_that_take_most_of_the_time_is_not_replayed(tmp_path: Path) -> None:
    context = context_of(recorded(tmp_path, 600), workers=1)
    for settings in ({"compute": "2x"}, {"host.launch": "0"}):
        with pytest.raises(CannotReplay, match="CUDA graphs take 75% of the devices' time"):
            predict(context, settings)
    assert predict(context, {"host.pauses": "0"}).mid_ns <= 1_000_000


def test_beside_small_graphs_the_rest_is(tmp_path: Path) -> None:
    context = context_of(recorded(tmp_path, 200), workers=1)
    assert predict(context, {"compute": "2x"}).mid_ns <= 1_000_000
