"""What a training process does, in the vocabulary of training code: on a host with a device, and on CPUs with gloo."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from tests.generator.collectives import ANNOTATIONS, OPERATORS, describe, kernel_name, metadata
from tests.generator.engine import Fabric, Host, Program, Work
from tests.generator.spec import JobSpec, SlowCompute, SlowCopy, SlowHost

COMPUTE_STREAM = 7
COMM_STREAM = 20
GLOO_LANES = 2
"""Threads of the gloo backend."""


class Process(ABC):
    """What devices and CPUs have in common."""

    has_device: bool

    def __init__(self, spec: JobSpec, host: Host, fabric: Fabric) -> None:
        self.spec = spec
        self.host = host
        self.fabric = fabric

    @property
    def tensor_type(self) -> str:
        """The type of tensors, as operators record it."""
        return "c10::BFloat16" if self.spec.model.element_bytes == 2 else "float"

    @contextmanager
    def operator(
        self,
        name: str,
        shapes: Sequence[Any] = (),
        cost: float = 1.0,
        state: str = "operator",
        said: Mapping[str, object] | None = None,
    ) -> Iterator[None]:
        """A framework operator: its own cost falls half before what it does and half after."""
        host, spec = self.host, self.spec
        ns = host.noisy(spec.host.operator_ns * spec.factor(SlowHost, host.rank, host.step) * cost)
        args: dict[str, Any] = {"Record function id": 0, **(said or {})}
        if shapes:
            args["Concrete Inputs"] = [""] * len(shapes)
            args["Input type"] = [self.tensor_type] * len(shapes)
            args["Input Dims"] = list(shapes)
        with host.range("cpu_op", name, state, args):
            host.spend(ns // 2)
            yield
            host.spend(ns - ns // 2)

    def python(self) -> None:
        """The interpreter, between operators."""
        self.host.spend(self.spec.host.python_ns)

    def compute_ns(self, ns: float) -> int:
        """What a computation takes here and now that takes ``ns`` on a healthy machine."""
        return self.host.noisy(ns * self.spec.factor(SlowCompute, self.host.rank, self.host.step))

    def join(self, kind: str, elements: int, name: str) -> Work:
        """This rank's part of its next collective, not yet queued."""
        host, spec = self.host, self.spec
        work = Work(host.rank, "comm", name, host.step, 0)
        self.fabric.join(host.rank, work, lambda sequence: describe(spec, kind, elements, host.step, sequence))
        return work

    @abstractmethod
    def kernel(self, name: str, ns: float) -> Work | None:
        """Compute for ``ns`` inside the open operator; the work where a device does it."""

    @abstractmethod
    def copy_batch(self) -> None:
        """Bring the batch to where it is computed on."""

    @abstractmethod
    def item(self) -> Program:
        """``tensor.item()``."""

    @abstractmethod
    def collective(self, kind: str, elements: int, after: Sequence[Work] | None = None) -> Work:
        """Issue a collective that starts after the computation so far, or after the given works."""

    @abstractmethod
    def wait_for(self, works: Sequence[Work]) -> Program:
        """What follows waits for these."""


