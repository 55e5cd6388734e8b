"""``perfscope.whatif``: what a step of a recorded job would take with settings changed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from concurrent.futures import Executor
from pathlib import Path

from perfscope.analyzers.read_ranks import read_ranks
from perfscope.analyzers.replay.job_replay import replay_job
from perfscope.analyzers.whatif.change import Context
from perfscope.analyzers.whatif.predict import WhatIfAnswer, predict, unprofiled_context
from perfscope.recording import remote
from perfscope.recording.role_jobs import open_main


def whatif(path: str | Path, settings: Mapping[str, str], *, executor: Executor | None = None) -> WhatIfAnswer:
    """One replay of the recording at ``path`` with all ``settings`` changed, such as ``{"network.bandwidth": "2x"}``.

    Raises UnusableInput where no rank can be analyzed, BadSetting for a setting that is not understood, CannotReplay
    where this recording does not allow the prediction; each says why and what would help.
    """
    return predict(context_of(path, executor=executor), settings)


def sweep(context: Context, settings: Mapping[str, str], name: str, values: Iterable[str]) -> list[WhatIfAnswer]:
    """``settings`` with ``name`` set to each of ``values``: a curve."""
    return [predict(context, {**settings, name: value}) for value in values]


def context_of(
    path: str | Path, *, capture: int | None = None, executor: Executor | None = None, workers: int | None = None
) -> Context:
    """Read, align and replay a recording once, for any number of predictions. ``path`` may be a URL."""
    with remote.opened(path) as folder:
        replay = replay_job(*read_ranks(open_main(folder, capture), executor, workers))
    return unprofiled_context(replay)
