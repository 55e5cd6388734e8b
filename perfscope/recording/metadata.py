"""What no trace holds: the metadata that every rank writes beside its traces, and those of the launch.

Written by collectors inside the training job (standard library only), read by the analyzers. Unknown keys are
ignored, missing ones take their default: a recording made by an older or newer version still reads.
"""

from __future__ import annotations

import dataclasses
import json
from contextlib import suppress
from dataclasses import field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, Final, TypeVar

from perfscope.frozen import dataclass
from perfscope.recording.paths import partial, rank_and_capture_of_trace_file
from perfscope.redact import redact_texts
from perfscope.typed import POSITIVE, RANK, SIGNED, WORLD, WrongValue, build, check, read_bytes, read_json

RUN_SCHEMA = "perfscope.run/1"
LAUNCH_SCHEMA = "perfscope.launch/1"

_Metadata = TypeVar("_Metadata", "RunMetadata", "LaunchMetadata")


@dataclass(frozen=True, kw_only=True)
class DeviceMetadata:
    """The device that one rank trains on."""

    type: str = "cpu"
    """``cuda``, ``xpu``, ``cpu`` …, as torch spells it."""
    index: int | None = None
    name: str = ""
    uuid: str = ""
    """As torch spells it, without the driver's ``GPU-``; empty where torch does not report it."""
    capacity_bytes: int | None = None
    peak_bytes: int | None = None
    """Largest memory the framework's allocator held during the recording; None where nothing counts it (CPU)."""
    allocated_peak_bytes: int | None = None
    """Largest sum of live tensors among that."""
    allocation_retries: int | None = None
    """Times that the allocator had to give its cache back and ask the device again, since the process began."""


@dataclass(frozen=True, kw_only=True)
class CaptureMetadata:
    """One stretch of consecutively profiled steps, one trace file."""

    file: str
    """The trace's name inside the recording's folder."""
    first_step: int
    last_step: int
    complete: bool = True
    """False when it ended before its last planned step: the job did, or something else needed the profiler."""
    reason: str = ""
    """Why it was made, where it was not planned: a step that was slow, or who asked."""
    waited_ns: tuple[int, ...] = ()
    """Of each step, for how long the training thread was ready to run and waited for a core, ns; empty where not
    known."""


@dataclass(frozen=True, kw_only=True)
class ProcessGroupMetadata:
    """A process group that this rank is a member of."""

    name: str
    """As the trace's collectives and ``distributedInfo`` call it."""
    description: str = ""
    """What it is for, where its maker gives that: ``default_pg``, ``mesh_dp`` …"""
    backend: str = ""
    ranks: tuple[int, ...] = ()
    """Global ranks of its members, in the group's own order."""


@dataclass(frozen=True, kw_only=True)
class DataLoaderMetadata:
    """A ``torch.utils.data.DataLoader`` that the training loop drew from."""

    num_workers: int = 0
    batch_size: int | None = None
    pin_memory: bool = False
    prefetch_factor: int | None = None
    persistent_workers: bool = False
    drop_last: bool = False
    dataset: str = ""
    """Class of the dataset."""
    dataset_length: int | None = None
    iterable: bool = False
    """The dataset is a stream of samples: no sampler chooses among them, and workers share it as the script decides."""
    sampler: str = ""
    """Class of the sampler."""
    batches: int = 0
    """Batches drawn while ranges were being recorded; ranks the loaders of one job."""
    batches_per_epoch: int | None = None
    """Batches until the loader is through, on this rank; None for a stream."""
    shuffle: bool | None = None
    """Whether a sampler that divides the samples among ranks shuffles them; None for other samplers."""
    sampler_epoch: int | None = None
    """The last epoch that ``set_epoch`` gave such a sampler; 0 where nobody called it."""
    fingerprints: tuple[int, ...] = ()
    """Checksums of the first batches that were drawn while ranges were being recorded; equal on two ranks that were
    given the same samples. Empty where a batch begins with no tensor in the host's memory."""
    seen_batches: int = 0
    """Batches that were drawn while a capture ran and begin with a tensor; ``seen_samples`` are theirs together."""
    seen_samples: int = 0
    """Sum of the lengths of their first tensors' first dimension."""
    seen_positions: int = 0
    """Elements of those of their first tensors that have two dimensions: tokens, where these are sequences."""
    timed_batches: int = 0
    """Batches of which CPU time is known: the next three are theirs together."""
    load_ns: int = 0
    """Wall time that the training thread took to draw them."""
    load_cpu_ns: int = 0
    """CPU time that they took to load: of the training thread or, with workers, of all workers' processes."""
    load_process_cpu_ns: int = 0
    """CPU time of all threads of the training process while they were drawn."""
    fetched_batches: int = 0
    """Batches that workers fetched meanwhile; 0 without workers, and where they could not be asked."""
    fetch_ns: int = 0
    """Wall time that these took the workers, one after the other."""

    @property
    def fetched_ns(self) -> float | None:
        """What fetching a batch took a worker, whether or not anybody waited for it; None where that is not known."""
        return self.fetch_ns / self.fetched_batches if self.fetched_batches else None


