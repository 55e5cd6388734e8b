"""Training with FSDP: parameters, gradients and optimizer states are sharded across the data parallel ranks."""

from __future__ import annotations

from tests.generator.collectives import ALL_GATHER, ALL_REDUCE, REDUCE_SCATTER
from tests.generator.loader import Loader
from tests.generator.process import Process
from tests.generator.training import Training
from tests.generator.work import Program, Work


class FullyShardedDataParallel(Training):
    """FSDP: a layer's parameters are gathered before its forward and again before its backward, one layer ahead; its
    gradients are reduce-scattered after it. All collectives share one stream. With replicas (HSDP) each holds a whole
    copy of the model in shards, and the gradients' shards are then reduced across them, on a stream of its own."""

    wrapper = "FullyShardedDataParallel.forward"

    def __init__(self, process: Process, loader: Loader) -> None:
        super().__init__(process, loader)
        self._replica_group = None
        if self.spec.replicas > 1:
            self.data_group = self.spec.group(self.host.rank, "shard")
            self._replica_group = self.spec.group(self.host.rank, "replica")
        self._gathered: dict[int, Work] = {}
        self._reductions: list[Work] = []

    def gather(self, layer: int) -> None:
        """Have a layer's parameters gathered, if there is such a layer."""
        if self.data_group is not None and 0 <= layer < self.layers:
            self._gathered[layer] = self.process.collective(ALL_GATHER, self.model.layer_parameters, self.data_group)

    def gathered(self, layer: int) -> Program:
        """Wait for a layer's parameters."""
        yield from self.process.wait_for([self._gathered.pop(layer)] if layer in self._gathered else [])

    def before_forward(self) -> None:
        """The first layer's parameters; the next one's are gathered while a layer computes."""
        self.gather(0)

    def forward(self, layer: int) -> Program:
        """Gather the next layer, then compute this one."""
        self.gather(layer + 1)
        yield from self.gathered(layer)
        yield from self.forward_layer()

    def backward(self, layer: int, *, reduce: bool) -> Program:
        """Gather the previous layer, compute this one, reduce-scatter its gradients."""
        if layer == self.layers - 1:
            self.gather(layer)
        self.gather(layer - 1)
        yield from self.gathered(layer)
        yield from self.backward_layer()
        if reduce:
            self._reduce()

    def _reduce(self) -> None:
        """A layer's gradients are on their way."""
        elements = self.model.layer_parameters
        if self.data_group is not None:
            self._reductions.append(self.process.collective(REDUCE_SCATTER, elements, self.data_group))
            elements //= len(self.data_group.ranks)
        if self._replica_group is not None:
            after = self._reductions[-1:] if self.data_group is not None else None
            self._reductions.append(self.process.collective(ALL_REDUCE, elements, self._replica_group, after))

    def after_microbatch(self) -> Program:
        """What is being reduced is waited for in the backward that began it."""
        works, self._reductions = self._reductions, []
        yield from self.process.wait_for(works)

    def after_backward(self) -> Program:
        """The optimizer needs every shard's gradients."""
        works, self._reductions = self._reductions, []
        yield from self.process.wait_for(works)
        self.host.thread = "main"
