"""Which changes to try for a job: those of ``--try``, those that findings recommend, those that suit its strategies."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any, Final

from perfscope.collectors.overrides.ddp import ARGUMENTS
from perfscope.collectors.overrides.loader import NAMES
from perfscope.grouping import grouped
from perfscope.tune.baseline import BaselineRecording
from perfscope.tune.candidates import Candidate, Value

BUCKETS_MB: Final = (1, 2, 4, 10, 50, 100)
WORKERS: Final = (1, 2, 4, 8)
BEST_OF_A_LADDER: Final = 2
"""Values of one setting that are tried where replay predicts different step times."""

SHORT_EPOCH: Final = 200
"""In epochs of fewer steps the start of new workers may matter."""

NEGLIGIBLE: Final = 0.01
"""Predicted share of the step saved, from which a change is tried before those without a prediction."""

KNOWN: Final = {"dataloader": NAMES, "ddp": (*ARGUMENTS, "no_sync", "comm_dtype")}
"""What can be set of each. Any path of DeepSpeed's JSON and any environment variable can be set."""

_LEFT_ON: Final = (
    "CUDA_LAUNCH_BLOCKING", "NCCL_ALGO", "NCCL_DEBUG", "NCCL_IB_DISABLE", "NCCL_P2P_DISABLE", "NCCL_PROTO",
    "NCCL_SHM_DISABLE", "TORCH_DISTRIBUTED_DEBUG",
)  # fmt: skip
"""Variables for debugging, which cost time when they stay set."""

_FIRST_GUESS_MB: Final = (4, 100)
"""Bucket sizes to try where they cannot be replayed."""

_ZERO_OPTIMIZATION: Final = "deepspeed.zero_optimization"
_DEFAULT_ZERO_BUCKET: Final = 500_000_000
_LARGE_ZERO_BUCKET: Final = 100_000_000
"""Elements from which larger ones would take gigabytes."""


def propose(baseline: BaselineRecording, *, numerics: bool) -> tuple[list[Candidate], list[tuple[Candidate, str]]]:
    """Changes to try, the most promising first, and changes not to try, with the reason.

    ``numerics``: also those that change what the training computes.
    """
    wanted: list[Candidate] = []
    left: list[tuple[Candidate, str]] = []
    for make in _MAKERS:
        for candidate in make(baseline):
            predicted = _supported(candidate, baseline)
            if predicted.numerics and not numerics:
                left.append((predicted, "changes the numbers computed: allow it with --allow-numerics"))
            elif predicted.predicted is not None and predicted.predicted.low_ns > predicted.predicted.measured_ns:
                left.append((predicted, "predicted to be slower"))
            else:
                wanted.append(predicted)
    return _ordered(_best_of_ladders(wanted, left)), left


def _supported(candidate: Candidate, baseline: BaselineRecording) -> Candidate:
    """With the recording's evidence for it: a prediction, a finding."""
    predicted = baseline.predict({candidate.name: candidate.new})
    finding, advised = baseline.finding(candidate.name), baseline.advised(candidate.name)
    if finding is None or (advised is not None and candidate.new != advised):
        return replace(candidate, predicted=predicted)
    return replace(candidate, predicted=predicted, recommended=True, why=finding.title)


def _ordered(candidates: list[Candidate]) -> list[Candidate]:
    """First those that findings recommend, then those predicted to save time, without a prediction, the others."""

    def promise(candidate: Candidate) -> tuple[int, float]:
        saved = candidate.predicted.saved if candidate.predicted is not None else None
        if candidate.recommended:
            return 0, -(saved or 0.0)
        if saved is None:
            return 2, 0.0
        return (1, -saved) if saved >= NEGLIGIBLE else (3, -saved)

    return sorted(candidates, key=promise)


def _best_of_ladders(candidates: list[Candidate], left: list[tuple[Candidate, str]]) -> list[Candidate]:
    """Of many values of one setting those that are predicted to be best, and the one that a finding recommends."""
    best: list[Candidate] = []
    for ladder in grouped((candidate.name, candidate) for candidate in candidates).values():
        by_promise = _ordered(ladder)
        best += by_promise[:BEST_OF_A_LADDER]
        left += [(each, "other values are predicted to be better") for each in by_promise[BEST_OF_A_LADDER:]]
    return best


