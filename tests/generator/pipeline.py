"""Training in a pipeline: a stage holds some layers, micro-batches pass through the stages and their gradients back."""

from __future__ import annotations

from tests.generator.collectives import Transfer
from tests.generator.cuda import CudaProcess
from tests.generator.loader import Loader
from tests.generator.process import Process
from tests.generator.schedules import Exchange, actions
from tests.generator.training import REDUCE, DataParallel
from tests.generator.work import Part, Program


class Pipeline(DataParallel):
    """Each rank takes one batch per step; the first stage copies it to the device for the model, the last for the loss.
    What goes from stage to stage blocks the computation, as Megatron-LM waits for it. Gradients are reduced across
    copies when the last micro-batch is through."""

    wrapper = ""

    def __init__(self, process: Process, loader: Loader) -> None:
        super().__init__(process, loader)
        spec = self.spec
        assert isinstance(process, CudaProcess)
        self._cuda = process
        self._pipeline_group = spec.group(self.host.rank, "pipeline")
        schedule = spec.schedule
        self._actions = actions(schedule.schedule, spec.pipeline, self.stage, spec.microbatches, schedule.chunks)
        forwards = [action for action in self._actions if isinstance(action, Part) and action.forward]
        self._last_forward = forwards[-1]

    def passes(self, step: int) -> Program:
        """The schedule's actions, and then what is left of the gradients."""
        for action in self._actions:
            if isinstance(action, Exchange):
                yield from self._exchange(action)
                continue
            self.host.part = action
            if self.spec.schedule.ranges:
                name = f"{'Forward' if action.forward else 'Backward'} {action.microbatch}"
                with self.host.range("user_annotation", name):
                    yield from self._pass(action)
            else:
                yield from self._pass(action)
            self.host.part = None
            if action == self._last_forward and self.spec.syncs_forward(self.host.rank, step):
                yield from self.process.item()
        chunks = range(self.spec.schedule.chunks)
        for _ in range(2 * sum(self.spec.layers_of(self.stage, chunk) for chunk in chunks)):
            self.gradient(self.model.width * self.model.hidden)

    def _pass(self, part: Part) -> Program:
        """Forward or backward of one micro-batch through one chunk."""
        layers = self.spec.layers_of(self.stage, part.chunk)
        ends = self.stage == self.spec.pipeline - 1 and part.chunk == self.spec.schedule.chunks - 1
        if part.forward:
            for layer in range(layers):
                yield from self.forward(layer)
            if ends:
                self.small("aten::mean", REDUCE, self.model.small_kernel_ns)
            return
        self.host.thread = "autograd"
        if ends:
            self.small("MeanBackward0", REDUCE, self.model.small_kernel_ns)
        for _ in range(layers):
            yield from self.backward_layer()
        self.host.thread = "main"

    def _exchange(self, exchange: Exchange) -> Program:
        spec, group = self.spec, self._pipeline_group
        assert group is not None
        tensor, data, _ = spec.layout.coordinates(self.host.rank)
        transfers = [
            Transfer(op.send, spec.layout.rank(tensor, data, op.stage), self.model.activation_elements, op.forward)
            for op in exchange.ops
        ]
        yield from self.process.wait_for(self._cuda.exchange(transfers, group))
