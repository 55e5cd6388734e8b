"""What a kernel does (its class) and how it multiplies (type, tensor cores), by its operator and its name.

The operator decides first: it is what the framework asked for. The kernel's name is what ran.
"""

from __future__ import annotations

import functools
import re
from typing import Final

from perfscope.frozen import dataclass

MATRIX, ATTENTION, CONVOLUTION = "matrix", "attention", "convolution"
NORMALISATION, ELEMENTWISE, REDUCTION = "normalisation", "elementwise", "reduction"
OPTIMIZER, EMBEDDING, COMMUNICATION = "optimizer", "embedding", "communication"
COPY, MEMSET, OTHER = "copy", "memset", "other"

PRODUCTS: Final = (MATRIX, ATTENTION, CONVOLUTION)
"""Classes whose work is counted in FLOPs."""

OPERATORS: Final = (
    (OPTIMIZER, r"^Optimizer\.step#|_fused_(adam|sgd|adagrad)|^aten::_foreach_|FusedAdam|multi_tensor"),
    (ATTENTION, r"scaled_dot_product|_attention|flash_attn|FlashAttn|fmha|xformers|flex_attention"),
    (CONVOLUTION, r"conv(olution|_transpose|_depthwise|[123]d)|Convolution"),
    (EMBEDDING, r"^aten::_?embedding|EmbeddingBackward|embedding_bag|split_embedding|fbgemm::\w*lookup"),
    (NORMALISATION, r"(batch|layer|group|instance|rms|weight)_?norm|softmax"),
    (MATRIX, r"^aten::(_?addmm\w*|mm|bmm|baddbmm_?|addbmm_?|matmul|linear|mv|addmv_?|dot|_int_mm|_grouped_mm)$"),
    (
        MATRIX,
        r"^aten::(_scaled_(grouped_)?mm(_v2)?|einsum|bilinear|_trilinear|_cudnn_rnn|miopen_rnn|mkldnn_rnn|lstm|gru)",
    ),
)
"""Classes by the name of an operator or of one around it, the first that matches; as the dispatcher spells them."""

KERNELS: Final = (
    (ATTENTION, r"flash_(fwd|bwd)|FlashAttn|fmha|attn_(fwd|bwd)|flash_attention|_sdpa_|flex_attention|attention"),
    # FlashAttention, xFormers/CUTLASS fmha, AOTriton (attn_fwd), cuDNN (…_sdpa_…), Triton templates.
    (COPY, r"[nN](chw|hwc)To[nN](hwc|chw)|[nN]cdhwTo|[nN]dhwcTo"),
    # cuDNN's changes of layout around its convolutions.
    (
        CONVOLUTION,
        (
            r"fprop|dgrad|wgrad|conv(?!er)|Conv(?!er)|winograd|Winograd|_[hsi]\d*cudnn_|im2col|fft2d_[rc]2[rc]"
            r"|bwd_weight|igemm_[fbw][wr]"
        ),
    ),
    # cuDNN (volta_scudnn_…, turing_h1688cudnn_…: type, instruction, cudnn), CUTLASS, MIOpen (igemm_…, naive_conv,
    # miopenSp3AsmConv, gridwise_convolution), Composable Kernel (grouped_conv, …_bwd_weight).
    (COMMUNICATION, r"^nccl|nvshmem"),
    (
        NORMALISATION,
        (
            r"soft_?[mM]ax|Soft_?[mM]ax|layer_?[nN]orm|group_?[nN]orm|Group_?[nN]orm|batch_?[nN]orm|Batch_?[nN]orm"
            r"|rms_?[nN]orm|norm_[fb]wd|bn_[fb]w_|RowwiseMoments|GammaBeta|welford"
        ),
    ),
    (OPTIMIZER, r"multi_tensor_apply|adam|sgd_kernel|lamb_"),
    (EMBEDDING, r"embedding|indexSelect|split_tbe|pooled_embs|bounds_check_indices"),
    (MATRIX, r"^C[a-z]{3}_A[a-z]{3}_B[a-z]{3}|^Custom_C[a-z]{3}_"),
    # Tensile, in rocBLAS and hipBLASLt.
    (
        MATRIX,
        r"gemm(?<!fbgemm)|gemv|nvjet|xmma|wgmma|cutlass.*(Kernel|gemm)|dot_kernel|triton_tem_fused_\w*mm|matmul|arlin",
    ),
    # cuBLAS, cuBLASLt (nvjet), CUTLASS, Composable Kernel, Marlin; inductor's templates.
    (COPY, r"direct_copy_kernel|copy_kernel_cuda|CatArrayBatchedCopy|batched_transpose|transpose|_copy_kernel"),
    (REDUCTION, r"reduce|Reduce|triton_(red|per)_|cub::|arg_?m(in|ax)|cumsum|Sort"),
    (ELEMENTWISE, r"element[wW]ise|epilogue::|triton_poi_|fill|Fill|index_|scatter|gather|dropout|SubTensorOp"),
)
"""Classes by a kernel's name, the first that matches. Patterns begin with a letter where they can: Python finds these
in long names several times as fast. The names are those of PyTorch's native kernels (aten/src/ATen/native/cuda), of
inductor (triton_poi pointwise, triton_red and triton_per reductions), and of the libraries named beside each.
"""

