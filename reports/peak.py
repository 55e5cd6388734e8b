"""The peak that MFU is held against, in words."""

from __future__ import annotations

from typing import Final

from perfscope.summary import Utilisation

_ALL_BUT: Final = 0.99
"""Share of the FLOPs from which one type stands for all."""


def peak_type(utilisation: Utilisation) -> str:
    """The type of the peak: ``bfloat16``, or ``mixed, mostly tf32`` where products ran in several types."""
    dtype = utilisation.dtype or ""
    mixed = dtype and utilisation.flops_by_dtype.get(dtype, 1.0) < _ALL_BUT
    return f"mixed, mostly {dtype}," if mixed else dtype
