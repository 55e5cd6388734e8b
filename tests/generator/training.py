"""Training loops: what one rank does, step by step, under each strategy."""

from __future__ import annotations

from abc import ABC
from collections.abc import Callable, Sequence
from contextlib import ExitStack

from tests.generator.collectives import ALL_REDUCE
from tests.generator.engine import Host
from tests.generator.loader import Loader
from tests.generator.process import Process
from tests.generator.work import Part, Program, Work

GEMM = "ampere_bf16_s16816gemm_bf16_128x256_ldg8_f2f_stages_64x3_tn"
GELU = (
    "void at::native::vectorized_elementwise_kernel<4, at::native::GeluCUDAKernelImpl(at::TensorIteratorBase&)"
    "::{lambda()#1}, at::detail::Array<char*, 2> >(int)"
)
GELU_BACKWARD = GELU.replace("GeluCUDA", "GeluBackwardCUDA")
REDUCE = "void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float, at::native::MeanOps<float> > >(int)"
FOREACH = "void at::native::(anonymous namespace)::multi_tensor_apply_kernel<at::native::TensorListMetadata<1> >(int)"
CHECKPOINT_BACKWARD = "CheckpointFunctionBackward"
EVALUATION = "perfscope::evaluation"
"""The recorder's range over an evaluation."""


class Training(ABC):  # noqa: B024  # every hook has something to do by default: nothing
    """One rank's training loop; strategies define what surrounds a layer's forward and backward."""

    wrapper = ""
    """Annotation around the forward pass; empty: none."""

    def __init__(self, process: Process, loader: Loader) -> None:
        self.process = process
        self.loader = loader
        self.spec = process.spec
        self.host: Host = process.host
        self.model = process.spec.rank_model
        rank = self.host.rank
        self.stage = self.spec.stage_of(rank)
        self.data_group = self.spec.group(rank, "data")
        self.tensor_group = self.spec.group(rank, "tensor")
        self.model_group = self.spec.group(rank, "model") if self.spec.clip_norm else None
        self.layers = self.spec.layers_of(self.stage)

    def run(self, steps: Sequence[int]) -> Program:
        """The training loop."""
        for step in steps:
            self.host.step = step
            with self.host.range("user_annotation", f"ProfilerStep#{step}"):
                yield from self._step(step)

    def _step(self, step: int) -> Program:
        process, host = self.process, self.host
        self.loader.next(host)
        process.python()
        self.zero_grad()
        process.copy_batch()
        self._pause(step)
        yield from self.passes(step)
        yield from self.after_backward()
        if self.model_group is not None:
            yield from process.wait_for([process.collective(ALL_REDUCE, 1, self.model_group)])
        process.python()
        self.optimizer()
        yield from self.after_optimizer()
        if self.spec.end_sync:
            yield from process.item()
        yield from self._evaluate(step)

    def _evaluate(self, step: int) -> Program:
        for evaluation in self.spec.evaluations(self.host.rank, step):
            with ExitStack() as range_of_it:
                if evaluation.marked:
                    range_of_it.enter_context(self.host.range("user_annotation", EVALUATION))
                for _ in range(evaluation.batches):
                    yield from self._forward_pass()
                    self.small("aten::mean", REDUCE, self.model.small_kernel_ns)

    def zero_grad(self) -> None:
        """Forget the last step's gradients."""
        with self.host.range("user_annotation", "Optimizer.zero_grad#AdamW.zero_grad"):
            self.process.python()
            self.small("aten::_foreach_zero_", FOREACH, self.model.small_kernel_ns)

    def _pause(self, step: int) -> None:
        host = self.host
        for pause in self.spec.pauses(host.rank, step):
            if pause.name is None:
                host.spend(pause.pause_ns)
            else:
                with host.range("user_annotation", pause.name):
                    host.spend(pause.pause_ns)

    def passes(self, step: int) -> Program:
        """Forward and backward of all the step's micro-batches."""
        process, host = self.process, self.host
        for microbatch in range(self.spec.microbatches):
            if microbatch:
                self.loader.next(host)
                process.python()
                process.copy_batch()
            host.part = Part(True, microbatch)
            if self.wrapper:
                with host.range("user_annotation", self.wrapper):
                    yield from self._forward_pass()
            else:
                yield from self._forward_pass()
            self.small("aten::mean", REDUCE, self.model.small_kernel_ns)
            host.part = None
            if self.spec.syncs_forward(host.rank, step):
                yield from process.item()
            host.part = Part(False, microbatch)
            host.thread = "autograd" if process.has_device else "main"
            self.small("MeanBackward0", REDUCE, self.model.small_kernel_ns)
            for layer in reversed(range(self.layers)):
                yield from self.backward(layer, reduce=self.spec.reduces(microbatch))
            if microbatch < self.spec.microbatches - 1:
                yield from self.after_microbatch()
                host.thread = "main"
            host.part = None

    def _forward_pass(self) -> Program:
        self.before_forward()
        for layer in range(self.layers):
            yield from self.forward(layer)

    def optimizer(self) -> None:
        """Its step, all of it on the device."""
        with self.host.range("user_annotation", "Optimizer.step#AdamW.step"):
            self.process.python()
            for _ in range(self.model.optimizer_kernels):
                self.small("aten::_foreach_addcdiv_", FOREACH, self.model.optimizer_kernel_ns)

    def before_forward(self) -> None:
        """Called before the first layer; most strategies have nothing to do there."""
        return

    def forward(self, layer: int) -> Program:
        """Forward of one layer."""
        yield from self.forward_layer()

    def backward(self, layer: int, *, reduce: bool) -> Program:
        """Backward of one layer; its gradients are reduced across copies of the model, or left for later."""
        yield from self.backward_layer()

    def after_microbatch(self) -> Program:
        """Called after the backward of every micro-batch but the last."""
        yield from ()

    def after_backward(self) -> Program:
        """Called when the last gradient is on its way."""
        self.host.thread = "main"
        yield from ()

    def after_optimizer(self) -> Program:
        """Called after the optimizer's step."""
        yield from ()

    def forward_layer(self, *, to_the_end: bool = True) -> Program:
        """Linear, GELU, linear; the second one's partial products are summed over tensor parallel ranks."""
        model = self.model
        self._linear(model.width, model.hidden)
        self.small("aten::gelu", GELU, model.small_kernel_ns)
        if to_the_end:
            self._linear(model.hidden, model.width)
            yield from self._sum_over_tensor_group()

    def _sum_over_tensor_group(self) -> Program:
        if self.tensor_group is not None:
            reduced = self.process.collective(ALL_REDUCE, self.model.activation_elements, self.tensor_group)
            yield from self.process.wait_for([reduced])

    def _linear(self, inputs: int, outputs: int) -> None:
        process, tokens = self.process, self.model.tokens
        with process.operator("aten::linear", [[tokens, inputs], [outputs, inputs], [outputs]], 0.5):
            with process.operator("aten::t", [[outputs, inputs]], 0.1):
                pass
            with process.operator("aten::addmm", [[outputs], [tokens, inputs], [inputs, outputs]], 0.5):
                process.kernel(GEMM, self.model.matrix_ns)
        process.python()

    def backward_layer(self, ready: Callable[[int], None] | None = None) -> Program:
        """The three operations of a layer, in reverse, after its forward again where activations were not stored.
        ``ready`` is called with the elements of each weight gradient once it is queued."""
        if self.spec.recompute == "reentrant":
            process, evaluate = self.process, f"autograd::engine::evaluate_function: {CHECKPOINT_BACKWARD}"
            with (
                process.operator(evaluate, (), 0.25, "wrapper"),
                process.operator(CHECKPOINT_BACKWARD, (), 0.25, "wrapper"),
            ):
                yield from self.forward_layer()
                yield from self._backward_layer(ready)
        else:
            yield from self._backward_layer(ready)

    def _backward_layer(self, ready: Callable[[int], None] | None) -> Program:
        model = self.model
        # Without re-entering autograd, the first function that misses a tensor has the forward run again, up to the
        # last tensor that was saved: the input of the last product, which itself is not repeated.
        again = self.spec.recompute == "non_reentrant"
        yield from self.linear_backward(model.hidden, model.width, first=again)
        if ready is not None:
            ready(model.width * model.hidden)
        self.gelu_backward()
        yield from self.linear_backward(model.width, model.hidden)
        if ready is not None:
            ready(model.width * model.hidden)
        yield from self._sum_over_tensor_group()

    def linear_backward(self, inputs: int, outputs: int, *, first: bool = False) -> Program:
        """Gradients of a linear's input and weight: two matrix products; ``first``: after the layer's forward."""
        process, tokens = self.process, self.model.tokens
        with (
            process.operator("autograd::engine::evaluate_function: AddmmBackward0", (), 0.25, "wrapper"),
            process.operator("AddmmBackward0", [[tokens, outputs]], 0.25, "wrapper"),
        ):
            if first:
                yield from self.forward_layer(to_the_end=False)
            for shapes in ([[tokens, outputs], [outputs, inputs]], [[outputs, tokens], [tokens, inputs]]):
                with process.operator("aten::mm", shapes, 0.5):
                    process.kernel(GEMM, self.model.matrix_ns)
        process.python()

    def gelu_backward(self) -> None:
        """Between a layer's two linears."""
        self.small("GeluBackward0", GELU_BACKWARD, self.model.small_kernel_ns)

    def small(self, operator: str, kernel: str, ns: float) -> None:
        """An element-wise operator."""
        with self.process.operator(operator, [[self.model.tokens, self.model.width]]):
            self.process.kernel(kernel, ns)
        self.process.python()


