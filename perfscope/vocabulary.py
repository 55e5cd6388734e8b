"""The names that collectors write into a recording and analyzers look for: one vocabulary, stated once.

Every range is written both as a profiler annotation and as an NVTX range, so that a Chrome trace and an Nsight Systems
report of the same run carry the same names.
"""

from __future__ import annotations

from typing import Final

DATALOADER: Final = "perfscope::dataloader"
"""The training loop is inside a data loader's ``__next__``."""

FORWARD: Final = "perfscope::forward"
"""The outermost module's forward."""

BACKWARD: Final = "perfscope::backward"
"""``torch.autograd.backward`` from call to return."""

COMMUNICATION: Final = "perfscope::communication"
"""A ``torch.distributed`` collective called from Python."""

OPTIMIZER: Final = "perfscope::optimizer"
"""The outermost ``Optimizer.step`` (or the engine's own step)."""

RANGES: Final = (DATALOADER, FORWARD, BACKWARD, COMMUNICATION, OPTIMIZER)

NVTX_STEP_PREFIX: Final = "perfscope::step#"
"""NVTX range of one training step; Chrome traces carry torch's own ``ProfilerStep#N``."""

NVTX_RANK_PREFIX: Final = "perfscope::rank#"
"""NVTX mark or range in which a process says which rank it is, ``perfscope::rank#3 of 8`` (`` of 8`` may be left
out): one Nsight Systems report may hold many processes, and records the environment of its own process only."""

PROFILER_STEP_PREFIX: Final = "ProfilerStep#"
"""torch.profiler's annotation of one training step; N is the job's own step number under ``perfscope run``."""
