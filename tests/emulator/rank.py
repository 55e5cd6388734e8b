"""One rank's process: what its Python statements cost, what they launch, and what a profiler would see of it."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from typing import Any

from tests.emulator.chance import normal, normal_in, place
from tests.emulator.machine import Machine, Meeting, Started, Waits, Work
from tests.emulator.spec import MS, US, Job

QUEUE = 1024
"""Launches that a device takes before it holds its host back."""
COMPUTE, COPIES = 7, 20
"""Streams; those of communicators are numbered from 30."""


@dataclass
class Call:
    """What a profiler records of the host: an operator, an annotation or a call of the CUDA runtime."""

    category: str
    name: str
    thread: str
    start_ns: int
    number: int
    end_ns: int = -1
    launches: bool = False
    args: dict[str, Any] = field(default_factory=dict)


@dataclass
class Communicator:
    """NCCL's: one stream on each rank, operations matched by their order."""

    name: str
    description: str
    ranks: tuple[int, ...]
    stream: int
    latency_ns: int
    gbps: float
    meetings: dict[Any, Meeting] = field(default_factory=dict)
    counts: dict[tuple[int, str], int] = field(default_factory=dict)

    def next(self, rank: int, key: str = "") -> int:
        """Number of a rank's next operation."""
        number = self.counts.get((rank, key), 0)
        self.counts[rank, key] = number + 1
        return number


class _Seen:
    """Ends a call when its block ends."""

    __slots__ = ("_rank", "call")

    def __init__(self, rank: Rank, call: Call) -> None:
        self._rank, self.call = rank, call

    def __enter__(self) -> Call:
        self._rank.open.append(self.call.number)
        return self.call

    def __exit__(self, *_: object) -> None:
        self._rank.open.pop()
        self.call.end_ns = self._rank.now


class _Unseen:
    """No profiler looks."""

    __slots__ = ()

    def __enter__(self) -> None:
        return None

    def __exit__(self, *_: object) -> None:
        return None


_UNSEEN = _Unseen()


