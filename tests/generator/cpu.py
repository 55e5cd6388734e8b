"""A training process on CPUs: its operators are the computation, gloo's threads do the communication."""

from __future__ import annotations

from collections.abc import Sequence

from tests.generator.collectives import OPERATORS
from tests.generator.layout import COMPUTE_STREAM, Group
from tests.generator.process import Process
from tests.generator.work import Program, Work

GLOO_STREAM = 20
GLOO_LANES = 2
"""Threads of the gloo backend."""


class CpuProcess(Process):
    """A process whose operators are the computation; gloo's threads do the communication."""

    has_device = False

    def kernel(self, name: str, ns: float, after: Sequence[Work] = (), stream: int = COMPUTE_STREAM) -> None:
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

    def collective(self, kind: str, elements: int, group: Group, after: Sequence[Work] | None = None) -> Work:
        """Hand it to the backend's threads, which take what is queued in order."""
        work = self.join(kind, elements, "gloo:all_reduce", group)
        work.args = {"Input type": [self.tensor_type], "Input Dims": [[elements]]}
        with self.operator(OPERATORS[kind], [[[elements]]], 0.25, "call"):
            work.queued_ns = self.host.now
            work.external_id = self.host.external_id
        self.host.stream(GLOO_STREAM, GLOO_LANES).put(work)
        self.python()
        return work

    def wait_for(self, works: Sequence[Work]) -> Program:
        """Block until they have ended: no operator, only a gap."""
        for work in works:
            yield work
            self.host.spend_until(work.ended)
        self.python()