_ARITHMETIC: Final = (
    "add|sub|rsub|mul|div|neg|abs|pow|r?sqrt|exp|log|sin|cos|tanh|sigmoid|silu|gelu|(leaky_)?relu|elu|clamp|clamp_m(in|ax)"
    "|where|fill|zero|addc(mul|div)|lerp|threshold|(native_)?dropout|bernoulli|masked_fill|eq|ne|lt|gt|le|ge|sgn|softplus"
    "|hardtanh|mse_loss|square"
)
ALONE: Final = (
    (COMMUNICATION, r"^(c10d|_c10d_functional|c10d_functional|symm_mem)::|^record_param_comms$"),
    (
        REDUCTION,
        r"^aten::(a?(max|min)|arg(max|min)|sum|mean|prod|var|std|(linalg_vector_)?norm|any|all|cumsum|topk|sort)$",
    ),
    (ELEMENTWISE, rf"^aten::({_ARITHMETIC})(_backward)?_?$"),
)
"""Classes of operators that launch nothing, as on a host: there is no kernel's name to look at."""

_INDUCTOR: Final = re.compile(r"^triton_(poi|red|per)_")
"""Inductor names a kernel after all operators that it has a part of, such as the bias after a convolution; its products
are other kernels."""

_COPY_OPERATOR: Final = re.compile(r"^aten::(copy_|_to_copy|clone|contiguous|cat)$")
_OPERATORS: Final = tuple((kind, re.compile(pattern)) for kind, pattern in OPERATORS)
_ALONE: Final = tuple((kind, re.compile(pattern)) for kind, pattern in ALONE)
_KERNELS: Final = tuple((kind, re.compile(pattern)) for kind, pattern in KERNELS)
_NO_PRODUCTS: Final = tuple((kind, pattern) for kind, pattern in _KERNELS if kind not in PRODUCTS)


@functools.lru_cache(maxsize=1 << 16)
def class_of_operator(name: str) -> str | None:
    """The class of what an operator launches; None where its name does not decide it."""
    return next((kind for kind, pattern in _OPERATORS if pattern.search(name)), None)


def class_alone(operator: str) -> str:
    """The class of an operator that launches nothing, by its name; ``other`` where that does not decide it."""
    if copies(operator):
        return COPY
    return class_of_operator(operator) or next((kind for kind, pattern in _ALONE if pattern.match(operator)), OTHER)


def copies(operator: str) -> bool:
    """Whether an operator of this name only moves data from one place or layout to another."""
    return _COPY_OPERATOR.match(operator) is not None


@functools.lru_cache(maxsize=1 << 16)
def class_of_kernel(name: str) -> str:
    """The class of a kernel by its name alone; ``other`` where that does not decide it."""
    kernels = _NO_PRODUCTS if _INDUCTOR.match(name) else _KERNELS
    return next((kind for kind, pattern in kernels if pattern.search(name)), OTHER)


@dataclass(frozen=True)
class Precision:
    """How a kernel multiplies, as far as its name shows; None where it does not show."""

    dtype: str | None
    """torch's name of the factors' type, or ``tf32``."""
    tensor_cores: bool | None


