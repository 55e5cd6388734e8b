"""Which changes are worth trying for a job: what findings ask for first, then what suits its strategies."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any, Final

from perfscope.tuning.candidates import Candidate
from perfscope.tuning.evidence import Evidence

BUCKETS_MB: Final = (1, 2, 4, 10, 50, 100)
WORKERS: Final = (1, 2, 4, 8)
BEST_OF_A_LADDER: Final = 2
"""Values of one setting that are tried, where replay can tell them apart."""

SHORT_EPOCH: Final = 200
"""Steps below which starting the workers anew for each epoch may be felt."""

NEGLIGIBLE: Final = 0.01
"""Predicted share of the step saved, from which a change is tried before those of which nothing is predicted."""

_LEFT_ON: Final = (
    "CUDA_LAUNCH_BLOCKING", "NCCL_ALGO", "NCCL_DEBUG", "NCCL_IB_DISABLE", "NCCL_P2P_DISABLE", "NCCL_PROTO",
    "NCCL_SHM_DISABLE", "TORCH_DISTRIBUTED_DEBUG",
)  # fmt: skip
"""Variables for looking into problems, which cost when they stay."""

_FIRST_GUESS_MB: Final = (4, 100)
"""Bucket sizes to try where replay has no opinion."""

_ZERO_OPTIMIZATION: Final = "deepspeed.zero_optimization"
_DEFAULT_ZERO_BUCKET: Final = 500_000_000
_LARGE_ZERO_BUCKET: Final = 100_000_000
"""Elements from which larger ones would take gigabytes."""


def propose(evidence: Evidence, *, numerics: bool) -> tuple[list[Candidate], list[tuple[Candidate, str]]]:
    """Changes to try, the most promising first, and changes not to try, with the reason.

    ``numerics``: also those that change what the training computes.
    """
    wanted: list[Candidate] = []
    left: list[tuple[Candidate, str]] = []
    for make in _MAKERS:
        for candidate in make(evidence):
            predicted = _supported(candidate, evidence)
            if predicted.numerics and not numerics:
                left.append((predicted, "changes what is computed: allow it with --allow-numerics"))
            elif predicted.predicted is not None and predicted.predicted.low > predicted.predicted.recorded:
                left.append((predicted, "predicted to be slower"))
            else:
                wanted.append(predicted)
    return _ordered(_best_of_ladders(wanted, left)), left


def _supported(candidate: Candidate, evidence: Evidence) -> Candidate:
    """With what the recording says for it: a prediction, a finding."""
    predicted = evidence.predict({candidate.name: candidate.new})
    finding, advised = evidence.finding(candidate.name), evidence.advised(candidate.name)
    if finding is None or (advised is not None and candidate.new != advised):
        return replace(candidate, predicted=predicted)
    return replace(candidate, predicted=predicted, found=True, why=finding.title)


def _ordered(candidates: list[Candidate]) -> list[Candidate]:
    """Findings, then what is predicted to save, then what nothing is known of, then what would save nothing."""

    def promise(candidate: Candidate) -> tuple[int, float]:
        saved = candidate.predicted.saved if candidate.predicted is not None else None
        if candidate.found:
            return 0, -(saved or 0.0)
        if saved is None:
            return 2, 0.0
        return (1, -saved) if saved >= NEGLIGIBLE else (3, -saved)

    return sorted(candidates, key=promise)


def _best_of_ladders(candidates: list[Candidate], left: list[tuple[Candidate, str]]) -> list[Candidate]:
    """Of many values of one setting those that are predicted to be best, and what a finding asks for."""
    kept: list[Candidate] = []
    ladders: dict[str, list[Candidate]] = {}
    for candidate in candidates:
        ladders.setdefault(candidate.name, []).append(candidate)
    for ladder in ladders.values():
        by_promise = _ordered(ladder)
        kept += by_promise[:BEST_OF_A_LADDER]
        left += [(each, "other values promise more") for each in by_promise[BEST_OF_A_LADDER:]]
    return kept


def _workers(evidence: Evidence) -> Iterator[Candidate]:
    loader = evidence.loader
    if loader is None:
        return
    name, old = "dataloader.num_workers", loader.num_workers
    advised = evidence.advised(name)
    # A stream is delivered by each worker in full unless its dataset shares it out: one worker is safe.
    most = max(1, old) if loader.iterable and old < 2 else max(2, evidence.cores or 2)
    for value in sorted({*(value for value in WORKERS if value <= most), *((int(advised),) if advised else ())}):
        if value != old and not (loader.iterable and value > most):
            yield Candidate(name=name, new=value, old=old, why="batches loaded beside the training")


def _loader(evidence: Evidence) -> Iterator[Candidate]:
    loader = evidence.loader
    if loader is None:
        return
    if evidence.run.device.type == "cuda" and not loader.pin_memory:
        yield Candidate(
            name="dataloader.pin_memory", new=True, old=False, why="copies to the device from pinned memory"
        )
    if not loader.num_workers:
        return
    name, prefetch = "dataloader.prefetch_factor", loader.prefetch_factor or 2
    more = int(evidence.advised(name) or 2 * prefetch)
    yield Candidate(name=name, new=more, old=prefetch, why="batches of uneven cost even out")
    per_epoch = (loader.dataset_length or 0) / max((loader.batch_size or 1) * evidence.run.world_size, 1)
    if not loader.persistent_workers and 0 < per_epoch < SHORT_EPOCH:
        yield Candidate(
            name="dataloader.persistent_workers", new=True, old=False,
            why=f"an epoch is {per_epoch:.0f} batches, and workers start anew for each",
        )  # fmt: skip


def _buckets(evidence: Evidence) -> Iterator[Candidate]:
    ddp = _torch_ddp(evidence)
    if not ddp:
        return
    name, old = "ddp.bucket_cap_mb", float(ddp.get("bucket_cap_mb", 25))
    advised = evidence.advised(name)
    model = evidence.run.model
    total_mb = model.trainable_bytes / (1 << 20) if model is not None and model.trainable_bytes else float("inf")
    known = evidence.predict({name: BUCKETS_MB[0]}) is not None
    values = {float(value) for value in (BUCKETS_MB if known else _FIRST_GUESS_MB)} | ({advised} if advised else set())
    for value in sorted(values):
        # From the size of all gradients on, every limit makes the same buckets.
        if value != old and min(value, total_mb) != min(old, total_mb):
            yield Candidate(name=name, new=value, old=old, why="gradients sent in pieces of another size")
            if value >= total_mb:
                return


def _ddp(evidence: Evidence) -> Iterator[Candidate]:
    ddp = _torch_ddp(evidence)
    if not ddp:
        return
    unused = bool(ddp.get("find_unused_parameters"))
    accumulation = evidence.setting("gradient_accumulation")
    if accumulation and accumulation.get("no_sync") is False and not unused and not ddp.get("static_graph"):
        why = f"gradients of {evidence.microbatches} micro-batches, sent once"
        if not ddp.get("instances"):
            yield Candidate(name="ddp.no_sync", new=True, old=False, why=why)
    if unused and not ddp.get("unused_parameter_size"):
        yield Candidate(name="ddp.find_unused_parameters", new=False, old=True, why="no parameter was unused")
    if not ddp.get("gradient_as_bucket_view"):
        yield Candidate(name="ddp.gradient_as_bucket_view", new=True, old=False, why="gradients are not copied")
    if not ddp.get("static_graph") and not accumulation:
        yield Candidate(
            name="ddp.static_graph", new=True, old=False,
            why="the same parameters are used in every step, so DDP need not look",
        )  # fmt: skip
    model = evidence.run.model
    if model is not None and set(model.dtypes) == {"float32"} and not ddp.get("comm_hook"):
        yield Candidate(name="ddp.comm_dtype", new="bf16", old=None, why="half the bytes to send", numerics=True)


def _threads(evidence: Evidence) -> Iterator[Candidate]:
    """OMP threads: of a training on CPUs, or where a finding says that there are too many."""
    name, old = "env.OMP_NUM_THREADS", evidence.run.cpu_threads
    values: dict[int, str] = {}
    if advised := evidence.advised(name):
        values[int(advised)] = "more threads than cores"
    if evidence.run.device.type == "cpu" and evidence.cores is not None:
        values.setdefault(evidence.cores, "as many threads a rank as it has cores")
        values.setdefault(max(evidence.cores // 2, 1), "cores are left to the loader and the network")
    for value, why in values.items():
        if value != old:
            yield Candidate(name=name, new=value, old=old, why=why)


def _variables(evidence: Evidence) -> Iterator[Candidate]:
    """NCCL's, and those left on from looking into problems."""
    if evidence.run.device.type != "cuda":
        return
    environment = evidence.run.environment
    for name in _LEFT_ON:
        if environment.get(name, "0") not in ("0", "", "OFF", "WARN", "VERSION"):
            yield Candidate(name=f"env.{name}", new=None, old=environment[name], why="is for looking into problems")
    if "nccl" not in evidence.run.backend or evidence.run.world_size == 1:
        return
    if "NCCL_BUFFSIZE" not in environment:
        yield Candidate(name="env.NCCL_BUFFSIZE", new=8 << 20, old=None, why="larger pieces in flight (default 4 MiB)")
    if evidence.hosts > 1 and "NCCL_SOCKET_NTHREADS" not in environment:
        yield Candidate(
            name="env.NCCL_SOCKET_NTHREADS", new=4, old=None, why="more threads where hosts talk by sockets"
        )


