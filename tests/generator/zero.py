"""Training with DeepSpeed's ZeRO: optimizer states, gradients and, in stage 3, parameters are partitioned.

DeepSpeed leaves nothing of its own in torch's profiler but the names of its autograd functions: no range shows which
collective is what.
"""

from __future__ import annotations

from tests.generator.collectives import ALL_GATHER, ALL_REDUCE, REDUCE_SCATTER
from tests.generator.fsdp import FullyShardedDataParallel
from tests.generator.layout import COMPUTE_STREAM, SIDE_STREAM
from tests.generator.loader import Loader
from tests.generator.process import Process
from tests.generator.training import Training
from tests.generator.work import Program, Work

AVERAGE = (
    "void at::native::vectorized_elementwise_kernel<4, at::native::AUnaryFunctor<c10::BFloat16, c10::BFloat16, "
    "c10::BFloat16, at::native::binary_internal::MulFunctor<float> >, at::detail::Array<char*, 2> >(int)"
)
PRE_BACKWARD = "PreBackwardFunctionForModuleBackward"


class _Buckets:
    """Gradients on their way to their owners. Each bucket is averaged on a stream of its own, beside the computation,
    and then reduced."""

    def __init__(self, training: Training, kind: str) -> None:
        self._training = training
        self._kind = kind
        self._elements = 0
        self._works: list[Work] = []

    def add(self, elements: int) -> None:
        """A gradient has been computed."""
        spec = self._training.spec
        self._elements += elements
        if self._elements * spec.model.element_bytes >= spec.bucket_limit(first=False):
            self.flush()

    def flush(self) -> None:
        """Reduce what there is."""
        training, process = self._training, self._training.process
        if self._elements and training.data_group is not None:
            tail = training.host.stream(COMPUTE_STREAM).last
            with process.operator("aten::mul_", [[self._elements]]):
                averaged = process.kernel(
                    AVERAGE, training.model.small_kernel_ns, () if tail is None else (tail,), SIDE_STREAM
                )
            process.python()
            after = () if averaged is None else (averaged,)
            self._works.append(process.collective(self._kind, self._elements, training.data_group, after))
        self._elements = 0

    def wait(self) -> Program:
        """What follows needs all of them."""
        works, self._works = self._works, []
        yield from self._training.process.wait_for(works)


class _Bucketed(Training):
    """What all stages share: gradients are reduced in buckets, and the last bucket whenever they are needed."""

    kind = REDUCE_SCATTER

    def __init__(self, process: Process, loader: Loader) -> None:
        super().__init__(process, loader)
        self._buckets = _Buckets(self, self.kind)

    def zero_grad(self) -> None:
        """DeepSpeed drops its gradients; torch's ``zero_grad`` is not called."""
        self.process.python()

    def after_microbatch(self) -> Program:
        """Gradients are not stored in full: what is left is reduced now."""
        self._buckets.flush()
        yield from self._buckets.wait()

    def after_backward(self) -> Program:
        """The optimizer needs the averages of its part."""
        self._buckets.flush()
        yield from self._buckets.wait()
        self.host.thread = "main"


class Zero3(_Bucketed, FullyShardedDataParallel):
    """Stage 3: a layer's parameters are gathered before its forward and backward, the next one's meanwhile; gradients
    are reduce-scattered in buckets, after every micro-batch's layers."""

    wrapper = ""

    def backward(self, layer: int, *, reduce: bool) -> Program:
        """Gather the previous layer, compute this one, put its gradients into the bucket."""
        process = self.process
        with (
            process.operator(f"autograd::engine::evaluate_function: {PRE_BACKWARD}", (), 0.25, "wrapper"),
            process.operator(PRE_BACKWARD, (), 0.25, "wrapper"),
        ):
            if layer == self.layers - 1:
                self.gather(layer)
            self.gather(layer - 1)
            yield from self.gathered(layer)
        yield from self.backward_layer(self._buckets.add)


class Zero2(_Bucketed):
    """Stage 2: gradients are reduce-scattered in buckets while backward goes on; each rank updates its part of the
    parameters, and all parts are gathered after that."""

    def backward(self, layer: int, *, reduce: bool) -> Program:
        """Put the layer's gradients into the bucket."""
        yield from self.backward_layer(self._buckets.add)

    def after_optimizer(self) -> Program:
        """All parts of all parameters, before anything else is computed."""
        if self.data_group is not None:
            elements = self.layers * self.model.layer_parameters
            yield from self.process.wait_for([self.process.collective(ALL_GATHER, elements, self.data_group)])


class Zero1(Zero2):
    """Stage 1: the optimizer's states only: gradients are stored, and reduced once the last micro-batch's backward is
    through."""

    kind = ALL_REDUCE

    def backward(self, layer: int, *, reduce: bool) -> Program:
        """Nothing is reduced yet."""
        yield from self.backward_layer()

    def after_microbatch(self) -> Program:
        """Nothing is reduced yet."""
        yield from ()

    def after_backward(self) -> Program:
        """Reduce everything, bucket by bucket."""
        for _ in range(2 * self.layers):
            self._buckets.add(self.model.width * self.model.hidden)
        yield from super().after_backward()
