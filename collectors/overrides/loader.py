"""Makes the script's data loaders with other values: workers, pinning, prefetching, persistent workers."""

from __future__ import annotations

import functools
import inspect
import multiprocessing
from collections.abc import Callable, Mapping
from typing import Any, Final

from perfscope.collectors.overrides.log import Log
from perfscope.collectors.patches import Patches

NAMES: Final = ("num_workers", "pin_memory", "prefetch_factor", "persistent_workers")
"""Arguments of ``DataLoader`` that change neither the batches nor their order."""

_OF_WORKERS: Final = {"prefetch_factor": None, "persistent_workers": False}
"""Arguments that need a worker, and what they are without."""
_NONE_WITHOUT_WORKERS: Final = {**_OF_WORKERS, "timeout": 0, "multiprocessing_context": None}


def override_loaders(values: Mapping[str, Any], datasets: tuple[str, ...], patches: Patches, log: Log) -> None:
    """Every loader made from now on, of these datasets' classes (all where there are none), takes the values."""
    from torch.utils.data import DataLoader

    original: Callable[..., None] = DataLoader.__init__
    signature = inspect.signature(original)

    @functools.wraps(original)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807 - it stands in for that very method
        try:
            bound = signature.bind(self, *args, **kwargs)
            bound.apply_defaults()
            given = dict(bound.arguments)
            changes = wanted_changes(given, values, datasets, log)
        except TypeError:  # the script's own mistake, which torch reports
            return original(self, *args, **kwargs)
        if changes:
            try:
                bound.arguments.update(changes)
                original(*bound.args, **bound.kwargs)
            except Exception as error:
                for name in changes:
                    log.refused(f"dataloader.{name}", f"DataLoader rejects it: {error}")
            else:
                for name in changes:
                    log.replaced(f"dataloader.{name}", given[name], changes[name])
                return None
        return original(self, *args, **kwargs)

    patches.set(DataLoader, "__init__", __init__)


def wanted_changes(
    given: Mapping[str, Any], values: Mapping[str, Any], datasets: tuple[str, ...], log: Log
) -> dict[str, Any]:
    """The arguments of one loader that are to be others; empty where it is none of those meant."""
    dataset = given["dataset"]
    if multiprocessing.current_process().daemon or (datasets and type(dataset).__name__ not in datasets):
        return {}
    changes = {name: values[name] for name in NAMES if name in values and values[name] != given[name]}
    before, after = given["num_workers"], changes.get("num_workers", given["num_workers"])
    if after > max(before, 1) and before < 2 and _is_stream(dataset):
        # Each worker would deliver the whole stream, unless the dataset shares it out, which nobody can see.
        log.refused("dataloader.num_workers", "several workers may each deliver the whole of an iterable dataset")
        changes.pop("num_workers")
        after = before
    if after == 0:
        for name in _OF_WORKERS:
            if changes.pop(name, None):
                log.refused(f"dataloader.{name}", "it needs num_workers of at least 1")
        if before:
            changes |= {name: none for name, none in _NONE_WITHOUT_WORKERS.items() if given[name] != none}
    return changes


def _is_stream(dataset: Any) -> bool:
    from torch.utils.data import IterableDataset

    return isinstance(dataset, IterableDataset)