def _deepspeed(evidence: Evidence) -> Iterator[Candidate]:
    zero = evidence.setting("deepspeed").get("zero_optimization") or {}
    stage = int(zero.get("stage") or 0)
    if not stage:
        return
    if not zero.get("overlap_comm"):
        yield Candidate(
            name=f"{_ZERO_OPTIMIZATION}.overlap_comm", new=True, old=zero.get("overlap_comm"),
            why="gradients are sent while the backward goes on",
        )  # fmt: skip
    if zero.get("contiguous_gradients") is False:
        yield Candidate(
            name=f"{_ZERO_OPTIMIZATION}.contiguous_gradients", new=True, old=False, why="gradients are sent as they lie"
        )
    names = ("reduce_bucket_size", "allgather_bucket_size") if stage < 3 else ("reduce_bucket_size",)
    for name in names:
        old = int(zero.get(name) or _DEFAULT_ZERO_BUCKET)
        advised = evidence.advised(f"{_ZERO_OPTIMIZATION}.{name}")
        values = [max(old // 10, 1_000_000)] if old > _LARGE_ZERO_BUCKET else [max(old // 10, 1_000_000), 4 * old]
        for new in [int(advised)] if advised else values:
            why = "larger pieces, fewer starts" if new > old else "smaller pieces begin to be sent earlier"
            yield Candidate(name=f"{_ZERO_OPTIMIZATION}.{name}", new=new, old=old, why=why)


_MAKERS: Final[tuple[Callable[[Evidence], Iterator[Candidate]], ...]] = (
    _workers, _loader, _buckets, _ddp, _threads, _variables, _deepspeed,
)  # fmt: skip


def _torch_ddp(evidence: Evidence) -> Mapping[str, Any]:
    """DDP's own settings; empty where there is none, or an engine that calls itself so."""
    ddp = evidence.setting("ddp")
    return {} if "implementation" in ddp else ddp
