"""Training loops: what one rank does, step by step, under each strategy."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from tests.generator.collectives import ALL_GATHER, ALL_REDUCE, REDUCE_SCATTER
from tests.generator.engine import Program, Work
from tests.generator.loader import Loader
from tests.generator.process import Process

GEMM = "ampere_bf16_s16816gemm_bf16_128x256_ldg8_f2f_stages_64x3_tn"
GELU = (
    "void at::native::vectorized_elementwise_kernel<4, at::native::GeluCUDAKernelImpl(at::TensorIteratorBase&)"
    "::{lambda()#1}, at::detail::Array<char*, 2> >(int)"
)
GELU_BACKWARD = GELU.replace("GeluCUDA", "GeluBackwardCUDA")
REDUCE = "void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float, at::native::MeanOps<float> > >(int)"
FOREACH = "void at::native::(anonymous namespace)::multi_tensor_apply_kernel<at::native::TensorListMetadata<1> >(int)"


class Training(ABC):
    """One rank's training loop; strategies say what surrounds a layer's forward and backward."""

    wrapper = ""
    """Annotation around the forward pass."""

    def __init__(self, process: Process, loader: Loader) -> None:
        self.process = process
        self.loader = loader
        self.spec = process.spec
        self.host = process.host

    def run(self, steps: Sequence[int]) -> Program:
        """The training loop."""
        for step in steps:
            self.host.step = step
            with self.host.range("user_annotation", f"ProfilerStep#{step}"):
                yield from self._step(step)

    def _step(self, step: int) -> Program:
        process, host, model = self.process, self.host, self.spec.model
        self.loader.next(host)
        process.python()
        with host.range("user_annotation", "Optimizer.zero_grad#AdamW.zero_grad"):
            process.python()
            self._small("aten::_foreach_zero_", FOREACH, model.small_kernel_ns)
        process.copy_batch()
        for pause in self.spec.pauses(host.rank, step):
            if pause.name is None:
                host.spend(pause.pause_ns)
            else:
                with host.range("user_annotation", pause.name):
                    host.spend(pause.pause_ns)
        with host.range("user_annotation", self.wrapper):
            self.before_forward()
            for layer in range(model.layers):
                yield from self.forward(layer)
        self._small("aten::mean", REDUCE, model.small_kernel_ns)
        if self.spec.syncs_forward(host.rank, step):
            yield from process.item()
        host.thread = "autograd" if process.has_device else "main"
        self._small("MeanBackward0", REDUCE, model.small_kernel_ns)
        for layer in reversed(range(model.layers)):
            yield from self.backward(layer)
        yield from self.after_backward()
        host.thread = "main"
        process.python()
        with host.range("user_annotation", "Optimizer.step#AdamW.step"):
            process.python()
            for _ in range(model.optimizer_kernels):
                self._small("aten::_foreach_addcdiv_", FOREACH, model.optimizer_kernel_ns)
        if self.spec.end_sync:
            yield from process.item()

    def before_forward(self) -> None:
        """Called before the first layer; most strategies have nothing to do there."""
        return

    def forward(self, layer: int) -> Program:
        """Forward of one layer."""
        self.forward_layer()
        yield from ()

    @abstractmethod
    def backward(self, layer: int) -> Program:
        """Backward of one layer."""

    @abstractmethod
    def after_backward(self) -> Program:
        """Called when the last gradient is on its way."""

    def forward_layer(self) -> None:
        """Linear, GELU, linear."""
        model = self.spec.model
        self._linear(model.width, model.hidden)
        self._small("aten::gelu", GELU, model.small_kernel_ns)
        self._linear(model.hidden, model.width)

    def _linear(self, inputs: int, outputs: int) -> None:
        process, tokens = self.process, self.spec.model.tokens
        with process.operator("aten::linear", [[tokens, inputs], [outputs, inputs], [outputs]], 0.5):
            with process.operator("aten::t", [[outputs, inputs]], 0.1):
                pass
            with process.operator("aten::addmm", [[outputs], [tokens, inputs], [inputs, outputs]], 0.5):
                process.kernel(GEMM, self.spec.model.matrix_ns)
        process.python()

    def linear_backward(self, inputs: int, outputs: int) -> None:
        """Gradients of a linear's input and weight: two matrix products."""
        process, tokens = self.process, self.spec.model.tokens
        with (
            process.operator("autograd::engine::evaluate_function: AddmmBackward0", (), 0.25, "wrapper"),
            process.operator("AddmmBackward0", [[tokens, outputs]], 0.25, "wrapper"),
        ):
            for shapes in ([[tokens, outputs], [outputs, inputs]], [[outputs, tokens], [tokens, inputs]]):
                with process.operator("aten::mm", shapes, 0.5):
                    process.kernel(GEMM, self.spec.model.matrix_ns)
        process.python()

    def gelu_backward(self) -> None:
        """Between a layer's two linears."""
        self._small("GeluBackward0", GELU_BACKWARD, self.spec.model.small_kernel_ns)

    def _small(self, operator: str, kernel: str, ns: float) -> None:
        model = self.spec.model
        with self.process.operator(operator, [[model.tokens, model.width]]):
            self.process.kernel(kernel, ns)
        self.process.python()