class Rank:
    """A training process with its device."""

    def __init__(self, job: Job, number: int, machine: Machine, communicators: dict[str, Communicator]) -> None:
        self.job, self.number, self.machine = job, number, machine
        self.communicators = communicators
        self.now = self._first_ns()
        self.step = -1
        self._luck = place(job.seed, number, self.step)
        self.recording = False
        self.final: list[Work] = []
        """The last work of each step on each stream."""
        self.thread = "main"
        self.calls: list[Call] = []
        self.works: list[Work] = []
        self.bounds: list[int] = []
        """When each step's loop body begins."""
        self.tokens = 1.0
        """This step's batch against the usual one."""
        self.fetched: list[int] = []
        """What the batches took that loader workers finished while recorded."""
        self.open: list[int] = []
        """Numbers of the calls that run."""
        self._launched: list[Work] = []
        self._numbers = 0
        self._pace = 1.0
        self._dependences: list[Work] = []
        self.micro = 0
        self.block: tuple[float, list[Any]] = (0.0, [])
        """The kernels of a block's forward for so many tokens."""
        self._host_factor = job.factor("slow host", number)
        self._device_factor = job.factor("slow compute", number) / job.compute_speed

    def _first_ns(self) -> int:
        skew = self.job.recording.start_skew_ns
        return 10 * MS + round(skew * abs(normal(self.job.seed, self.number, "skew")))

    # Host code.

    def spend(self, ns: float) -> None:
        """Run something that takes a healthy host this long."""
        self.now += round(ns * self._host_factor * self._pace)

    def idle(self, ns: float) -> None:
        """Time passes; no slow host makes it longer."""
        self.now += round(ns)

    def begin_step(self, step: int) -> None:
        """A new step, with its own luck."""
        self._close_step()
        self.step = step
        job = self.job
        self._luck = place(job.seed, self.number, step)
        self._pace = max(0.5, 1 + job.noise * normal_in(self._luck, "host"))
        self.bounds.append(self.now)
        recorded = step - self.job.warmup
        self.recording = self.job.recording.kept and 0 <= recorded < self.job.recording.steps
        self.tokens = job.tokens_of(self.number, step)

    def _close_step(self) -> None:
        self.final += {work.stream: work for work in self._launched[-QUEUE:] if work.step == self.step}.values()

    def end(self) -> None:
        """After the last step."""
        self.bounds.append(self.now)
        self._close_step()

    def call(self, category: str, name: str, **args: Any) -> _Seen | _Unseen:
        """Something that the profiler sees while it runs."""
        if not self.recording:
            return _UNSEEN
        self._numbers += 1
        call = Call(category, name, self.thread, self.now, self._numbers, args=args)
        self.calls.append(call)
        if category == "cpu_op":
            self.now += self.job.cpu.profiler_ns
        return _Seen(self, call)

    def operator(self, name: str, **args: Any) -> _Seen | _Unseen:
        """A framework operator, whose dispatch is the caller's to ``spend``."""
        return self.call("cpu_op", name, **args) if self.recording else _UNSEEN

    def annotation(self, name: str) -> _Seen | _Unseen:
        """A range: ``record_function``."""
        return self.call("user_annotation", name)

    def range(self, name: str) -> _Seen | _Unseen:
        """A range that only ``perfscope run`` leaves."""
        return self.annotation(f"perfscope::{name}") if self.job.recording.run else _UNSEEN

    # The device.

    def launch(
        self, work: Work, after: Sequence[Work] = (), call: str = "cudaLaunchKernel"
    ) -> Generator[Any, None, Work]:
        """Give work to the device; blocks while its queue is full."""
        with self.call("cuda_runtime", call) if self.recording else _UNSEEN as recorded:
            if len(self._launched) >= QUEUE:
                oldest = self._launched[-QUEUE]
                if oldest.start_ns is None:  # the machine would find out, for each of a thousand launches
                    yield Started(oldest)
                assert oldest.start_ns is not None
                self.now = max(self.now, oldest.start_ns)
            called_ns = self.now
            self.spend(self.job.cpu.launch_ns)
            if self.recording:
                self.now += self.job.cpu.profiler_ns
        work.step = self.step
        work.queued_ns = called_ns
        work.earliest_ns = called_ns + self.job.cpu.latency_ns
        if recorded is not None:
            recorded.launches = True
            work.correlation = recorded.number
            work.external_id = self.open[-1] if self.open else 0
            self.works.append(work)
        self._launched.append(work)
        self.machine.submit(work, after)
        return work

    def kernel(self, name: str, ns: float, label: str, after: Sequence[Work] = ()) -> Generator[Any, None, Work]:
        """Compute for ``ns`` (on a healthy device) on the compute stream; ``label`` names its random number."""
        ns *= self._device_factor
        if self.job.noise:
            ns *= max(0.5, 1 + self.job.noise * normal_in(self._luck, label))
        work = Work(self.number, COMPUTE, "kernel", name, max(round(ns), 1), self.now)
        if self._dependences:
            after = (*after, *self._awaited())
        return (yield from self.launch(work, after))

    def depend(self, works: Sequence[Work]) -> None:
        """``stream.wait_event``: what is launched next on the compute stream waits for these."""
        self._dependences.extend(works)

    def _awaited(self) -> list[Work]:
        found, self._dependences = self._dependences, []
        return found

    def last(self, stream: int = COMPUTE) -> list[Work]:
        """What an event that is recorded on a stream now stands for."""
        work = self.machine.last(self.number, stream)
        return [] if work is None else [work]

    def wait(self, work: Work | None, name: str = "cudaStreamSynchronize") -> Waits:
        """Block the host until work has ended."""
        with self.call("cuda_runtime", name):
            self.spend(2 * US)
            if work is not None:
                yield work
                assert work.end_ns is not None
                if work.end_ns > self.now:
                    self.now = work.end_ns
                    self.idle(self.job.cpu.wake_ns)

    def copy(self, kind: str, size: int, blocking: bool, stream: int = COMPUTE) -> Waits:
        """``cudaMemcpyAsync``: ``HtoD`` or ``DtoH``."""
        source, target = (
            ("Pinned" if not blocking else "Pageable", "Device") if kind == "HtoD" else ("Device", "Pageable")
        )
        name = f"Memcpy {kind} ({source} -> {target})"
        work = Work(self.number, stream, "gpu_memcpy", name, round(1_200 + size / 12), self.now)
        work.args = {"bytes": size}
        yield from self.launch(work, call="cudaMemcpyAsync")
        if blocking:
            yield from self.wait(work)

    def item(self) -> Waits:
        """``tensor.item()``."""
        with self.operator("aten::item"):
            self.spend(2 * US)
            with self.operator("aten::_local_scalar_dense"):
                self.spend(3 * US)
                yield from self.copy("DtoH", 4, blocking=True)
