"""A training process whose operators launch kernels on a device of its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tests.generator.causes import SlowCopy
from tests.generator.collectives import (
    ANNOTATIONS,
    OPERATORS,
    SEND_RECV_KERNEL,
    Transfer,
    describe_transfer,
    kernel_name,
    metadata,
)
from tests.generator.engine import Host, Range
from tests.generator.layout import COMPUTE_STREAM, NEXT_STREAM, Group
from tests.generator.process import Process
from tests.generator.spec import JobSpec
from tests.generator.work import Fabric, Program, Work

_P2P_OPERATORS = {True: "c10d::send", False: "c10d::recv_"}


class CudaProcess(Process):
    """A process whose operators launch kernels."""

    has_device = True

    def __init__(self, spec: JobSpec, host: Host, fabric: Fabric) -> None:
        super().__init__(spec, host, fabric)
        self._awaited: tuple[Work, ...] = ()
        self._sent = 0
        # The streams are there from the start, in this order.
        self._compute = host.stream(COMPUTE_STREAM)
        for group in spec.groups_of(host.rank).values():
            host.stream(group.stream)

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
        work.part = host.part
        if stream == COMPUTE_STREAM:
            work.after, self._awaited = (*work.after, *self._awaited), ()
        self._runtime(call, self.spec.host.launch_ns, work.correlation)
        work.queued_ns, work.latency_ns = host.now, self.spec.host.latency_ns
        host.stream(stream).put(work)
        return work

    def kernel(self, name: str, ns: float, after: Sequence[Work] = (), stream: int = COMPUTE_STREAM) -> Work:
        """Launch a compute kernel."""
        work = Work(
            self.host.rank, "compute", name, self.host.step, 0, duration_ns=self.compute_ns(ns), after=tuple(after)
        )
        return self._submit(work, stream)

    def copy_batch(self) -> None:
        """Copy the batch to the device without blocking."""
        host, model = self.host, self.spec.model
        shape = [[model.tokens, model.width]]
        ns = round(self.spec.copy_ns * self.factor(SlowCopy))
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
                host.rank, "copy", "Memcpy DtoH (Device -> Pageable)", host.step, 0, duration_ns=1_000,
                args={"bytes": 4},
            )  # fmt: skip
            self._submit(work, COMPUTE_STREAM, "cudaMemcpyAsync")
            external = host.external_id
            with host.range("cuda_runtime", "cudaStreamSynchronize", "sync") as event:
                event.external_id, event.correlation = external, host.correlate()
                yield work
                host.spend_until(work.ended + self.spec.host.sync_return_ns)
        self.python()

    def collective(self, kind: str, elements: int, group: Group, after: Sequence[Work] | None = None) -> Work:
        """Issue it on the group's communication stream."""
        work = self.join(kind, elements, kernel_name(kind, self.spec.model.element_bytes), group)
        described = work.collective
        assert described is not None
        args = metadata(kind, group, described.elements_in, described.elements_out, self.dtype)
        self._describe(work, args, described.sequence)
        shape = [[described.elements_in]]
        tail = self._compute.last
        work.after = tuple(after) if after is not None else () if tail is None else (tail,)
        with (
            self.operator(OPERATORS[kind], shape, 0.5),
            self._record(args, group, shape, described.sequence, group.ranks.index(self.host.rank)),
            self.host.range("user_annotation", ANNOTATIONS[kind]),
        ):
            self._launch_on(work, group.stream)
        self.python()
        return work

    def _describe(self, work: Work, args: Mapping[str, object], sequence: int) -> None:
        if self.spec.metadata in ("kernel", "numbered"):
            work.args = {**args, **({"Seq": sequence} if self.spec.metadata == "numbered" else {})}

    def _record(
        self, args: Mapping[str, object], group: Group, shape: Sequence[Any], sequence: int, rank: int
    ) -> Range:
        """The operator that carries a collective's description. ``rank`` is the own one, of a send the peer's, both
        within the group, which is what torch records."""
        recorded: dict[str, object] = {}
        if self.spec.metadata != "none":
            stride = group.ranks[1] - group.ranks[0]
            where = {"Global rank start": group.ranks[0], "Global rank stride": stride}
            recorded = {**args, "Rank": rank, "Seq": sequence, **where}
        return self.operator("record_param_comms", shape, 0.5, extra_args=recorded)

    def _launch_on(self, work: Work, stream: int) -> None:
        self._runtime("cudaEventRecord", self.spec.host.event_ns, self.host.correlate())
        self._runtime("cudaStreamWaitEvent", self.spec.host.event_ns, self.host.correlate())
        self._submit(work, stream, "cudaLaunchKernelExC")

    def exchange(self, transfers: Sequence[Transfer], group: Group) -> list[Work]:
        """Issue sends and receives after the computation so far: each as a kernel of its own on its neighbour's
        stream, or all as one kernel on the group's."""
        if self.spec.schedule.coalesced:
            return [self._exchange_at_once(transfers, group)]
        return [self._exchange_one(transfer, group) for transfer in transfers]

    def _exchange_one(self, transfer: Transfer, group: Group) -> Work:
        work = self._rank_op(transfer, group)
        self._sent += 1
        args, shape = self._transfer_args(transfer, group), [[transfer.elements]]
        self._describe(work, args, self._sent)
        rank, arrow = group.ranks.index(self.host.rank), "->" if transfer.send else "<-"
        title = f"nccl:{transfer.name} {rank}{arrow}{group.ranks.index(transfer.peer)}"
        with (
            self.operator(_P2P_OPERATORS[transfer.send], shape, 0.5),
            self._record(args, group, shape, self._sent, group.ranks.index(transfer.peer)),
            self.host.range("user_annotation", title),
        ):
            self._launch_on(work, NEXT_STREAM if transfer.peer > self.host.rank else group.stream)
        self.python()
        return work

    def _exchange_at_once(self, transfers: Sequence[Transfer], group: Group) -> Work:
        """The operators describe each send and recv; the kernel is launched after them, without a description."""
        work = Work(self.host.rank, "comm", SEND_RECV_KERNEL, self.host.step, 0)
        self._sent += 1
        for transfer in transfers:
            self._rank_op(transfer, group, work)
            shape = [[transfer.elements]]
            with (
                self.operator(_P2P_OPERATORS[transfer.send], shape, 0.5),
                self._record(
                    self._transfer_args(transfer, group), group, shape, self._sent, group.ranks.index(transfer.peer)
                ),
            ):
                pass
            self.python()
        with self.host.range("user_annotation", "nccl:coalesced", "operator"):
            self._launch_on(work, group.stream)
        self.python()
        return work

    def _rank_op(self, transfer: Transfer, group: Group, work: Work | None = None) -> Work:
        host, spec = self.host, self.spec
        if work is None:
            work = Work(host.rank, "comm", SEND_RECV_KERNEL, host.step, 0)
        tail = self._compute.last
        work.after = () if tail is None else (tail,)
        self.fabric.join(
            host.rank,
            work,
            lambda sequence: describe_transfer(spec, group, transfer, host.rank, host.step, sequence),
            (group.name, transfer.ends(host.rank)),
        )
        return work

    def _transfer_args(self, transfer: Transfer, group: Group) -> dict[str, object]:
        args = metadata(transfer.name, group, transfer.elements, transfer.elements, self.dtype)
        if self.spec.schedule.peers:
            args["Dst Rank" if transfer.send else "Src Rank"] = transfer.peer
        return args

    def wait_for(self, works: Sequence[Work]) -> Program:
        """Make the compute stream's next work wait for these; the host goes on."""
        for _ in works:
            self._runtime("cudaStreamWaitEvent", self.spec.host.event_ns, self.host.correlate())
        self._awaited = (*self._awaited, *works)
        yield from ()
