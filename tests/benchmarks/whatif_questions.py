"""Random jobs, a setting to change in each, and the jobs that the change makes of them."""

from __future__ import annotations

import contextlib
import math
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import pytest

from tests.analyzers.whatif.fsdp_variants import gathers_late, keeps_parameters, waits_for_reductions
from tests.generator import (
    MIB,
    MS,
    US,
    HostSpec,
    HostSync,
    JobSpec,
    LoaderSpec,
    ModelSpec,
    NetworkSpec,
    Pause,
    PipelineSpec,
    ReduceEachMicrobatch,
    SlowCompute,
    SlowHost,
    SlowLoader,
    cpu_job,
)  # fmt: skip
from tests.generator.training import Training
from tests.generator.work import Program

TO_LAST = "void cudnn::ops::nchwToNhwcKernel<float, float, float, false, true, (cudnnKernelDataType_t)2>(float*)"
TO_FIRST = "void cudnn::ops::nhwcToNchwKernel<float, float, float, true, false, (cudnnKernelDataType_t)0>(float*)"
Patch = Callable[[pytest.MonkeyPatch], None]


@dataclass(frozen=True)
class Trained:
    """A job as the generator simulates it, ``under`` a patch of its training loop where there is one; ``batches`` in
    one of its steps are as many steps of the job that it is compared with.
    """

    spec: JobSpec
    under: Patch | None = None
    batches: int = 1

    @contextlib.contextmanager
    def patched(self) -> Iterator[None]:
        """The generator as this job needs it."""
        with pytest.MonkeyPatch.context() as patch:
            if self.under is not None:
                self.under(patch)
            yield


@dataclass(frozen=True)
class Question:
    """A job that is recorded, settings, and the job that they make of it."""

    recorded: Trained
    settings: dict[str, str]
    changed: Trained


def questions(seed: int) -> Iterator[Question]:
    """One random job for each setting (three for the network's), each asked about one or two values."""
    for number, ask in enumerate(_ASK):
        yield from ask(random.Random(1000 * seed + number))


def _model(rng: random.Random) -> ModelSpec:
    width = rng.choice((512, 1024, 2048))
    return ModelSpec(
        layers=rng.choice((4, 8, 12, 16)),
        tokens=rng.choice((1024, 2048, 4096, 8192, 16384)),
        width=width,
        hidden=rng.choice((2, 4)) * width,
    )


def _between(rng: random.Random, low: float, high: float) -> float:
    """Equally likely in every octave."""
    return math.exp(rng.uniform(math.log(low), math.log(high)))


def _network(rng: random.Random) -> NetworkSpec:
    return NetworkSpec(
        busbw_gbps=_between(rng, 10, 300),
        alpha_ns=round(_between(rng, 8 * US, 150 * US)),
        end_jitter_ns=rng.choice((0, 3 * US)),
    )


def _job(rng: random.Random, strategy: str = "ddp", **changes: object) -> JobSpec:
    """A random job; ``changes`` override what was drawn."""
    drawn = JobSpec(
        ranks=rng.choice((2, 4, 4, 8, 16)),
        steps=6,
        strategy=strategy,
        model=_model(rng),
        network=_network(rng),
        noise=rng.choice((0.0, 0.01, 0.03)),
        end_sync=rng.random() < 0.5,
        bucket_bytes=rng.choice((25, 25, 10, 50)) * MIB,
        seed=rng.randrange(1000),
    )
    return replace(drawn, **changes)  # type: ignore[arg-type]


def _any_job(rng: random.Random) -> JobSpec:
    """Any strategy, on devices or on CPUs."""
    kind = rng.choice(("ddp", "ddp", "cpu", "fsdp", "zero1", "zero2", "zero3", "pipeline", "tensor"))
    if kind == "cpu":
        network = NetworkSpec(alpha_ns=round(_between(rng, 50 * US, 300 * US)), busbw_gbps=_between(rng, 1, 10))
        return cpu_job(ranks=rng.choice((2, 4)), steps=6, network=network, noise=rng.choice((0.0, 0.02)))
    if kind == "pipeline":
        return _pipeline(rng)
    return _job(rng, "ddp", tensor=2, clip_norm=rng.random() < 0.5) if kind == "tensor" else _job(rng, kind)


