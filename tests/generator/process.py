"""What a training process does, in the vocabulary of training code (``cuda`` and ``cpu`` are the two kinds)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

from tests.generator.causes import SlowCompute, SlowCopy, SlowHost
from tests.generator.collectives import describe
from tests.generator.engine import Host, Range
from tests.generator.layout import COMPUTE_STREAM, Group
from tests.generator.spec import JobSpec
from tests.generator.work import Fabric, Program, Work


class Process(ABC):
    """What devices and CPUs have in common."""

    has_device: bool

    def __init__(self, spec: JobSpec, host: Host, fabric: Fabric) -> None:
        self.spec = spec
        self.host = host
        self.fabric = fabric
        self._factors: dict[tuple[object, int], float] = {}
        self.tensor_type = "c10::BFloat16" if spec.model.element_bytes == 2 else "float"
        """The type of tensors, as operators record it."""

    @property
    def dtype(self) -> str:
        """The same, as collectives record it."""
        return "BFloat16" if self.spec.model.element_bytes == 2 else "Float"

    def factor(self, kind: type[SlowCompute | SlowHost | SlowCopy]) -> float:
        """``spec.factor`` here and now."""
        key = (kind, self.host.step)
        known = self._factors.get(key)
        if known is None:
            known = self._factors[key] = self.spec.factor(kind, self.host.rank, self.host.step)
        return known

    def operator(
        self,
        name: str,
        shapes: Sequence[Any] = (),
        cost: float = 1.0,
        state: str = "operator",
        extra_args: Mapping[str, object] | None = None,
    ) -> Range:
        """A framework operator: its own cost falls half before what it does and half after."""
        host, spec = self.host, self.spec
        ns = host.noisy(spec.host.operator_ns * self.factor(SlowHost) * cost)
        args: dict[str, Any] = {"Record function id": 0}
        if extra_args:
            args |= extra_args
        if shapes:
            args["Concrete Inputs"] = [""] * len(shapes)
            args["Input type"] = [self.tensor_type] * len(shapes)
            args["Input Dims"] = list(shapes)
        return host.costly("cpu_op", name, state, args, ns)

    def python(self) -> None:
        """The interpreter, between operators."""
        self.host.spend(self.spec.host.python_ns)

    def compute_ns(self, ns: float) -> int:
        """How long a computation takes on this rank in this step that takes ``ns`` on a healthy machine."""
        return self.host.noisy(ns * self.factor(SlowCompute))

    def join(self, kind: str, elements: int, name: str, group: Group) -> Work:
        """This rank's op of a group's next collective, not yet queued."""
        host, spec = self.host, self.spec
        work = Work(host.rank, "comm", name, host.step, 0)
        self.fabric.join(
            host.rank, work, lambda sequence: describe(spec, group, kind, elements, host.step, sequence), group.name
        )
        return work

    @abstractmethod
    def kernel(self, name: str, ns: float, after: Sequence[Work] = (), stream: int = COMPUTE_STREAM) -> Work | None:
        """Compute for ``ns`` inside the open operator; the work where a device does it."""

    @abstractmethod
    def copy_batch(self) -> None:
        """Bring the batch to where it is computed on."""

    @abstractmethod
    def item(self) -> Program:
        """``tensor.item()``."""

    @abstractmethod
    def collective(self, kind: str, elements: int, group: Group, after: Sequence[Work] | None = None) -> Work:
        """Issue a collective that starts after the computation so far, or after the given works."""

    @abstractmethod
    def wait_for(self, works: Sequence[Work]) -> Program:
        """What follows waits for these."""
