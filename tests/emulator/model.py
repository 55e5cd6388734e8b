"""The model's operators: what each costs the host and the device, forward and backward."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from tests.emulator.machine import Waits
from tests.emulator.rank import Rank
from tests.emulator.spec import Job, Model

_GEMM = "ampere_bf16_s16816gemm_bf16_128x128_ldg8_f2f_stages_64x3_{}"
_ELEMENTWISE = "void at::native::vectorized_elementwise_kernel<4, {}>(int, at::detail::Array<char*, 3>)"
_ATTENTION = "void pytorch_flash::flash_{}_kernel<pytorch_flash::Flash_kernel_traits<64, 128, 64, 4>>(params)"


@dataclass(frozen=True)
class Kernel:
    """One operator with its kernel: ns on a healthy device for a whole batch."""

    operator: str
    node: str
    name: str
    ns: float
    dims: tuple[tuple[int, ...], ...] = ()
    parameter: int = 0
    """Elements of the parameter that it uses."""


def gemm_ns(model: Model, rows: float, inner: int, columns: int) -> float:
    """Of a product, in the share of the peak that its size allows."""
    return model.least_ns + 2 * rows * inner * columns / model.flops_per_ns


def _small_ns(model: Model, rows: float, columns: int) -> float:
    return model.least_ns + 3 * rows * columns * model.element_bytes / model.small_gbps


def block(job: Job, tokens: float) -> list[Kernel]:
    """One block's forward for so many tokens; tensor parallel ranks hold a part of each product."""
    model = job.model
    width, wide, rows = model.width, model.width * model.expansion // job.tensor, max(int(tokens), 1)
    own = width // job.tensor

    def gemm(inner: int, columns: int) -> Kernel:
        dims = ((columns,), (rows, inner), (inner, columns))
        return Kernel(
            "aten::addmm",
            "AddmmBackward0",
            _GEMM.format("tn"),
            gemm_ns(model, rows, inner, columns),
            dims,
            inner * columns,
        )

    def small(operator: str, node: str, columns: int, parameter: int = 0) -> Kernel:
        name = _ELEMENTWISE.format(f"at::native::{operator.removeprefix('aten::')}_functor")
        return Kernel(operator, node, name, _small_ns(model, rows, columns), ((rows, columns),), parameter)

    attention = gemm_ns(model, rows, 2 * min(rows, 1024), own)
    kernels = [
        small("aten::native_layer_norm", "NativeLayerNormBackward0", width, width),
        gemm(width, 3 * own),
        Kernel(
            "aten::_flash_attention_forward",
            "ScaledDotProductFlashAttentionBackward0",
            _ATTENTION.format("fwd"),
            attention,
        ),
        gemm(own, width),
        small("aten::native_layer_norm", "NativeLayerNormBackward0", width, width),
        gemm(width, wide),
        small("aten::gelu", "GeluBackward0", wide),
        gemm(wide, width),
    ]
    more = [small("aten::add", "AddBackward0", width) for _ in range(model.small_kernels)]
    return kernels + more


def parameters(job: Job) -> list[int]:
    """Elements of each of one block's parameters, in the order of the forward."""
    return [kernel.parameter for kernel in block(job, 1) if kernel.parameter]


def _block_of(rank: Rank) -> list[Kernel]:
    """A block's forward for this rank's batch."""
    tokens = rank.job.model.tokens * rank.tokens / rank.job.microbatches
    if rank.block[0] != tokens:
        rank.block = tokens, block(rank.job, tokens)
    return rank.block[1]


def forward(rank: Rank, unit: int) -> Waits:
    """A block's forward."""
    cpu = rank.job.cpu
    for index, kernel in enumerate(_block_of(rank)):
        rank.spend(cpu.python_ns)
        with rank.operator(kernel.operator, **_shapes(rank, kernel)):
            rank.spend(cpu.operator_ns)
            yield from rank.kernel(kernel.name, kernel.ns, f"f{unit}.{index}.{rank.micro}")


def backward(rank: Rank, unit: int) -> Iterator[Any]:
    """A block's backward: yields what the machine has to wait for, and ``int`` for each parameter (its index in the
    block) of which the gradient is ready on the stream."""
    cpu = rank.job.cpu
    kernels = _block_of(rank)
    number = sum(kernel.parameter > 0 for kernel in kernels)
    for index, kernel in reversed(list(enumerate(kernels))):
        rank.spend(cpu.engine_ns)
        with rank.operator(f"autograd::engine::evaluate_function: {kernel.node}"), rank.operator(kernel.node):
            is_gemm = kernel.operator == "aten::addmm"
            rank.spend(cpu.engine_ns)
            for part in range(2 if is_gemm else 1):
                name = "aten::mm" if is_gemm else kernel.operator + "_backward"
                with rank.operator(name, **_shapes(rank, kernel, part)):
                    rank.spend(cpu.operator_ns)
                    ns = kernel.ns if is_gemm else 2 * kernel.ns
                    yield from rank.kernel(_backward_name(kernel, part), ns, f"b{unit}.{index}.{part}.{rank.micro}")
        if kernel.parameter:
            number -= 1
            with rank.operator("autograd::engine::evaluate_function: torch::autograd::AccumulateGrad"):
                with rank.operator("torch::autograd::AccumulateGrad"):
                    rank.spend(cpu.engine_ns)
                yield number


def _backward_name(kernel: Kernel, part: int) -> str:
    if kernel.operator == "aten::addmm":
        return _GEMM.format(("nn", "nt")[part])
    return _ATTENTION.format("bwd_dq_dk_dv_loop") if "flash" in kernel.operator else kernel.name


def _shapes(rank: Rank, kernel: Kernel, part: int = -1) -> dict[str, Any]:
    job = rank.job
    if not rank.recording or not job.recording.shapes or not kernel.dims:
        return {}
    dims = [list(dim) for dim in kernel.dims]
    if part >= 0 and len(dims) == 3:
        _, (rows, inner), (_, columns) = kernel.dims
        dims = [[rows, columns], [columns, inner]] if part == 0 else [[inner, rows], [rows, columns]]
    return {
        "Input Dims": dims,
        "Input type": ["c10::BFloat16" if job.model.element_bytes == 2 else "float"] * len(dims),
    }