@dataclass(frozen=True, kw_only=True)
class ModelMetadata:
    """The model that the optimizer trains, as this rank holds it."""

    name: str = ""
    """Class of the outermost module, wrappers such as DDP taken off."""
    parameters: int = 0
    """Elements in this rank's parameters (a shard's only, where the strategy shards)."""
    parameter_bytes: int = 0
    trainable_bytes: int = 0
    trainable_sizes: tuple[int, ...] = ()
    """Bytes of each trainable parameter, in the order in which the modules registered them; empty beyond 20,000."""
    block_sizes: tuple[int, ...] = ()
    """Bytes of the trainable parameters of each of the model's repeated blocks (a list's modules of one class), in
    order; empty without such."""
    dtypes: tuple[str, ...] = ()
    compiled: bool = False


@dataclass(frozen=True, kw_only=True)
class StepsMetadata:
    """How steps were found and what they took on the host."""

    seen: int = 0
    """Steps completed by this rank."""
    detected_by: str = ""
    """``optimizer``, ``explicit`` (``perfscope.step()``), ``deepspeed``; of a program without optimizers ``backward``,
    or ``gradients`` where its passes return them (``torch.autograd.grad``); empty when no step was seen."""
    unprofiled_ns: tuple[int, ...] = ()
    """Wall time of steps outside every capture, ns, in order; the first step and those around a capture left out."""
    unprofiled_thread_ns: tuple[int, ...] = ()
    """CPU time of the training thread in the same steps, ns."""
    skipped: int = 0
    """Steps among them that a gradient scaler skipped because of an overflow, as far as its optimizer shows that
    (fused optimizers look for the overflow themselves)."""
    backwards_per_step: float | None = None
    """Calls of ``backward`` per step while recorded; of a pipeline one per micro-batch. ``settings`` hold what of it is
    gradient accumulation."""
    batches_per_step: float | None = None
    """Batches drawn from data loaders per step, over the first steps that were timed with all stages; None in modes
    without these."""


@dataclass(frozen=True, kw_only=True)
class RecordingMetadata:
    """What recording takes of a rank's steps outside captures."""

    between_ns: int = 0
    """From the end of the optimizer's step to the begin of the next training step, where only recording is at work:
    median of the first steps."""
    phase_ns: int = 0
    """What timing one phase takes (a forward, a backward, a draw from a loader, an optimizer's step): measured once."""
    wait_ns: int = 0
    """What timing one wait for other ranks takes: measured once."""
    steps: int = 0
    """Steps in which the next two were counted."""
    phases: int = 0
    """Phases timed."""
    waits: int = 0
    """Waits timed."""
    thread_ns: int = 0
    """CPU time of the thread that writes the step history."""
    thread_steps: int = 0
    """Steps meanwhile."""


@dataclass(frozen=True, kw_only=True)
class CpuMetadata:
    """The cores that a rank's process may use, and the CPU time of the steps in its captures.

    Loader workers are processes of their own: their time is not in it.
    """

    cores: str = ""
    """Those that it may run on, as the kernel lists them: ``0-3,8``; empty where not known."""
    quota: float | None = None
    """Cores' worth of time that its control group may use, with all processes in it; None without a limit."""
    steps: int = 0
    """Steps of captures; what follows is theirs together."""
    wall_ns: int = 0
    process_ns: int = 0
    """CPU time of all threads, those that wait by spinning included."""
    thread_ns: int = 0
    """CPU time of the training thread alone."""
    waited_ns: int | None = None
    """Time for which the training thread was ready to run and waited for a core; None where not known."""

    @property
    def blocked_ns(self) -> float:
        """Per step: for which time the training thread neither ran nor waited for a core, as far as that is known; 0
        without steps.
        """
        return (self.wall_ns - self.thread_ns - (self.waited_ns or 0)) / self.steps if self.steps else 0.0


@dataclass(frozen=True, kw_only=True)
class CallMetadata:
    """Where in the code something was called."""

    file: str = ""
    line: int = 0
    function: str = ""