_UNKNOWN_PRECISION: Final = Precision(None, None)
_NVJET: Final = {"h": "float16", "t": "bfloat16", "s": "tf32", "q": "float8_e4m3fn", "r": "float8_e5m2", "d": "float64"}
_TENSILE: Final = {"B": "bfloat16", "H": "float16", "S": "float32", "D": "float64", "F8": "float8_e4m3fn", "X": "tf32"}
_WORDS: Final = tuple(
    (re.compile(pattern), dtype)
    for pattern, dtype in (
        (r"bf16|bfloat16|BFloat16", "bfloat16"),
        (r"tf32", "tf32"),
        (r"e4m3|(?<![a-z0-9])fp8", "float8_e4m3fn"),
        (r"e5m2", "float8_e5m2"),
        (r"(?<![a-z0-9])fp?16(?=[a-z0-9]*(_|$))|half|Half|hgemm|_h(16816|1688|884)", "float16"),
        (r"(?<![a-z0-9])u?int8|(?<![a-z0-9])[is]8(?=[a-z0-9]*(_|$))|_i(16832|8816)|imma", "int8"),
        (r"dgemm|(?<![a-z0-9])f64|double(?!_buffer)|_d884", "float64"),
        (r"f32|fp32|sgemm|scudnn|float", "float32"),
    )
)
"""Types as CUTLASS, cuBLAS, cuDNN, MIOpen and template arguments write them, the narrowest first: an accumulator of
single precision stands in the name of every kernel."""
_TENSOR: Final = re.compile(
    r"tensorop|[hisd](884|1688|8816|16816|16832|16864|161616)|[hi]mma|wgmma|[gG]mma|warpgroup|tensor\d+x\d+x\d+|tcgen05"
    r"|flash_(fwd|bwd)|fmha_cutlass[FB]_(bf16|f16)\w*_sm[789]|fmha_cutlass[FB]_f32\w*_sm[89]"
)
"""Marks of tensor-core instructions: CUTLASS' tensorop and shapes such as s16816 (m16n8k16, single accumulator), xmma's
tensor16x8x8, Hopper's warp groups; FlashAttention and xFormers' attention, which have no other form there."""
_MATRIX_CORE: Final = re.compile(r"xdl|mfma|_gtcx")
"""Marks of AMD's matrix instructions in Composable Kernel (XDL) and MIOpen (gtcx)."""
_NO_TENSOR: Final = re.compile(
    r"simt|^(maxwell|volta|turing|ampere)_(fp16_)?([sd]gemm)|_ffma_|gemv|gemmSN|gemmk1|magma_[sd]gemm|[sd]gemm_largek"
    r"|_scudnn_|convolve_sgemm|(dgrad|wgrad|fprop)\w*_engine|cudnn::winograd|fmha_cutlass[FB]_f32\w*_sm[567]"
)


@functools.lru_cache(maxsize=1 << 16)
def precision(name: str) -> Precision:
    """Type and tensor-core use of a kernel that does products, by its name."""
    for read in (_tensile, _nvjet, _plain):
        if (known := read(name)) is not None:
            return known
    return _UNKNOWN_PRECISION


def _nvjet(name: str) -> Precision | None:
    """Types in cuBLASLt's ``nvjet_[sm90_]tst_128x64_…``: of A (and B, where they differ), accumulator, output."""
    match = re.match(r"nvjet_(?:sm\d+_)?([hstqrd])[hstqrd]{2,4}_", name)
    return Precision(_NVJET[match[1]], True) if match else None


def _tensile(name: str) -> Precision | None:
    """Tensile's ``Cijk_Alik_Bljk_BBS_BH_…_MT128x64x32_MI16x16x1_…``: input, output and compute type; MI, if not all 0,
    is the shape of the matrix instruction; ``MX`` computes single precision as xf32.
    """
    match = re.match(r"(?:Custom_)?C[a-z]{3}_A[a-z]{3}_B[a-z]{3}_(F8|B8|4x|[BHSDX])(_MX)?", name)
    if match is None:
        return None
    instruction = re.search(r"_MI(\d+)x", name)
    tensor = instruction[1].strip("0") != "" if instruction else None
    if match[2]:
        return Precision("tf32", True)
    return Precision({**_TENSILE, "B8": "float8_e5m2"}.get(match[1]), tensor)


def _plain(name: str) -> Precision | None:
    """Types and instructions written out."""
    dtype = next((dtype for pattern, dtype in _WORDS if pattern.search(name)), None)
    if _NO_TENSOR.search(name):
        return Precision(dtype, False)
    if _MATRIX_CORE.search(name):
        return Precision(dtype, True)
    if _TENSOR.search(name):
        # NVIDIA's tensor cores take single precision as TF32 only.
        return Precision("tf32" if dtype in (None, "float32") and _is_single(name) else dtype, True)
    return Precision(dtype, None) if dtype is not None else None


def _is_single(name: str) -> bool:
    return re.search(r"s1688|tensor16x8x8|f32", name) is not None
