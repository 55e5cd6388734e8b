"""Describes the data loaders that the job draws from."""

from __future__ import annotations

import ctypes
import dataclasses
import zlib
from collections import Counter
from collections.abc import Mapping
from typing import Any, Final

from perfscope.collectors import cpu
from perfscope.collectors.phases.workers import Worked, Workers
from perfscope.recording.metadata import DataLoaderMetadata

FINGERPRINTS: Final = 3
"""First batches of each loader whose checksums are stored."""
CHECKED_BYTES: Final = 1 << 16
"""Of each of them: enough to distinguish samples, and some 20 µs."""


class UsedLoaders:
    """The data loaders that batches came from, and how many did."""

    def __init__(self) -> None:
        # By the identity of the loader's sampler, which all iterators of one loader share; the sampler is kept so that
        # the identity stays its own. The iterator is not: it would keep worker processes alive.
        self._uses: dict[int, tuple[Any, DataLoaderMetadata]] = {}
        self._workers: dict[int, Workers] = {}
        """Loader -> its workers when a batch was last drawn."""
        self._trained: Counter[int] = Counter()
        """Loader -> forwards of the training that followed batches of it."""
        self._undecided: set[int] = set()
        """Loaders whose batches no forward has followed yet."""
        self._began: cpu.Times | None = None
        self.took: cpu.Times | None = None
        """What the last draw took; None before :meth:`draw_ended` and after :meth:`drew`."""
        self._shapes: dict[int, tuple[int, ...] | None] = {}
        """Loader -> shape of the first tensor of its first batch."""

    @property
    def batch_shape(self) -> tuple[int, ...] | None:
        """Shape of the first tensor of the first batch of the loader that the training drew from; None without."""
        return next((self._shapes[loader] for loader in self._in_order()), None)

    def draw_begins(self) -> None:
        """The training thread begins to take a batch from an iterator: look at the clocks."""
        self.took, self._began = None, cpu.now()

    def draw_ended(self) -> None:
        """It has the batch, or failed."""
        if self._began is not None:
            self.took, self._began = cpu.now().since(self._began), None

    def drew(self, iterator: Any, batch: Any) -> None:
        """A batch came out of an iterator. Its fingerprint is taken only where the draw was timed."""
        took, self.took = self.took, None
        sampler = iterator._index_sampler
        if id(sampler) not in self._uses:
            self._uses[id(sampler)] = (sampler, _describe(iterator))
            self._shapes[id(sampler)] = _first_shape(batch)
        self._undecided.add(id(sampler))
        record = self._uses[id(sampler)][1]
        changed = dataclasses.replace(record, batches=record.batches + 1, sampler_epoch=_epoch(sampler))
        if took is not None:
            if shape := _first_shape(batch):
                changed = dataclasses.replace(
                    changed,
                    seen_batches=record.seen_batches + 1,
                    seen_samples=record.seen_samples + shape[0],
                    seen_positions=record.seen_positions + (shape[0] * shape[1] if len(shape) == 2 else 0),
                )
            if record.batches < FINGERPRINTS and (mark := fingerprint(batch)) is not None:
                changed = dataclasses.replace(changed, fingerprints=(*record.fingerprints, mark))
            changed = self._with_times(changed, iterator, id(sampler), took)
        self._uses[id(sampler)] = (sampler, changed)

    def forward_begins(self, *, training: bool) -> None:
        """The batches drawn since the last forward go into this one, of the training or of an evaluation."""
        if training:
            self._trained.update(self._undecided)
        self._undecided.clear()

    def pause(self) -> None:
        """Nothing is recorded for a while: what workers do meanwhile is not to count."""
        self._workers.clear()
        self.took = self._began = None

    def _with_times(
        self, record: DataLoaderMetadata, iterator: Any, loader: int, took: cpu.Times
    ) -> DataLoaderMetadata:
        """``record`` with what the batch just drawn took, where the CPU time of the workers is known."""
        worked = self._worked(iterator, loader) if record.num_workers else Worked(took.thread, 0, 0)
        if worked is None:
            return record
        return dataclasses.replace(
            record,
            timed_batches=record.timed_batches + 1,
            load_ns=record.load_ns + took.wall,
            load_cpu_ns=record.load_cpu_ns + worked.cpu_ns,
            load_process_cpu_ns=record.load_process_cpu_ns + took.process,
            fetched_batches=record.fetched_batches + worked.batches,
            fetch_ns=record.fetch_ns + worked.fetch_ns,
        )

    def _worked(self, iterator: Any, loader: int) -> Worked | None:
        """What a loader's workers did since its last batch; None for the first batch of these workers."""
        workers = self._workers.pop(loader, None)
        try:
            pids = tuple(worker.pid for worker in iterator._workers)
        except (AttributeError, ValueError):  # ended and closed
            return None
        if workers is None or workers.pids != pids:
            workers = Workers(pids)
        worked = workers.look()
        self._workers[loader] = workers
        return worked

    def records(self) -> tuple[DataLoaderMetadata, ...]:
        """Every loader: those that the training drew from most often first, else as their first batches came."""
        return tuple(self._uses[loader][1] for loader in self._in_order())

    def _in_order(self) -> list[int]:
        return sorted(self._uses, key=lambda loader: -self._trained[loader])