class CudaProcess(Process):
    """A process whose operators launch kernels."""

    has_device = True

    def __init__(self, spec: JobSpec, host: Host, fabric: Fabric) -> None:
        super().__init__(spec, host, fabric)
        self._awaited: tuple[Work, ...] = ()
        # Both streams are there from the start, in this order.
        self._compute, self._comm = host.stream(COMPUTE_STREAM), host.stream(COMM_STREAM)

    def _runtime(self, name: str, ns: int, correlation: int) -> None:
        external = self.host.external_id
        with self.host.range("cuda_runtime", name, "operator") as event:
            event.external_id, event.correlation = external, correlation
            self.host.spend(ns)

    def _submit(self, work: Work, stream: int, call: str = "cudaLaunchKernel") -> Work:
        """Issue work by a runtime call; it may start when the call is over."""
        host = self.host
        work.correlation = host.correlate()
        work.external_id = host.external_id
        if stream == COMPUTE_STREAM:
            work.after, self._awaited = (*work.after, *self._awaited), ()
        self._runtime(call, self.spec.host.launch_ns, work.correlation)
        work.queued_ns, work.latency_ns = host.now, self.spec.host.latency_ns
        host.stream(stream).put(work)
        return work

    def kernel(self, name: str, ns: float) -> Work:
        """Launch a compute kernel."""
        work = Work(self.host.rank, "compute", name, self.host.step, 0, duration_ns=self.compute_ns(ns))
        return self._submit(work, COMPUTE_STREAM)

    def copy_batch(self) -> None:
        """Copy the batch to the device without blocking."""
        host, model = self.host, self.spec.model
        shape = [[model.tokens, model.width]]
        ns = round(self.spec.copy_ns * self.spec.factor(SlowCopy, host.rank, host.step))
        with self.operator("aten::to", shape, 0.25), self.operator("aten::copy_", shape):
            size = model.tokens * model.width * model.element_bytes
            work = Work(
                host.rank, "copy", "Memcpy HtoD (Pinned -> Device)", host.step, 0, duration_ns=ns, args={"bytes": size}
            )
            self._submit(work, COMPUTE_STREAM, "cudaMemcpyAsync")
        self.python()

    def item(self) -> Program:
        """Copy a scalar to the host and block until it is there."""
        host = self.host
        with self.operator("aten::item", [[]], 0.25), self.operator("aten::_local_scalar_dense", [[]], 0.25):
            work = Work(
                host.rank,
                "copy",
                "Memcpy DtoH (Device -> Pageable)",
                host.step,
                0,
                duration_ns=1_000,
                args={"bytes": 4},
            )
            self._submit(work, COMPUTE_STREAM, "cudaMemcpyAsync")
            external = host.external_id
            with host.range("cuda_runtime", "cudaStreamSynchronize", "sync") as event:
                event.external_id, event.correlation = external, host.correlate()
                yield work
                host.spend_until(work.ended + self.spec.host.sync_return_ns)
        self.python()

    def collective(self, kind: str, elements: int, after: Sequence[Work] | None = None) -> Work:
        """Issue it on the communication stream."""
        dtype = "BFloat16" if self.spec.model.element_bytes == 2 else "Float"
        work = self.join(kind, elements, kernel_name(kind, self.spec.model.element_bytes))
        described = work.collective
        assert described is not None
        work.args = metadata(described, dtype)
        rank, shape = self.host.rank, [[described.elements_in]]
        said = {"Rank": rank, "Seq": described.sequence, "Global rank start": 0, "Global rank stride": 1}
        tail = self._compute.last
        work.after = tuple(after) if after is not None else () if tail is None else (tail,)
        with (
            self.operator(OPERATORS[kind], shape, 0.5),
            self.operator("record_param_comms", shape, 0.5, said={**work.args, **said}),
            self.host.range("user_annotation", ANNOTATIONS[kind]),
        ):
            self._runtime("cudaEventRecord", self.spec.host.event_ns, self.host.correlate())
            self._runtime("cudaStreamWaitEvent", self.spec.host.event_ns, self.host.correlate())
            self._submit(work, COMM_STREAM, "cudaLaunchKernelExC")
        self.python()
        return work

    def wait_for(self, works: Sequence[Work]) -> Program:
        """Make the compute stream's next work wait for these; the host goes on."""
        for _ in works:
            self._runtime("cudaStreamWaitEvent", self.spec.host.event_ns, self.host.correlate())
        self._awaited = (*self._awaited, *works)
        yield from ()


class CpuProcess(Process):
    """A process whose operators are the computation; gloo's threads do the communication."""

    has_device = False

    def kernel(self, name: str, ns: float) -> None:
        """Compute inside the open operator."""
        self.host.spend(self.compute_ns(ns))

    def copy_batch(self) -> None:
        """The batch is there."""

    def item(self) -> Program:
        """Nothing to wait for."""
        with self.operator("aten::item", [[]], 0.25), self.operator("aten::_local_scalar_dense", [[]], 0.25):
            pass
        self.python()
        yield from ()

    def collective(self, kind: str, elements: int, after: Sequence[Work] | None = None) -> Work:
        """Hand it to the backend's threads, which take what is queued in order."""
        work = self.join(kind, elements, "gloo:all_reduce")
        work.args = {"Input type": [self.tensor_type], "Input Dims": [[elements]]}
        with self.operator(OPERATORS[kind], [[[elements]]], 0.25, "call"):
            work.queued_ns = self.host.now
            work.external_id = self.host.external_id
        self.host.stream(COMM_STREAM, GLOO_LANES).put(work)
        self.python()
        return work

    def wait_for(self, works: Sequence[Work]) -> Program:
        """Block until they have ended: no operator, only a gap."""
        for work in works:
            yield work
            self.host.spend_until(work.ended)
        self.python()