def _pipeline(rng: random.Random) -> JobSpec:
    ranks, stages, tensor = rng.choice(((2, 2, 1), (4, 4, 1), (8, 4, 1), (8, 4, 2), (8, 2, 2)))
    schedule = PipelineSpec(schedule=rng.choice(("1f1b", "1f1b", "gpipe")), coalesced=rng.random() < 0.3)
    return _job(
        rng, "pipeline", ranks=ranks, pipeline=stages, tensor=tensor, steps=4, schedule=schedule,
        microbatches=rng.choice((4, 8, 16)), clip_norm=rng.random() < 0.5,
    )  # fmt: skip


def network_changed(spec: JobSpec, bandwidth: float = 1.0, latency: float = 1.0) -> JobSpec:
    """The job on a network with so many times the bandwidth and the latency."""
    network = spec.network
    return replace(
        spec,
        network=replace(network, busbw_gbps=network.busbw_gbps * bandwidth, alpha_ns=round(network.alpha_ns * latency)),
    )


def _bandwidth(rng: random.Random) -> Iterator[Question]:
    spec = _any_job(rng)
    for times in (0.5, rng.choice((2.0, 4.0))):
        yield Question(
            Trained(spec), {"network.bandwidth": f"{times}x"}, Trained(network_changed(spec, bandwidth=times))
        )


def _latency(rng: random.Random) -> Iterator[Question]:
    spec = _any_job(rng)
    for times in (0.25, rng.choice((2.0, 4.0))):
        yield Question(Trained(spec), {"network.latency": f"{times}x"}, Trained(network_changed(spec, latency=times)))


def _compute(rng: random.Random) -> Iterator[Question]:
    spec = _any_job(rng)
    for times in (0.8, rng.choice((1.2, 2.0))):
        model = replace(
            spec.model,
            flops_per_ns=spec.model.flops_per_ns * times,
            small_kernel_ns=round(spec.model.small_kernel_ns / times),
            optimizer_kernel_ns=round(spec.model.optimizer_kernel_ns / times),
        )
        yield Question(Trained(spec), {"compute": f"{times}x"}, Trained(replace(spec, model=model)))


def _launch(rng: random.Random) -> Iterator[Question]:
    slow = HostSpec(operator_ns=rng.choice((6, 15, 30)) * US, launch_ns=rng.choice((4, 8)) * US)
    spec = _job(rng, rng.choice(("ddp", "ddp", "fsdp", "zero2")), host=slow)
    free = replace(slow, operator_ns=0, launch_ns=0, event_ns=0)
    yield Question(Trained(spec), {"host.launch": "0"}, Trained(replace(spec, host=free)))


def _sync(rng: random.Random) -> Iterator[Question]:
    free = _job(rng, rng.choice(("ddp", "fsdp")), end_sync=False)
    spec = replace(free, causes=(HostSync(ranks=tuple(range(free.ranks))),))
    yield Question(Trained(spec), {"host.sync": "0"}, Trained(free))


def _pauses(rng: random.Random) -> Iterator[Question]:
    free = _job(rng, rng.choice(("ddp", "fsdp")))
    pause = Pause(ranks=tuple(range(free.ranks)), pause_ns=rng.choice((2_000, 5_000, 20_000)) * US)
    yield Question(Trained(replace(free, causes=(pause,))), {"host.pauses": "0"}, Trained(free))


def _recomputation(rng: random.Random) -> Iterator[Question]:
    once = _job(rng, rng.choice(("ddp", "fsdp", "zero2")))
    for how in ("reentrant", "non_reentrant"):
        yield Question(Trained(replace(once, recompute=how)), {"activations.recompute": "0"}, Trained(once))


def _conversions(rng: random.Random) -> Iterator[Question]:
    plain = _job(rng)
    yield Question(Trained(plain, _converting), {"layout.conversions": "0"}, Trained(plain))


def _converting(patch: pytest.MonkeyPatch) -> None:
    converting(patch, TO_LAST, TO_LAST, TO_FIRST)


def converting(patch: pytest.MonkeyPatch, *kernels: str) -> None:
    """Every layer's forward runs these kernels first: its input and weight get the channels last, its output first."""
    forward = Training.forward_layer

    def forward_layer(self: Training, **how: bool) -> Program:
        for kernel in kernels:
            self.small("aten::cudnn_convolution", kernel, self.model.small_kernel_ns)
        yield from forward(self, **how)

    patch.setattr(Training, "forward_layer", forward_layer)