def _workers(baseline: BaselineRecording) -> Iterator[Candidate]:
    loader = baseline.loader
    if loader is None:
        return
    name, old = "dataloader.num_workers", loader.num_workers
    advised = baseline.advised(name)
    # Each worker delivers all of an iterable dataset unless the dataset divides it: one worker is safe.
    most = max(1, old) if loader.iterable and old < 2 else max(2, baseline.cores or 2)
    for value in sorted({*(value for value in WORKERS if value <= most), *((int(advised),) if advised else ())}):
        if value != old and not (loader.iterable and value > most):
            yield Candidate(name=name, new=value, old=old, why="batches loaded beside the training")


def _loader(baseline: BaselineRecording) -> Iterator[Candidate]:
    loader = baseline.loader
    if loader is None:
        return
    if baseline.run.device.type == "cuda" and not loader.pin_memory:
        yield Candidate(
            name="dataloader.pin_memory", new=True, old=False, why="copies to the device from pinned memory"
        )
    if not loader.num_workers:
        return
    name, prefetch = "dataloader.prefetch_factor", loader.prefetch_factor or 2
    more = int(baseline.advised(name) or 2 * prefetch)
    yield Candidate(name=name, new=more, old=prefetch, why="batches of uneven cost even out")
    per_epoch = (loader.dataset_length or 0) / max((loader.batch_size or 1) * baseline.run.world_size, 1)
    if not loader.persistent_workers and 0 < per_epoch < SHORT_EPOCH:
        yield Candidate(
            name="dataloader.persistent_workers", new=True, old=False,
            why=f"an epoch is {per_epoch:.0f} batches, and new workers start for each",
        )  # fmt: skip


def _buckets(baseline: BaselineRecording) -> Iterator[Candidate]:
    ddp = _torch_ddp(baseline)
    if not ddp:
        return
    name, old = "ddp.bucket_cap_mb", float(ddp.get("bucket_cap_mb", 25))
    advised = baseline.advised(name)
    model = baseline.run.model
    total_mb = model.trainable_bytes / (1 << 20) if model is not None and model.trainable_bytes else float("inf")
    known = baseline.predict({name: BUCKETS_MB[0]}) is not None
    values = {float(value) for value in (BUCKETS_MB if known else _FIRST_GUESS_MB)} | ({advised} if advised else set())
    for value in sorted(values):
        # From the size of all gradients on, every limit makes the same buckets.
        if value != old and min(value, total_mb) != min(old, total_mb):
            yield Candidate(name=name, new=value, old=old, why="gradient buckets of another size")
            if value >= total_mb:
                return


def _ddp(baseline: BaselineRecording) -> Iterator[Candidate]:
    ddp = _torch_ddp(baseline)
    if not ddp:
        return
    unused = bool(ddp.get("find_unused_parameters"))
    accumulation = baseline.setting("gradient_accumulation")
    if accumulation and accumulation.get("no_sync") is False and not unused and not ddp.get("static_graph"):
        why = f"gradients of {baseline.microbatches} micro-batches, sent once"
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
    model = baseline.run.model
    if model is not None and set(model.dtypes) == {"float32"} and not ddp.get("comm_hook"):
        yield Candidate(name="ddp.comm_dtype", new="bf16", old=None, why="half the bytes to send", numerics=True)


