"""Settings of ``perfscope whatif`` as changes to an emulated job."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

from tests.emulator.spec import Cause, Job


@dataclass(frozen=True)
class Changed:
    """The job that settings make of another. ``batches``: a step of it is so many of the other's."""

    job: Job
    batches: int = 1


def apply(job: Job, settings: Mapping[str, str]) -> Changed | None:
    """The job with these settings; None where the emulator does not have one of them."""
    changed: Changed | None = Changed(job)
    for name, value in settings.items():
        changed = _apply(changed.job, name, value, changed.batches) if changed is not None else None
    return changed


def _apply(job: Job, name: str, value: str, batches: int) -> Changed | None:
    if name == "batch.accumulation":
        return Changed(_accumulating(job, int(value)), batches * int(value))
    made = _made(job, name, value)
    return None if made is None else Changed(made, batches)


def _made(job: Job, name: str, value: str) -> Job | None:
    if name.startswith("rank."):
        return _at_peers_pace(job, int(name.removeprefix("rank.")))
    only, make = _SETTINGS.get(name, (frozenset(), None))
    return make(job, value) if make is not None and job.strategy in only else None


def _bandwidth(job: Job, value: str) -> Job:
    network, times = job.network, float(value.removesuffix("x"))
    return replace(job, network=replace(network, gbps=network.gbps * times, between_gbps=network.between_gbps * times))


def _latency(job: Job, value: str) -> Job:
    network, times = job.network, float(value.removesuffix("x"))
    latency, between = round(network.latency_ns * times), round(network.between_latency_ns * times)
    return replace(job, network=replace(network, latency_ns=latency, between_latency_ns=between))


def _no_overhead(job: Job, _: str) -> Job:
    return replace(job, cpu=replace(job.cpu, operator_ns=0, engine_ns=0, launch_ns=0, collective_ns=0))


def _no_sync_of_the_host(job: Job, _: str) -> Job:
    """No call waits for the device: the loss is not read, and batches are copied from pinned memory."""
    causes = tuple(cause for cause in job.causes if cause.kind != "sync")
    return replace(job, item_every=0, causes=causes, loader=replace(job.loader, pinned=True))


def _in_16_bits(job: Job, _: str) -> Job:
    return replace(job, compressed=True) if job.strategy == "ddp" else replace(job, gradient_bytes=2)


def _reduced(job: Job, value: str) -> Job:
    """Once per step, as by the loop."""
    return replace(job, strategy=value, bucket_mb=25.0, no_sync=True)


def _sharded_at(job: Job, value: str) -> Job | None:
    if job.strategy == "ddp":
        return replace(job, strategy="fsdp", reshard=value == "3") if value in ("2", "3") else None
    return replace(job, reshard=False) if value == "2" else replace(job, strategy="ddp") if value == "0" else None


_ALL = frozenset(("ddp", "fsdp", "manual", "tensor", "pipeline"))
_DDP, _FSDP = frozenset(("ddp",)), frozenset(("fsdp",))
_SETTINGS: dict[str, tuple[frozenset[str], Callable[[Job, str], Job | None]]] = {
    "network.bandwidth": (_ALL, _bandwidth),
    "network.latency": (_ALL, _latency),
    "network.slow_steps": (_ALL, lambda job, _: replace(job, network=replace(job.network, busy_times=1.0))),
    "compute": (
        _ALL,
        lambda job, value: replace(job, compute_speed=job.compute_speed * float(value.removesuffix("x"))),
    ),
    "host.launch": (_ALL, _no_overhead),
    "host.sync": (_ALL, _no_sync_of_the_host),
    "host.gc": (_ALL, lambda job, _: replace(job, causes=tuple(cause for cause in job.causes if cause.how != "gc"))),
    "host.pauses": (
        _ALL,
        lambda job, _: replace(job, causes=tuple(each for each in job.causes if each.kind != "pause")),
    ),
    "dataloader.num_workers": (_ALL, lambda job, value: replace(job, loader=replace(job.loader, workers=int(value)))),
    "ddp.bucket_cap_mb": (_DDP, lambda job, value: replace(job, bucket_mb=float(value), one_bucket_limit=True)),
    "ddp.broadcast_buffers": (_DDP, lambda job, _: replace(job, buffers_mb=0.0)),
    "ddp.find_unused_parameters": (_DDP, lambda job, _: replace(job, search_ns=0)),
    "ddp.no_sync": (_DDP, lambda job, value: replace(job, no_sync=value == "true")),
    "ddp.comm_dtype": (_DDP | {"manual"}, _in_16_bits),
    "batch_norm.sync": (_ALL, lambda job, _: replace(job, norms="own")),
    "loop.collectives": (_ALL, lambda job, _: replace(job, metrics=0)),
    "gradients.reduce": (frozenset(("manual",)), _reduced),
    "fsdp.reshard_after_forward": (_FSDP, lambda job, value: replace(job, reshard=value == "true")),
    "fsdp.reduce_dtype": (_FSDP, lambda job, _: replace(job, gradient_bytes=2)),
    "fsdp.no_sync": (_FSDP, lambda job, value: replace(job, scatters_once=value == "true")),
    "ranks.work": (_ALL, lambda job, _: replace(job, evened=True)),
    "optimizer.loops": (_ALL, lambda job, _: replace(job, foreach=True)),
    "fsdp.prefetch": (_FSDP, lambda job, _: replace(job, backward_prefetch=True, forward_prefetch=True)),
    "fsdp.backward_prefetch": (_FSDP, lambda job, _: replace(job, backward_prefetch=True)),
    "zero.stage": (_FSDP | _DDP, _sharded_at),
    "pipeline.microbatches": (frozenset(("pipeline",)), lambda job, value: replace(job, microbatches=int(value))),
}
"""Setting -> the strategies that the emulator has it for, and the change."""


