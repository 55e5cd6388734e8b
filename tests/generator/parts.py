"""What a simulated job is made of: a model, a host, a loader, a network, a pipeline's schedule.

Times are int ns, bandwidths GB/s (10^9 bytes per second, so also bytes per ns), sizes bytes; all are frozen values.
"""

from __future__ import annotations

from dataclasses import dataclass

MIB = 1 << 20
US = 1_000
MS = 1_000_000


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """A stack of two-matrix blocks (width -> hidden -> width), every dimension known, so FLOPs are too."""

    layers: int = 4
    tokens: int = 8192
    """Rows of a rank's batch; of one micro-batch where a step has several."""
    width: int = 1024
    hidden: int = 4096
    flops_per_ns: float = 156_000.0
    """Speed at which matrix products run: 156 TFLOP/s is half an A100's bf16 peak."""
    small_kernel_ns: int = 20 * US
    """An element-wise kernel."""
    optimizer_kernel_ns: int = 100 * US
    optimizer_kernels: int = 3
    element_bytes: int = 2
    """2 is bf16, 4 is fp32: parameters, gradients and messages."""

    @property
    def layer_parameters(self) -> int:
        """Elements in one layer's two weight matrices."""
        return 2 * self.width * self.hidden

    @property
    def layer_bytes(self) -> int:
        """Bytes of one layer's gradients."""
        return self.layer_parameters * self.element_bytes

    @property
    def activation_elements(self) -> int:
        """Elements that one layer passes to the next for one (micro-)batch."""
        return self.tokens * self.width

    @property
    def matrix_flops(self) -> int:
        """One matrix product, multiply and add counted: forward or either half of backward, all the same size."""
        return 2 * self.tokens * self.width * self.hidden

    @property
    def flops_per_step(self) -> int:
        """Forward (2 products per layer) and backward (4 products per layer) of all layers for one (micro-)batch."""
        return 6 * self.layers * self.matrix_flops

    @property
    def matrix_ns(self) -> int:
        """Duration of one matrix product."""
        return round(self.matrix_flops / self.flops_per_ns)


@dataclass(frozen=True, kw_only=True)
class HostSpec:
    """What the training process's host work costs."""

    operator_ns: int = 6 * US
    """Framework time of one operator, launches not included."""
    launch_ns: int = 4 * US
    """One launch call."""
    event_ns: int = 1 * US
    """One call that records an event or makes a stream wait for one."""
    python_ns: int = 2 * US
    """Python between two operators."""
    latency_ns: int = 0
    """From the end of a launch call to the earliest start on the device."""
    sync_return_ns: int = 5 * US
    """From the end of the awaited work to the return of the synchronising call."""


@dataclass(frozen=True, kw_only=True)
class LoaderSpec:
    """A data loader: ``workers`` 0 loads inside ``__next__``."""

    workers: int = 2
    load_ns: int = 1 * MS
    """Time of one worker for one batch."""
    prefetch: int = 2
    """Batches each worker is asked for ahead."""
    next_ns: int = 20 * US
    """Cost of ``__next__`` itself when the batch is there."""
    spread: float = 0.0
    """Relative standard deviation of the batches' load times, which are drawn from a log-normal distribution."""


@dataclass(frozen=True, kw_only=True)
class NetworkSpec:
    """Every collective takes alpha + f(n) * bytes / busbw once the last rank has arrived; so does a send."""

    alpha_ns: int = 20 * US
    busbw_gbps: float = 230.0
    between_hosts_gbps: float | None = None
    """Bus bandwidth of groups that span hosts; None: the same."""
    end_jitter_ns: int = 0
    """Ranks leave a collective up to this much apart."""


@dataclass(frozen=True, kw_only=True)
class PipelineSpec:
    """How a pipeline passes its micro-batches on, and what it leaves in the trace."""

    schedule: str = "1f1b"
    """``1f1b``, ``gpipe`` or ``interleaved``."""
    chunks: int = 1
    """Virtual stages of each stage; more than 1 only where interleaved."""
    coalesced: bool = False
    """Sends and receives that are issued together share one kernel (``batch_isend_irecv``); else each has its own, on
    a stream of its own for each neighbour."""
    peers: bool = True
    """Whether the metadata of a send names its receiver and that of a receive its sender, as newer torch has it."""
    ranges: bool = False
    """``Forward 0`` and ``Backward 0`` around each micro-batch, as torch.distributed.pipelining has them."""

    def __post_init__(self) -> None:
        if self.schedule not in ("1f1b", "gpipe", "interleaved"):
            raise ValueError(f"no such schedule: {self.schedule!r}")
        if self.chunks < 1 or (self.chunks > 1) != (self.schedule == "interleaved"):
            raise ValueError(f"schedule {self.schedule!r} cannot have {self.chunks} chunks per stage")
        if self.schedule == "interleaved" and not self.coalesced:
            raise ValueError("an interleaved schedule batches its sends and receives: coalesced=True")
