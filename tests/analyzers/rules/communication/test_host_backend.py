"""Another backend for collectives of tensors on devices."""

from __future__ import annotations

import pytest

from perfscope.analyzers.rules.communication import host_backend, nccl_environment
from tests.analyzers.rules.jobs import breakdown, changed, context

H100 = ("NVIDIA H100 80GB HBM3",)


def job(transfer: float = 30_000.0, *, on_host: bool = True, devices: tuple[str, ...] = H100):
    return changed(context(breakdown(0, exposed_comm_transfer=transfer), devices=devices), collectives_on_host=on_host)


def test_the_bound_is_the_exposed_transfer():
    finding = host_backend.evaluate(job())
    assert finding is not None
    assert finding.ceiling == pytest.approx(100 / 70 - 1)
    assert finding.action.new == '"nccl"'
    assert nccl_environment.evaluate(job()) is None


@pytest.mark.parametrize(
    "silent",
    [job(on_host=False), job(devices=("CPU",)), job(devices=("AMD Instinct MI300X",)), job(transfer=4_000.0)],
    ids=["NCCL's kernels", "CPUs", "no NCCL", "overlapped"],
)
def test_silent(silent):
    assert host_backend.evaluate(silent) is None