def _at_peers_pace(job: Job, rank: int) -> Job:
    causes = tuple(_spared(cause, rank) for cause in job.causes if cause.ranks != (rank,))
    return replace(job, causes=causes, at_peers_pace=(*job.at_peers_pace, rank))


def _spared(cause: Cause, rank: int) -> Cause:
    if cause.ranks is not None and rank in cause.ranks:
        return replace(cause, ranks=tuple(other for other in cause.ranks if other != rank))
    return cause


def _accumulating(job: Job, times: int) -> Job:
    """``times`` batches a step, gradients reduced after the last."""
    model, loader = job.model, job.loader
    return replace(
        job,
        microbatches=job.microbatches * times,
        no_sync=True,
        model=replace(model, tokens=model.tokens * times),
        loader=replace(loader, load_ns=loader.load_ns * times, batch_bytes=loader.batch_bytes * times),
    )


def questions(job: Job) -> Iterator[dict[str, str]]:
    """What is asked about a job: every setting that it has."""
    if job.ranks > 1:
        yield from ({"network.bandwidth": value} for value in ("0.5x", "2x"))
        yield from ({"network.latency": value} for value in ("0.25x", "4x"))
    yield from ({"compute": value} for value in ("0.8x", "1.5x"))
    yield {"host.launch": "0"}
    yield from advisable(job)
    if job.strategy == "ddp" and job.stages == job.tensor == 1 and job.ranks > 1:
        yield {"batch.accumulation": "2"}


def advisable(job: Job) -> Iterator[dict[str, str]]:
    """Changes that a user could make."""
    if job.item_every or any(cause.kind == "sync" for cause in job.causes):
        yield {"host.sync": "0"}
    if job.recording.run and any(cause.how == "gc" for cause in job.causes):
        yield {"host.gc": "0"}
    if not job.foreach:
        yield {"optimizer.loops": "0"}
    if job.metrics:
        yield {"loop.collectives": "0"}
    for rank in sorted({rank for cause in job.causes for rank in cause.ranks or ()}):
        yield {f"rank.{rank}": "peers"}
    yield from ({"dataloader.num_workers": str(count)} for count in (2, 8) if count != job.loader.workers)
    if job.strategy == "ddp" and job.ranks > 1:
        yield from _advisable_with_ddp(job)
    if job.strategy == "manual" and job.ranks > 1:
        yield from ({"gradients.reduce": value} for value in ("flat", "ddp"))
    if job.strategy == "fsdp":
        yield from _advisable_with_fsdp(job)
    if job.stages > 1:
        yield {"pipeline.microbatches": str(2 * job.microbatches)}


def _advisable_with_fsdp(job: Job) -> Iterator[dict[str, str]]:
    if job.microbatches > 1 and not job.scatters_once:
        yield {"fsdp.no_sync": "true"}
    if job.reshard:
        yield {"fsdp.reshard_after_forward": "false"}
    if job.gradient_bytes == 4:
        yield {"fsdp.reduce_dtype": "bf16"}
    if not (job.backward_prefetch and job.forward_prefetch):
        yield {"fsdp.prefetch": "1"}


def _advisable_with_ddp(job: Job) -> Iterator[dict[str, str]]:
    yield from ({"ddp.bucket_cap_mb": str(size)} for size in (5, 25, 100) if size != job.bucket_mb)
    if not job.no_sync:
        yield {"ddp.no_sync": "true"}
    if job.buffers_mb:
        yield {"ddp.broadcast_buffers": "false"}
    if job.search_ns:
        yield {"ddp.find_unused_parameters": "false"}
    if job.gradient_bytes == 4:
        yield {"ddp.comm_dtype": "bf16"}
