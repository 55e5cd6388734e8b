"""The names that collectors write into a recording and analyzers look for: one vocabulary, stated once.

Every range is written both as a profiler annotation and as an NVTX range, so that a Chrome trace and an Nsight Systems
report of the same run carry the same names.
"""

from __future__ import annotations

from typing import Final

DATALOADER: Final = "perfscope::dataloader"
"""The training loop is inside a data loader's ``__next__``."""

DATALOADER_START: Final = "perfscope::dataloader_start"
"""A data loader makes an iterator: it starts its workers, or gives those that persist a new epoch."""

DATALOADER_STOP: Final = "perfscope::dataloader_stop"
"""A data loader's iterator stops its workers: its epoch has ended, or the script has let go of it."""

DATALOADER_SAMPLER: Final = "perfscope::dataloader_sampler"
"""A data loader's sampler draws the indices of a batch, on the training thread, however many workers there are."""

FORWARD: Final = "perfscope::forward"
"""The outermost module's forward."""

EVALUATION: Final = "perfscope::evaluation"
"""The outermost module's forward in evaluation mode and without gradients: not training."""

NO_GRADIENTS: Final = "perfscope::forward_without_gradients"
"""The outermost module's forward in training mode and without gradients, outside a backward: a rollout, for example."""

BACKWARD: Final = "perfscope::backward"
"""``torch.autograd.backward`` from call to return."""

COMMUNICATION: Final = "perfscope::communication"
"""A ``torch.distributed`` collective called from Python."""

OPTIMIZER: Final = "perfscope::optimizer"
"""The outermost ``Optimizer.step`` (or the engine's own step)."""

GARBAGE_COLLECTION: Final = "perfscope::gc"
"""The interpreter collects garbage, on whichever thread's turn it was; not its youngest generation's collections."""

RANGES: Final = (
    DATALOADER, DATALOADER_START, DATALOADER_STOP, DATALOADER_SAMPLER, FORWARD, EVALUATION, NO_GRADIENTS, BACKWARD,
    COMMUNICATION, OPTIMIZER,
)  # fmt: skip

COLLECTIVE_PREFIX: Final = "perfscope::collective#"
"""Range around the operator ``c10d::*`` that issues a collective or message of a job without accelerators, on the
thread that issues it: ``perfscope::collective#KIND|GROUP|SIZE|SEQUENCE|PEER|DTYPE|BYTES``, a field empty where not
known::

    perfscope::collective#all_reduce|0|4|17||float32|288
    perfscope::collective#send|3|2|5|1|float32|4096

GROUP is the name that ``distributedInfo`` lists with the group's ranks, SIZE their number. SEQUENCE counts from the
beginning of the capture's warm-up: collectives within the group, messages within (group, sender, receiver, tag), so
that both sides of a message count alike. PEER is the other side's global rank. BYTES follow nccl-tests: the larger
buffer for all-gather, reduce-scatter, gather and scatter, else the input."""

PIPELINE_PREFIX: Final = "perfscope::pipeline#"
"""Range around one stage's work on one micro-batch, ``perfscope::pipeline#PHASE|STAGE|MICROBATCH``, both from 0::

    perfscope::pipeline#forward|1|0
    perfscope::pipeline#backward|1|0

PHASE may also be ``backward_input`` and ``backward_weight``, the halves of a backward that a schedule takes apart."""

GATHER: Final = "perfscope::gather"
"""A framework gathers the parts of parameters (or of updated weights) that ranks hold, from call to return: DeepSpeed's
ZeRO. torch's own FSDP leaves ranges of its own name."""

REDUCE: Final = "perfscope::reduce"
"""A framework's own code reduces gradients between ranks: DeepSpeed's buckets, Horovod's wait for its all-reduces."""

CHECKPOINT: Final = "perfscope::save_checkpoint"
"""A framework saves a checkpoint, or the whole of its training state; or the script calls ``torch.save`` or
``torch.distributed.checkpoint``."""

MEGATRON_TIMER_PREFIX: Final = "megatron::"
"""Range between a Megatron timer's start and its stop, followed by the timer's name: ``megatron::forward-compute``."""

NVTX_STEP_PREFIX: Final = "perfscope::step#"
"""NVTX range of one training step; Chrome traces carry torch's own ``ProfilerStep#N``."""

NVTX_RANK_PREFIX: Final = "perfscope::rank#"
"""NVTX mark or range with the rank of a process, ``perfscope::rank#3 of 8`` (`` of 8`` may be left
out): one Nsight Systems report may hold many processes, and records the environment of its own process only."""

PROFILER_STEP_PREFIX: Final = "ProfilerStep#"
"""torch.profiler's annotation of one training step; N is the job's own step number under ``perfscope run``."""
