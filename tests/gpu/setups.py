"""How the training of the acceptance run is run."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Setup:
    """One way of running the training. The defaults keep a data-centre GPU busy."""

    model: str = "transformer"
    """``transformer``: tokens, causal attention; ``conv``: images of ``context`` pixels a side; ``small``: a stack of
    layers so small that launching their kernels takes longer than running them."""
    strategy: str = "none"
    """``none``, ``ddp``, ``fsdp2``, ``zero2`` (DeepSpeed) or ``pipeline`` (a stage for each rank, 1F1B)."""
    batch: int = 16
    width: int = 1024
    layers: int = 8
    context: int = 512
    precision: str = "bf16"
    """``fp32``, ``tf32`` or ``bf16`` (autocast)."""
    channels_last: bool = False
    pinned: bool = True
    """Batches lie in pinned memory and are copied with ``non_blocking``."""
    reads: int = 0
    """How often a step reads a value from the device, as ``loss.item()`` does: in the first so many layers."""
    optimizer: str = "fused"
    """AdamW's implementation: ``for-loop``, ``foreach`` or ``fused``."""
    checkpoint: bool = False
    """Activations are computed again in the backward."""
    compile: str = ""
    """Mode of ``torch.compile``; empty: not compiled."""
    graph: bool = False
    """Forward and backward are CUDA graphs, by ``torch.cuda.make_graphed_callables``."""
    load_ms: float = 0.0
    """A batch takes this long to load, asleep: as from a remote disk."""
    workers: int = 2
    side_stream: bool = False
    """Train on a stream other than the default one."""
    slow_ms: float = 0.0
    """Rank 1 sleeps this long in each step."""
    oom_at: int = -1
    """In this step more memory is asked for than there is."""
    oom_caught: bool = True
    """The error is caught, and the training goes on."""
    count_flops: bool = False
    fitted: bool = False
    """It is already as the place can run it."""