def _peers(rng: random.Random) -> Iterator[Question]:
    healthy = _job(rng, rng.choice(("ddp", "fsdp", "zero2")), ranks=rng.choice((4, 8)))
    slow = rng.randrange(healthy.ranks)
    cause = rng.choice((
        SlowCompute(ranks=(slow,), factor=rng.uniform(1.1, 2.0)),
        SlowHost(ranks=(slow,), factor=rng.uniform(2.0, 6.0)),
        SlowLoader(ranks=(slow,), load_ns=rng.choice((5, 20, 40)) * MS),
    ))  # fmt: skip
    spec = replace(healthy, causes=(cause,))
    yield Question(Trained(spec), {f"rank.{slow}": "peers"}, Trained(healthy))


def _even(rng: random.Random) -> Iterator[Question]:
    """One rank has more to compute, which all could share."""
    spec = _job(rng, rng.choice(("ddp", "fsdp", "zero2")), ranks=rng.choice((2, 4, 8)))
    more, rank = rng.uniform(0.1, 1.0), rng.randrange(spec.ranks)
    uneven = replace(spec, causes=(SlowCompute(ranks=(rank,), factor=1 + more),))
    even = replace(spec, causes=(SlowCompute(factor=1 + more / spec.ranks),))
    yield Question(Trained(uneven), {"ranks.work": "even"}, Trained(even))


def _workers(rng: random.Random) -> Iterator[Question]:
    loader = LoaderSpec(workers=rng.choice((0, 0, 1)), load_ns=round(_between(rng, 2 * MS, 40 * MS)))
    spec = _job(rng, loader=loader, ranks=rng.choice((2, 4)), steps=8)
    for workers in rng.sample([count for count in (0, 1, 2, 4) if count != loader.workers], 2):
        changed = replace(spec, loader=replace(loader, workers=workers))
        yield Question(Trained(spec), {"dataloader.num_workers": str(workers)}, Trained(changed))


def _buckets(rng: random.Random) -> Iterator[Question]:
    spec = _job(rng)
    for size in rng.sample((1, 2, 5, 10, 25, 50, 100, 200), 3):
        # Where it is set, it is the first bucket's limit, too.
        changed = replace(spec, bucket_bytes=size * MIB, first_bucket_bytes=size * MIB)
        yield Question(Trained(spec), {"ddp.bucket_cap_mb": str(size)}, Trained(changed))


def _no_sync(rng: random.Random) -> Iterator[Question]:
    once = _job(rng, microbatches=rng.choice((2, 4)))
    spec = replace(once, causes=(ReduceEachMicrobatch(),))
    yield Question(Trained(spec), {"ddp.no_sync": "true"}, Trained(once))


def _fsdp_no_sync(rng: random.Random) -> Iterator[Question]:
    once = _job(rng, "fsdp", microbatches=rng.choice((2, 4)))
    spec = replace(once, causes=(ReduceEachMicrobatch(),))
    yield Question(Trained(spec), {"fsdp.no_sync": "true"}, Trained(once))


def _comm_dtype(rng: random.Random) -> Iterator[Question]:
    spec = _job(rng)
    spec = replace(spec, model=replace(spec.model, element_bytes=4))
    # Nothing but gradients travels: half their bytes take as long as all of them at twice the bandwidth.
    yield Question(Trained(spec), {"ddp.comm_dtype": "bf16"}, Trained(network_changed(spec, bandwidth=2.0)))


def _microbatches(rng: random.Random) -> Iterator[Question]:
    spec = _pipeline(rng)
    for count in rng.sample([count for count in (4, 8, 16, 32) if count != spec.microbatches], 2):
        yield Question(Trained(spec), {"pipeline.microbatches": str(count)}, Trained(spec.in_microbatches(count)))


def _fsdp(rng: random.Random) -> Iterator[Question]:
    spec = _job(rng, "fsdp")
    yield Question(Trained(spec, gathers_late), {"fsdp.prefetch": "1"}, Trained(spec))
    yield Question(Trained(spec), {"fsdp.reshard_after_forward": "false"}, Trained(spec, keeps_parameters))
    yield Question(Trained(spec, waits_for_reductions), {"zero.overlap_comm": "true"}, Trained(spec))