@dataclass(frozen=True, kw_only=True)
class ErrorMetadata:
    """The exception that ended a process."""

    type: str = ""
    """Its class."""
    message: str = ""
    causes: tuple[str, ...] = ()
    """``type: message`` of those that it was raised from or while handling, the latest first."""
    calls: tuple[CallMetadata, ...] = ()
    """Its traceback, innermost first."""


@dataclass(frozen=True, kw_only=True)
class RunMetadata:
    """Everything one rank knows about its run. Absent knowledge is None or empty, never guessed."""

    schema: str = RUN_SCHEMA
    perfscope_version: str = ""
    mode: str = "captures"
    """What is recorded: ``captures`` (as planned), ``trigger`` (when a step is slow), ``steps`` (no captures unless
    asked for), ``nvtx`` or ``nsys`` (ranges only, for another profiler)."""
    attempt: int = 0
    """Elastic restarts before this one."""
    rank: int = field(default=0, metadata=RANK)
    local_rank: int = field(default=0, metadata=RANK)
    world_size: int = field(default=1, metadata=WORLD)
    local_world_size: int = field(default=1, metadata=WORLD)
    host: str = ""
    cpu_count: int | None = field(default=None, metadata=POSITIVE)
    """Cores this process may run on."""
    cpu_threads: int | None = field(default=None, metadata=POSITIVE)
    """``torch.get_num_threads()``: threads that one operator on the CPU is spread over."""
    cpu: CpuMetadata | None = None
    """None where nothing was captured."""
    pid: int = 0
    started_at: str = ""
    """ISO 8601, UTC."""
    command: tuple[str, ...] = ()
    backend: str = ""
    rendezvous: str = ""
    """Where the ranks met, ``MASTER_ADDR:MASTER_PORT``; the same on every rank of a run. Empty where not set."""
    role: str = ""
    """What part of its job this process is where not all are ranks of one training (``rollout``, ``learner``); empty
    where nothing states it."""
    device: DeviceMetadata = field(default_factory=DeviceMetadata)
    versions: dict[str, str] = field(default_factory=dict)
    """``python``, ``torch``, ``cuda``, ``nccl``, ``nvtx`` …: what is installed."""
    strategies: tuple[str, ...] = ()
    """Any of ``ddp``, ``fsdp``, ``zero1`` … ``zero3``, ``pipeline``, ``tensor``; ``single`` alone on one rank."""
    settings: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Settings of each strategy and of AMP, gradient accumulation …, keyed as the framework spells them."""
    process_groups: tuple[ProcessGroupMetadata, ...] = ()
    """The groups that this rank is a member of, in the order of their making."""
    model: ModelMetadata | None = None
    batch_shape: tuple[int, ...] | None = None
    """Shape of the first tensor of a batch."""
    model_flops_per_step: float | None = None
    """The run's own count on this rank (``perfscope run --count-flops``); forward and backward, one step."""
    dataloaders: tuple[DataLoaderMetadata, ...] = ()
    """Those that the training drew from most often first, else in the order of their first batches."""
    steps: StepsMetadata = field(default_factory=StepsMetadata)
    recording: RecordingMetadata | None = None
    """None where no step passed outside captures."""
    captures: tuple[CaptureMetadata, ...] = ()
    environment: dict[str, str] = field(default_factory=dict)
    """Variables that change how a run performs (NCCL_*, OMP_* …), secrets left out."""
    applied: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Settings that ``perfscope tune`` tried here: setting -> ``from``, ``to``, ``times`` replaced, and why it was
    ``refused`` where it was. Empty in every other run."""
    problems: tuple[str, ...] = ()
    """What the collector could not do, one sentence each."""
    outcome: str = "running"
    """``running`` (or killed), ``finished``, ``exception``."""
    ended_at: str = ""
    """ISO 8601, UTC; empty while it runs, and where nothing saw its end."""
    error: ErrorMetadata | None = None
    """None unless an exception ended it."""
    exit_code: int | None = field(default=None, metadata=SIGNED)
    """As torchrun saw it end, where that failed; negative: the signal. Else None."""

    @property
    def went_on(self) -> bool:
        """Did the training go on after a last capture that ended before its last planned step?"""
        return any(not last.complete and self.steps.seen > last.last_step + 1 for last in self.captures[-1:])

    def capture(self, number: int) -> CaptureMetadata | None:
        """The capture of a number, which need not be its place: a rank may have missed one."""
        wanted = (self.rank, number)
        return next((each for each in self.captures if rank_and_capture_of_trace_file(Path(each.file)) == wanted), None)


@dataclass(frozen=True, kw_only=True)
class NodeLaunch:
    """What ``perfscope run`` did on one node of a run whose folders were gathered."""

    host: str = ""
    command: tuple[str, ...] = ()
    started_at: str = ""
    exit_code: int | None = field(default=None, metadata=SIGNED)
    ranks: tuple[int, ...] = ()
    """Ranks that left anything in this node's folder."""


