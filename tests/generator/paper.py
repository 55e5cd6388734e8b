"""Jobs small enough to be worked out on paper."""

from __future__ import annotations

import dataclasses

from tests.generator.parts import HostSpec, LoaderSpec, ModelSpec, NetworkSpec
from tests.generator.spec import JobSpec

PAPER = JobSpec(
    ranks=2,
    steps=3,
    warmup=1,
    model=ModelSpec(
        layers=1, tokens=10, width=10, hidden=10, flops_per_ns=20.0, small_kernel_ns=10, optimizer_kernel_ns=20
    ),
    host=HostSpec(operator_ns=0, launch_ns=0, event_ns=0, python_ns=0, sync_return_ns=0),
    loader=LoaderSpec(workers=1, load_ns=0, next_ns=0),
    network=NetworkSpec(alpha_ns=50, busbw_gbps=4.0),
    bucket_bytes=200,
    first_bucket_bytes=1_000,
    copy_ns=5,
)
"""Matrix products of 100 ns (2 x 10 x 10 x 10 operations at 20 per ns), two weights of 100 elements of 2 bytes, one
bucket each, reduced over two ranks in 50 + 200 x 1 / 4 = 100 ns; the host costs nothing."""

BALANCED = dataclasses.replace(
    PAPER,
    strategy="pipeline",
    pipeline=2,
    microbatches=2,
    model=dataclasses.replace(PAPER.model, layers=2, small_kernel_ns=0, optimizer_kernel_ns=0),
    network=NetworkSpec(alpha_ns=50, busbw_gbps=float("inf")),
    copy_ns=0,
)
"""A pipeline of nothing but matrix products, one layer per stage: a forward takes 200 ns, a backward 400, a send 50."""


def present(categories: dict[str, int]) -> dict[str, int]:
    """Rows that hold anything."""
    return {category: ns for category, ns in categories.items() if ns}
