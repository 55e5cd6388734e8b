"""The models of the acceptance run, and their FLOPs written down by hand."""

# No ``from __future__ import annotations``: torch looks at annotations at run time in places.
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint

from tests.gpu.setups import Setup

VOCABULARY = 1024
HEAD = 64
CHANNELS = 64


class Attention(nn.Module):
    """A pre-norm transformer layer with causal self-attention."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.heads = max(1, width // HEAD)
        self.norm, self.norm_mlp = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.qkv(self.norm(x)).chunk(3, dim=-1)
        )
        attended = scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        out: Tensor = x + self.mlp(self.norm_mlp(x))
        return out


class Residual(nn.Module):
    """Two convolutions with a residual."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for _ in range(2):
            layers += [nn.Conv2d(channels, channels, 3, padding=1, bias=False), nn.BatchNorm2d(channels), nn.ReLU()]
        self.inner = nn.Sequential(*layers)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.inner(x)
        return out


class Small(nn.Module):
    """Several tiny kernels."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layer, self.norm = nn.Linear(width, width), nn.LayerNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + torch.tanh(self.norm(self.layer(x)) * 0.5 + 0.1)
        return out


class Network(nn.Module):
    """Blocks between an entry and a head; the first ``reads`` blocks are followed by a value read from the device."""

    def __init__(self, setup: Setup, entry: nn.Module, blocks: list[nn.Module], head: nn.Module) -> None:
        super().__init__()
        self.entry, self.blocks, self.head = entry, nn.ModuleList(blocks), head
        self.reads, self.recompute = setup.reads, setup.checkpoint

    def forward(self, inputs: Tensor) -> Tensor:
        x: Any = self.entry(inputs)
        for number, block in enumerate(self.blocks):
            x = checkpoint(block, x, use_reentrant=False) if self.recompute else block(x)
            if number < self.reads and x.detach().mean().item() != x.detach().mean().item():
                raise FloatingPointError(f"block {number}")  # what users read values for
        out: Tensor = self.head(x)
        return out


def network(setup: Setup) -> Network:
    """The setup's model, on the CPU. Its logits have the classes last."""
    if setup.model == "conv":
        entry: nn.Module = nn.Conv2d(3, CHANNELS, 3, padding=1, bias=False)
        blocks: list[nn.Module] = [Residual(CHANNELS) for _ in range(setup.layers)]
        head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(CHANNELS, 10))
        return Network(setup, entry, blocks, head)
    block = Small if setup.model == "small" else Attention
    head = nn.Sequential(nn.LayerNorm(setup.width), nn.Linear(setup.width, VOCABULARY, bias=False))
    stack: list[nn.Module] = [block(setup.width) for _ in range(setup.layers)]
    return Network(setup, nn.Embedding(VOCABULARY, setup.width), stack, head)


def stage_of(model: Network, rank: int, ranks: int) -> nn.Module:
    """A rank's share of the model, as a stage of a pipeline."""
    size = len(model.blocks) // ranks
    until = len(model.blocks) if rank == ranks - 1 else (rank + 1) * size
    blocks = list(model.blocks)[rank * size : until]
    return nn.Sequential(*[model.entry] * (rank == 0), *blocks, *[model.head] * (rank == ranks - 1))


def by_hand(setup: Setup) -> float:
    """Model FLOPs of one step's matrix products: 2 per multiplication, three times the forward's for both passes.

    Attention is counted in full (not halved for the causal mask), like PaLM's appendix B. The first layer's input needs
    no gradient: an embedding multiplies nothing, and a first convolution's backward is of its weights alone.
    """
    if setup.model == "conv":
        pixels = setup.batch * setup.context**2
        inner = setup.layers * 2 * 2 * 9 * CHANNELS**2 * pixels
        first = 2 * 9 * 3 * CHANNELS * pixels
        return 3.0 * inner + 2.0 * first + 3.0 * 2 * CHANNELS * 10 * setup.batch
    tokens = setup.batch * setup.context
    head = 2 * setup.width * VOCABULARY * tokens
    if setup.model == "small":
        return 3.0 * (setup.layers * 2 * setup.width**2 * tokens + head)
    per_layer = 2 * 12 * setup.width**2 * tokens + 2 * 2 * setup.width * setup.context * tokens
    return 3.0 * (setup.layers * per_layer + head)


def again_by_hand(setup: Setup) -> float:
    """The same of transformer blocks that are checkpointed: one more forward of each, without its last product."""
    tokens = setup.batch * setup.context
    again = 2 * 8 * setup.width**2 * tokens + 2 * 2 * setup.width * setup.context * tokens
    return by_hand(setup) + setup.layers * again