class DataParallel(Training):
    """DDP: gradients are reduced in buckets while backward goes on; the optimizer waits for all of them."""

    wrapper = "DistributedDataParallel.forward"

    def __init__(self, process: Process, loader: Loader) -> None:
        super().__init__(process, loader)
        self._bucket = 0
        self._reductions: list[Work] = []

    def backward(self, layer: int, *, reduce: bool) -> Program:
        """Each weight's gradient goes into the bucket when it is on its way."""
        yield from self.backward_layer(self.gradient if reduce else None)

    def gradient(self, elements: int) -> None:
        """A gradient is on its way: into the bucket, which is reduced once it is full."""
        self._bucket += elements
        limit = self.spec.bucket_limit(first=not self._reductions)
        if self._bucket * self.spec.model.element_bytes >= limit:
            self._reduce()

    def _reduce(self) -> None:
        if self.data_group is not None:
            self._reductions.append(self.process.collective(ALL_REDUCE, self._bucket, self.data_group))
        self._bucket = 0

    def _finish(self) -> Program:
        if self._bucket:
            self._reduce()
        works, self._reductions = self._reductions, []
        yield from self.process.wait_for(works)

    def after_microbatch(self) -> Program:
        """DDP finishes what it reduces in the backward that began it."""
        yield from self._finish()

    def after_backward(self) -> Program:
        """Reduce what is left and wait for all."""
        yield from self._finish()
        self.host.thread = "main"