def _threads(baseline: BaselineRecording) -> Iterator[Candidate]:
    """OMP threads: of a training on CPUs, or where a finding says that there are too many."""
    name, old = "env.OMP_NUM_THREADS", baseline.run.cpu_threads
    values: dict[int, str] = {}
    if advised := baseline.advised(name):
        values[int(advised)] = "there are more threads than cores"
    if baseline.run.device.type == "cpu" and baseline.cores is not None:
        values.setdefault(baseline.cores, "as many threads per rank as it has cores")
        values.setdefault(max(baseline.cores // 2, 1), "cores are left to the loader and the network")
    for value, why in values.items():
        if value != old:
            yield Candidate(name=name, new=value, old=old, why=why)


def _variables(baseline: BaselineRecording) -> Iterator[Candidate]:
    """NCCL's, and those left on after debugging."""
    if baseline.run.device.type != "cuda":
        return
    environment = baseline.run.environment
    for name in _LEFT_ON:
        if environment.get(name, "0") not in ("0", "", "OFF", "WARN", "VERSION"):
            yield Candidate(name=f"env.{name}", new=None, old=environment[name], why="is for debugging")
    if "nccl" not in baseline.run.backend or baseline.run.world_size == 1:
        return
    if "NCCL_BUFFSIZE" not in environment:
        yield Candidate(name="env.NCCL_BUFFSIZE", new=8 << 20, old=None, why="larger buffers (default 4 MiB)")
    if baseline.hosts > 1 and "NCCL_SOCKET_NTHREADS" not in environment:
        yield Candidate(name="env.NCCL_SOCKET_NTHREADS", new=4, old=None, why="more threads for sockets between hosts")


def _deepspeed(baseline: BaselineRecording) -> Iterator[Candidate]:
    zero = baseline.setting("deepspeed").get("zero_optimization") or {}
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
            name=f"{_ZERO_OPTIMIZATION}.contiguous_gradients",
            new=True,
            old=False,
            why="gradients are sent from one contiguous buffer",
        )
    names = ("reduce_bucket_size", "allgather_bucket_size") if stage < 3 else ("reduce_bucket_size",)
    for name in names:
        old = int(zero.get(name) or _DEFAULT_ZERO_BUCKET)
        advised = baseline.advised(f"{_ZERO_OPTIMIZATION}.{name}")
        values = [max(old // 10, 1_000_000)] if old > _LARGE_ZERO_BUCKET else [max(old // 10, 1_000_000), 4 * old]
        for new in [int(advised)] if advised else values:
            why = "larger buckets, fewer collectives" if new > old else "smaller buckets are sent earlier"
            yield Candidate(name=f"{_ZERO_OPTIMIZATION}.{name}", new=new, old=old, why=why)


_MAKERS: Final[tuple[Callable[[BaselineRecording], Iterator[Candidate]], ...]] = (
    _workers, _loader, _buckets, _ddp, _threads, _variables, _deepspeed,
)  # fmt: skip


def _torch_ddp(baseline: BaselineRecording) -> Mapping[str, Any]:
    """Torch DDP's settings; empty without it, and where another engine records itself as ddp."""
    ddp = baseline.setting("ddp")
    return {} if "implementation" in ddp else ddp


def parse(text: str) -> tuple[str, tuple[Value, ...]]:
    """``ddp.bucket_cap_mb=10,50`` as a name and its values. Raises ValueError with how to write it."""
    name, equals, values = text.partition("=")
    kind, dot, key = name.strip().partition(".")
    if not equals or not dot or not key or not values.strip() or kind not in ("dataloader", "ddp", "deepspeed", "env"):
        raise ValueError(
            f"{text!r}: write NAME=VALUE or NAME=VALUE,VALUE with a name that begins with dataloader., ddp., "
            "deepspeed. or env., such as ddp.bucket_cap_mb=10,50 or env.NCCL_ALGO=Ring,Tree"
        )
    known = KNOWN.get(kind)
    if known is not None and key not in known:
        raise ValueError(f"{text!r}: the settings that begin with {kind}. are {', '.join(known)}")
    parsed = tuple(_value(value.strip(), kind) for value in values.split(","))
    if key == "comm_dtype" and kind == "ddp" and parsed != ("bf16",):
        raise ValueError(f"{text!r}: gradients can be sent as bf16 only; write ddp.comm_dtype=bf16")
    return name.strip(), parsed


def _value(text: str, kind: str) -> Value:
    if kind == "env":
        return text
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    try:
        return int(text)
    except ValueError:
        pass
    try:
        return float(text)
    except ValueError:
        return text


def asked_for(baseline: BaselineRecording, settings: Mapping[str, tuple[Value, ...]]) -> list[Candidate]:
    """The user's own candidates, in the order in which they were given."""
    return [
        Candidate(
            name=name,
            new=value,
            old=_old(baseline, name),
            why="requested with --try",
            predicted=baseline.predict({name: value}),
            recommended=True,
            numerics=name == "ddp.comm_dtype",
        )
        for name, values in settings.items()
        for value in values
    ]


def _old(baseline: BaselineRecording, name: str) -> Value:
    """The recorded value of a setting that the user names; None where it is not known."""
    kind, _, key = name.partition(".")
    if kind == "env":
        return baseline.run.environment.get(key)
    if kind == "dataloader":
        return getattr(baseline.loader, key, None)
    if kind == "ddp":
        return baseline.setting("ddp").get(key)
    place: object = baseline.setting("deepspeed")
    for part in key.split("."):
        place = place.get(part) if isinstance(place, Mapping) else None
    return place if isinstance(place, (bool, int, float, str)) else None