@dataclass(frozen=True, kw_only=True)
class LaunchMetadata:
    """What ``perfscope run`` was asked to do."""

    schema: str = LAUNCH_SCHEMA
    perfscope_version: str = ""
    command: tuple[str, ...] = ()
    started_at: str = ""
    host: str = ""
    options: dict[str, Any] = field(default_factory=dict)
    exit_code: int | None = field(default=None, metadata=SIGNED)
    """The command's own; negative: the signal that ended it. None while it runs, when the launcher was killed, and
    where the program started the recording itself and its code is not known.
    """
    ended: bool = False
    """Has a recording that the program started itself ended?"""
    ended_at: str = ""
    """When the command, or that recording, ended; empty where that is not known."""
    nodes: tuple[NodeLaunch, ...] = ()
    """Of a gathered recording: every node's own launch."""
    problems: tuple[str, ...] = ()
    """What of the file could not be used, one sentence each; empty as it is written."""

    @property
    def has_ended(self) -> bool:
        """Is nothing more recorded?"""
        return self.ended or self.exit_code is not None


WITHOUT_OPTIMIZER: Final = (
    "A step ends with an optimizer's step of torch.optim. Where the loop has none (inference, evaluation, an optimizer "
    "of your own), import perfscope in the script and call perfscope.step() as the last line of the loop"
)
"""What to do where no step was seen."""

_LARGEST_FILE: Final = 64 << 20
"""Bytes."""

_SETTINGS: Final = {
    "ddp.bucket_cap_mb": float,
    "ddp.bucket_bytes": tuple[int, ...],
    "deepspeed.zero_optimization": dict[str, Any],
    "deepspeed.zero_optimization.stage": int,
    "deepspeed.config": dict[str, Any],
    "deepspeed.config.zero_optimization": dict[str, Any],
    "gradient_accumulation.backwards_per_step": float,
}
"""The kinds of those settings, by path, that more than a comparison is made of."""


def save(run: RunMetadata | LaunchMetadata, path: Path) -> None:
    """Write metadata as JSON, without secrets, whole or not at all. Raises OSError where that fails."""
    temporary = partial(path)
    try:
        temporary.write_text(json.dumps(redact_texts(dataclasses.asdict(run)), indent=1) + "\n", encoding="utf-8")
        temporary.replace(path)
    except OSError:
        with suppress(OSError):
            temporary.unlink()
        raise


def load_run(path: Path) -> RunMetadata:
    """Read one rank's metadata. Raises ValueError naming the file and what is wrong with it."""
    return _load(path, RunMetadata, RUN_SCHEMA)


def load_launch(path: Path) -> LaunchMetadata:
    """Read the launch's metadata. Raises ValueError naming the file and what is wrong with it."""
    return _load(path, LaunchMetadata, LAUNCH_SCHEMA)


def _load(path: Path, kind: type[_Metadata], schema: str) -> _Metadata:
    try:
        if not path.is_file():
            raise ValueError("is no file" if path.exists() else "does not exist")
        raw = read_json(read_bytes(path, _LARGEST_FILE))
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    if not isinstance(raw, dict) or raw.get("schema") != schema:
        found = raw.get("schema") if isinstance(raw, dict) else type(raw).__name__
        raise ValueError(f"{path}: expected {schema!r}, found {found!r}; record the run again with this version")
    faults: list[str] = []
    try:
        built: _Metadata = build(kind, raw, faults)
    except WrongValue as error:
        raise ValueError(f"{path}: is not {error}") from error
    if isinstance(built, RunMetadata):
        check(built.settings, _SETTINGS, faults, "settings.")
    problems = (*built.problems, *(f"{path.name}: {fault}." for fault in faults))
    return dataclasses.replace(built, problems=problems)


def now(precision: str = "milliseconds") -> str:
    """The time as metadata give it: ISO 8601, UTC."""
    return datetime.now(timezone.utc).isoformat(timespec=precision)


def epoch_ns(text: str) -> int | None:
    """A time that metadata give (ISO 8601), in ns since the epoch; None where it is none."""
    try:
        return int(datetime.fromisoformat(text).timestamp() * 1e9)
    except ValueError:
        return None