class DataParallel(Training):
    """DDP: gradients are reduced in buckets while backward goes on; the optimizer waits for all of them."""

    wrapper = "DistributedDataParallel.forward"

    def __init__(self, process: Process, loader: Loader) -> None:
        super().__init__(process, loader)
        self._bucket = 0
        self._reductions: list[Work] = []

    def backward(self, layer: int) -> Program:
        """Each weight's gradient goes into the bucket when it is on its way."""
        model = self.spec.model
        self.linear_backward(model.hidden, model.width)
        self._gradient(model.width * model.hidden)
        self.gelu_backward()
        self.linear_backward(model.width, model.hidden)
        self._gradient(model.width * model.hidden)
        yield from ()

    def _gradient(self, elements: int) -> None:
        self._bucket += elements
        limit = self.spec.bucket_limit(first=not self._reductions)
        if self._bucket * self.spec.model.element_bytes >= limit:
            self._reduce()

    def _reduce(self) -> None:
        if self.spec.ranks > 1:
            self._reductions.append(self.process.collective(ALL_REDUCE, self._bucket))
        self._bucket = 0

    def after_backward(self) -> Program:
        """Reduce what is left and wait for all."""
        if self._bucket:
            self._reduce()
        works, self._reductions = self._reductions, []
        yield from self.process.wait_for(works)


class FullyShardedDataParallel(Training):
    """FSDP: a layer's parameters are gathered before its forward and again before its backward, one layer ahead; its
    gradients are reduce-scattered after it. All collectives share one stream."""

    wrapper = "FullyShardedDataParallel.forward"

    def __init__(self, process: Process, loader: Loader) -> None:
        super().__init__(process, loader)
        self._gathered: dict[int, Work] = {}
        self._reductions: list[Work] = []

    def _gather(self, layer: int) -> None:
        if 0 <= layer < self.spec.model.layers:
            self._gathered[layer] = self.process.collective(ALL_GATHER, self.spec.model.layer_parameters)

    def before_forward(self) -> None:
        """The first layer's parameters; the next one's are gathered while a layer computes."""
        self._gather(0)

    def forward(self, layer: int) -> Program:
        """Gather the next layer, then compute this one."""
        self._gather(layer + 1)
        yield from self.process.wait_for([self._gathered.pop(layer)])
        self.forward_layer()

    def backward(self, layer: int) -> Program:
        """Gather the previous layer, compute this one, reduce-scatter its gradients."""
        model = self.spec.model
        if layer == model.layers - 1:
            self._gather(layer)
        self._gather(layer - 1)
        yield from self.process.wait_for([self._gathered.pop(layer)])
        self.linear_backward(model.hidden, model.width)
        self.gelu_backward()
        self.linear_backward(model.width, model.hidden)
        self._reductions.append(self.process.collective(REDUCE_SCATTER, model.layer_parameters))

    def after_backward(self) -> Program:
        """The optimizer needs every shard's gradients."""
        works, self._reductions = self._reductions, []
        yield from self.process.wait_for(works)


STRATEGIES: dict[str, type[Training]] = {"ddp": DataParallel, "fsdp": FullyShardedDataParallel}