def _accumulation(rng: random.Random) -> Iterator[Question]:
    spec = _job(rng, steps=8)
    for batches in (2, 4):
        changed = Trained(replace(spec, microbatches=batches), batches=batches)
        yield Question(Trained(spec), {"batch.accumulation": str(batches)}, changed)


def _stage(rng: random.Random) -> Iterator[Question]:
    spec = _job(rng, "zero3")
    for stage in (0, 1, 2):
        # The recording does not show which buckets the job would have without sharding: torch's default ones.
        plain = replace(_updating(spec, spec.ranks), bucket_bytes=25 * MIB)
        changed = replace(spec, strategy=f"zero{stage}") if stage else plain
        yield Question(Trained(spec), {"zero.stage": str(stage)}, Trained(changed))


def _sharding(rng: random.Random) -> Iterator[Question]:
    whole = _job(rng)
    spec = replace(_updating(whole, 1 / whole.ranks), strategy="fsdp")
    yield Question(Trained(whole), {"zero.stage": "3"}, Trained(spec))
    yield Question(Trained(whole), {"zero.stage": "2"}, Trained(spec, keeps_parameters))
    yield Question(Trained(spec, keeps_parameters), {"zero.stage": "3"}, Trained(spec))


def _updating(spec: JobSpec, share: float) -> JobSpec:
    """The job without sharding, each rank updating ``share`` times as many parameters."""
    model = replace(spec.model, optimizer_kernel_ns=round(spec.model.optimizer_kernel_ns * share))
    return replace(spec, strategy="ddp", model=model)


def _host_bound(rng: random.Random) -> Iterator[Question]:
    """Jobs whose device waits for launches now and then or always, some of them with syncs: how far the host is ahead
    decides what a change brings.
    """
    model = replace(_model(rng), tokens=rng.choice((512, 1024, 2048)), small_kernel_ns=rng.choice((5, 10, 20)) * US)
    host = HostSpec(
        operator_ns=rng.choice((6, 10, 20, 40)) * US,
        launch_ns=rng.choice((4, 8)) * US,
        latency_ns=rng.choice((0, 5 * US)),
    )
    free = _job(rng, rng.choice(("ddp", "fsdp", "fsdp", "zero2")), model=model, host=host, ranks=rng.choice((2, 4)))
    syncs = HostSync(ranks=None if rng.random() < 0.7 else (rng.randrange(free.ranks),))
    spec = replace(free, causes=(syncs,)) if rng.random() < 0.5 else free
    for times in (0.5, 2.0):
        quick = replace(
            model,
            flops_per_ns=model.flops_per_ns * times,
            small_kernel_ns=round(model.small_kernel_ns / times),
            optimizer_kernel_ns=round(model.optimizer_kernel_ns / times),
        )
        yield Question(Trained(spec), {"compute": f"{times}x"}, Trained(replace(spec, model=quick)))
        yield Question(
            Trained(spec), {"network.bandwidth": f"{times}x"}, Trained(network_changed(spec, bandwidth=times))
        )
        yield Question(Trained(spec), {"network.latency": f"{times}x"}, Trained(network_changed(spec, latency=times)))
    at_once = replace(host, operator_ns=0, launch_ns=0, event_ns=0)
    yield Question(Trained(spec), {"host.launch": "0"}, Trained(replace(spec, host=at_once)))
    if spec is not free:
        free = replace(free, end_sync=False)
        yield Question(Trained(spec), {"host.sync": "0"}, Trained(free))
        both = {"host.sync": "0", "network.bandwidth": "2x"}
        yield Question(Trained(spec), both, Trained(network_changed(free, bandwidth=2.0)))
    slow = rng.randrange(free.ranks)
    cause = rng.choice((SlowHost(ranks=(slow,), factor=rng.uniform(1.5, 4.0)), SlowCompute(ranks=(slow,), factor=1.7)))
    if free.ranks > 2:
        yield Question(Trained(replace(spec, causes=(*spec.causes, cause))), {f"rank.{slow}": "peers"}, Trained(spec))


_ASK: tuple[Callable[[random.Random], Iterator[Question]], ...] = (
    _bandwidth, _bandwidth, _bandwidth, _latency, _latency, _latency, _compute, _launch, _sync, _peers, _workers,
    _buckets, _no_sync, _fsdp_no_sync, _comm_dtype, _microbatches, _fsdp, _accumulation, _stage, _sharding, _host_bound,
    _pauses, _recomputation, _conversions, _even,
)  # fmt: skip
