"""Translates the names in an Nsight Systems export to those of torch.profiler's Chrome traces."""

from __future__ import annotations

import json
import re
from functools import lru_cache
from typing import Final, NamedTuple

from perfscope.recording.vocabulary import NVTX_RANK_PREFIX
from perfscope.trace.trace import Category

_EMITTED: Final = re.compile(r", (?:seq|op_id|sizes) = ")
_SEQUENCE: Final = ", seq"
_SIZES: Final = ", sizes = "
_INPUTS: Final = ", input_op_ids = "
"""What torch's ``emit_nvtx`` appends to a name: torch/csrc/profiler/util.cpp, ``getNvtxStr``."""

_OPERATOR: Final = re.compile(
    r"^(?:aten|prims?|c10d|_?c10d_functional|torch|torchvision|torchaudio|quantized|inductor|symm_mem|autograd::engine)::"
)
"""Namespaces of torch's own operators: such ranges are operators, whatever recorded them."""

_NAMESPACED: Final = re.compile(r"^(?!perfscope::)[a-z_][a-z0-9_]*::[a-z_]\w*(?:\.\w+)?$")
"""Operators of any library, as ``emit_nvtx`` names them; user ranges such as ``FSDP::pre_forward`` do not match."""

_PLAIN: Final = re.compile(r"^(?:record_param_comms|detach_?|\w+Backward\d*)$")
"""Operators without a namespace."""

_API_VERSION: Final = re.compile(r"(?:_v\d{4,})?$")
_PER_THREAD: Final = re.compile(r"_pt(?:sz|ds)$")

_RANK: Final = re.compile(rf"^{re.escape(NVTX_RANK_PREFIX)}(\d{{1,6}})(?: of (\d{{1,6}}))?$")

_COPY_KINDS: Final = {
    1: "HtoD", 2: "DtoH", 3: "HtoA", 4: "AtoH", 5: "AtoA", 6: "AtoD", 7: "DtoA", 8: "DtoD", 9: "HtoH", 10: "PtoP",
    11: "HtoD", 12: "DtoH", 13: "DtoD",
}  # fmt: skip
"""ENUM_CUDA_MEMCPY_OPER -> kineto's word for it; 11 to 13 are migrations of unified memory."""

_MEMORY_KINDS: Final = {0: "Pageable", 1: "Pinned", 2: "Device", 3: "Array", 4: "Managed", 5: "Device", 6: "Managed"}
"""ENUM_CUDA_MEM_KIND -> kineto's word for it."""

_SYNC_KINDS: Final = {1: "Event Sync", 2: "Stream Wait Event", 3: "Stream Sync", 4: "Context Sync"}
"""ENUM_CUPTI_SYNC_TYPE -> kineto's word for it."""


class Range(NamedTuple):
    """An NVTX range. ``shapes`` is the JSON text of an operator's input dimensions; empty: not recorded."""

    name: str
    category: Category
    shapes: str = ""


def range_of(text: str) -> Range:
    """``aten::mm, seq = 12, op_id = 4, sizes = [[2, 3], [3, 4]]`` is operator ``aten::mm`` on ``[[2,3],[3,4]]``."""
    match = _EMITTED.search(text)
    if match is None:
        return _plain(text)
    at = match.start()
    sizes = text.find(_SIZES, at)
    if sizes < 0:
        return _emitted(text[:at], text.startswith(_SEQUENCE, at), "")
    shapes = text[sizes + len(_SIZES) :].partition(_INPUTS)[0]
    return _emitted(text[:at], text.startswith(_SEQUENCE, at), shapes)


# A report has millions of ranges, each with a number of its own, but few names and shapes.
@lru_cache(maxsize=1 << 14)
def _plain(name: str) -> Range:
    return Range(name, Category.CPU_OP if _OPERATOR.match(name) else Category.ANNOTATION)


@lru_cache(maxsize=1 << 16)
def _emitted(name: str, in_autograd: bool, sizes: str) -> Range:
    # Only operators of autograd have a sequence number; a record_function of the user never does.
    if not in_autograd and not any(kind.match(name) for kind in (_OPERATOR, _NAMESPACED, _PLAIN)):
        return Range(name, Category.ANNOTATION)
    try:
        shapes = json.dumps(json.loads(sizes), separators=(",", ":")) if sizes else ""
    except ValueError:  # cut short: NVTX limits the length of a message
        shapes = ""
    return Range(name, Category.CPU_OP, shapes)


def rank_of(text: str) -> tuple[int, int | None] | None:
    """(rank, world size or None) of a range or mark that names its process's rank; None for any other."""
    match = _RANK.match(text)
    return None if match is None else (int(match[1]), int(match[2]) if match[2] else None)


def call_of(text: str) -> str:
    """The runtime call: ``cudaLaunchKernel_ptsz_v7000`` is ``cudaLaunchKernel``."""
    return _PER_THREAD.sub("", _API_VERSION.sub("", text))


def copy_of(kind: int, source: int, target: int) -> str:
    """A copy as kineto names it: ``Memcpy HtoD (Pinned -> Device)``; the memories are left out where not recorded."""
    name = f"Memcpy {_COPY_KINDS.get(kind, 'Unknown')}"
    ends = [_MEMORY_KINDS.get(memory) for memory in (source, target)]
    return f"{name} ({ends[0]} -> {ends[1]})" if all(ends) else name


def fill_of(memory: int) -> str:
    """A memset as kineto names it: ``Memset (Device)``."""
    return f"Memset ({_MEMORY_KINDS.get(memory, 'Unknown')})"


def sync_of(kind: int) -> str:
    """A synchronisation as kineto names it."""
    return _SYNC_KINDS.get(kind, "Sync")
