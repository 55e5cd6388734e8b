"""Describes the data loaders that the job draws from."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from perfscope.metadata import DataLoaderRecord


class LoaderUses:
    """The data loaders that batches came from, and how many did."""

    def __init__(self) -> None:
        # By the identity of the loader's sampler, which all iterators of one loader share; the sampler is kept so that
        # the identity stays its own. The iterator is not: it would keep worker processes alive.
        self._uses: dict[int, tuple[Any, DataLoaderRecord]] = {}

    def drew(self, iterator: Any) -> None:
        """A batch came out of an iterator."""
        sampler = iterator._index_sampler
        if id(sampler) not in self._uses:
            self._uses[id(sampler)] = (sampler, _describe(iterator))
        record = self._uses[id(sampler)][1]
        self._uses[id(sampler)] = (sampler, dataclasses.replace(record, batches=record.batches + 1))

    def records(self) -> tuple[DataLoaderRecord, ...]:
        """Every loader, in the order of their first batches."""
        return tuple(record for _, record in self._uses.values())


def _describe(iterator: Any) -> DataLoaderRecord:
    from torch.utils.data import IterableDataset

    batches, dataset = iterator._index_sampler, iterator._dataset
    return DataLoaderRecord(
        num_workers=iterator._num_workers,
        batch_size=getattr(batches, "batch_size", None),
        pin_memory=bool(iterator._pin_memory),
        prefetch_factor=getattr(iterator, "_prefetch_factor", None),
        persistent_workers=bool(iterator._persistent_workers),
        drop_last=bool(iterator._drop_last),
        dataset=type(dataset).__name__,
        dataset_length=_length(dataset),
        iterable=isinstance(dataset, IterableDataset),
        sampler=type(getattr(batches, "sampler", batches)).__name__,
    )


def _length(dataset: Any) -> int | None:
    """Samples in a dataset; None for one that does not know."""
    try:
        return len(dataset)
    except (TypeError, NotImplementedError):
        return None


def first_shape(batch: Any, depth: int = 4) -> tuple[int, ...] | None:
    """Shape of the first tensor in a batch, looking into lists, tuples and mappings; None where there is none."""
    import torch

    if isinstance(batch, torch.Tensor):
        return tuple(batch.shape)
    if depth == 0 or not isinstance(batch, (list, tuple, Mapping)):
        return None
    items = batch.values() if isinstance(batch, Mapping) else batch
    return next((shape for shape in (first_shape(item, depth - 1) for item in items) if shape is not None), None)