def _describe(iterator: Any) -> DataLoaderMetadata:
    from torch.utils.data import IterableDataset

    batches, dataset = iterator._index_sampler, iterator._dataset
    return DataLoaderMetadata(
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
        batches_per_epoch=None if isinstance(dataset, IterableDataset) else _length(batches),
        shuffle=bool(divider.shuffle) if (divider := _divider(batches)) is not None else None,
    )


def _divider(batches: Any) -> Any:
    """The sampler that divides the samples among ranks and gets the epoch; None without."""
    from torch.utils.data.distributed import DistributedSampler

    sampler = getattr(batches, "sampler", batches)
    return sampler if isinstance(sampler, DistributedSampler) else None


def _epoch(batches: Any) -> int | None:
    divider = _divider(batches)
    return None if divider is None else int(divider.epoch)


def _length(counted: Any) -> int | None:
    """Samples in a dataset, batches of a sampler; None for one that does not know."""
    try:
        return len(counted)
    except (TypeError, NotImplementedError):
        return None


def _first_shape(batch: Any) -> tuple[int, ...] | None:
    """Shape of the first tensor in a batch, looking into lists, tuples and mappings; None where there is none."""
    tensor = _first_tensor(batch)
    return None if tensor is None else tuple(tensor.shape)


def fingerprint(batch: Any) -> int | None:
    """A checksum of the beginning of a batch's first tensor; None where that does not lie in the host's memory in one
    piece. It shows whether two ranks were given the same samples, and nothing of the samples themselves.

    The memory is read as it lies: operators of torch would show in the recording.
    """
    import torch

    tensor = _first_tensor(batch)
    plain = type(tensor) is torch.Tensor and tensor.layout is torch.strided and tensor.device.type == "cpu"
    if tensor is None or not plain or not tensor.is_contiguous() or tensor.nbytes == 0:
        return None
    begins = tensor.storage_offset() * tensor.element_size()
    if tensor.data_ptr() == 0 or tensor.untyped_storage().nbytes() < begins + tensor.nbytes:
        return None  # its memory was given away
    return zlib.crc32(ctypes.string_at(tensor.data_ptr(), min(tensor.nbytes, CHECKED_BYTES)))


def _first_tensor(batch: Any, depth: int = 4) -> Any:
    import torch

    if isinstance(batch, torch.Tensor):
        return batch
    if depth == 0 or not isinstance(batch, (list, tuple, Mapping)):
        return None
    items = batch.values() if isinstance(batch, Mapping) else batch
    return next((tensor for tensor in (_first_tensor(item, depth - 1) for item in items) if tensor is not None), None)
