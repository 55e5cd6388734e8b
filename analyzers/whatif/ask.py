"""``perfscope.whatif``: what a step of a recorded job would take with settings changed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from concurrent.futures import Executor
from pathlib import Path

from perfscope import remote
from perfscope.analyzers.analyze import read_ranks
from perfscope.analyzers.compared import compare_job
from perfscope.analyzers.whatif.change import Context
from perfscope.analyzers.whatif.predict import Prediction, predict
from perfscope.job import open_job


def whatif(path: str | Path, settings: Mapping[str, str], *, executor: Executor | None = None) -> Prediction:
    """One replay of the recording at ``path`` with all ``settings`` changed, such as ``{"network.bandwidth": "2x"}``.

    Raises UnusableInput where no rank can be analyzed, BadSetting for a setting that is not understood, CannotReplay
    where this recording does not allow the prediction; each says why and what would help.
    """
    return predict(context_of(path, executor=executor), settings)


def sweep(context: Context, settings: Mapping[str, str], name: str, values: Iterable[str]) -> list[Prediction]:
    """``settings`` with ``name`` set to each of ``values``: a curve."""
    return [predict(context, {**settings, name: value}) for value in values]


def context_of(
    path: str | Path, *, capture: int | None = None, executor: Executor | None = None, workers: int | None = None
) -> Context:
    """Read, compare and play a recording once, for any number of predictions. ``path`` may be a URL."""
    if remote.is_url(str(path)):
        with remote.opened(str(path)) as folder:
            return _context(folder, capture, executor, workers)
    return _context(Path(path), capture, executor, workers)


def _context(path: Path, capture: int | None, executor: Executor | None, workers: int | None) -> Context:
    job, found = read_ranks(open_job(path, capture), executor, workers)
    compared = compare_job(job, found)
    return Context(compared.result, compared.recorded, compared.models, compared.runs)
