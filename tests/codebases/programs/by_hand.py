"""A transformer whose parallelism is written out in collectives, as in picotron and in courses: no wrapper says what
it is. Sizes of the dimensions: ``--dp``, ``--tp``, ``--cp`` (their product is the number of ranks).
"""

import argparse

import torch
import torch.distributed as dist
from log import STEPS, log
from torch import nn
from torch.nn import functional

parser = argparse.ArgumentParser()
for name in ("dp", "tp", "cp"):
    parser.add_argument(f"--{name}", type=int, default=1)
parser.add_argument(
    "--gather", action="store_true", help="context parallelism gathers K and V instead of passing them on"
)
GRADIENTS = ("one for each parameter", "one for all", "DistributedDataParallel")
parser.add_argument("--gradients", choices=GRADIENTS, default=GRADIENTS[0], help="how gradients are all-reduced")
parser.add_argument("--width", type=int, default=128)
parser.add_argument("--layers", type=int, default=4)
parser.add_argument("--length", type=int, default=128)
parser.add_argument("--batch", type=int, default=4)
options = parser.parse_args()

torch.set_num_threads(1)
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
assert world == options.dp * options.tp * options.cp
HEADS = 4


def groups_of(size: int, stride: int):
    """The group of this rank among those of ``size`` ranks that are ``stride`` apart; None for one rank."""
    mine = None
    for first in range(world):
        if (first // stride) % size == 0:
            ranks = [first + stride * each for each in range(size)]
            group = dist.new_group(ranks) if 1 < size < world else None
            if rank in ranks:
                mine = (group, ranks)
    return mine


TP = groups_of(options.tp, 1)
CP = groups_of(options.cp, options.tp)
DP = groups_of(options.dp, options.tp * options.cp)


class Copy(torch.autograd.Function):
    """Identity forward, all-reduce backward: before a column-parallel layer."""

    @staticmethod
    def forward(_, x):
        return x

    @staticmethod
    def backward(_, gradient):
        if options.tp > 1:
            gradient = gradient.contiguous()
            dist.all_reduce(gradient, group=TP[0])
        return gradient


class Reduce(torch.autograd.Function):
    """All-reduce forward, identity backward: after a row-parallel layer."""

    @staticmethod
    def forward(_, x):
        if options.tp > 1:
            x = x.contiguous().clone()
            dist.all_reduce(x, group=TP[0])
        return x

    @staticmethod
    def backward(_, gradient):
        return gradient


def passed_on(tensor: torch.Tensor, back: bool = False) -> torch.Tensor:
    """What the rank before this one in the ring has, which gets this one's (``back``: the other way round)."""
    group, ranks = CP
    place = ranks.index(rank)
    to, source = ranks[(place + 1) % len(ranks)], ranks[place - 1]
    if back:
        to, source = source, to
    received = torch.empty_like(tensor)
    calls = [dist.P2POp(dist.isend, tensor.contiguous(), to, group), dist.P2POp(dist.irecv, received, source, group)]
    for work in dist.batch_isend_irecv(calls):
        work.wait()
    return received


class Passed(torch.autograd.Function):
    @staticmethod
    def forward(_, x):
        return passed_on(x)

    @staticmethod
    def backward(_, gradient):
        return passed_on(gradient, back=True)


class Gathered(torch.autograd.Function):
    """All-gather along the sequence forward, reduce and keep one's part backward."""

    @staticmethod
    def forward(_, x):
        parts = [torch.empty_like(x) for _ in CP[1]]
        dist.all_gather(parts, x.contiguous(), group=CP[0])
        return torch.cat(parts, 2)

    @staticmethod
    def backward(_, gradient):
        gradient = gradient.contiguous()
        dist.all_reduce(gradient, group=CP[0])
        return gradient.chunk(options.cp, 2)[CP[1].index(rank)]


def attention(q, k, v):
    if options.cp == 1:
        return functional.scaled_dot_product_attention(q, k, v)
    if options.gather:
        return functional.scaled_dot_product_attention(q, Gathered.apply(k), Gathered.apply(v))
    scores, values = [], []
    for turn in range(options.cp):
        scores.append(q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5)
        values.append(v)
        if turn < options.cp - 1:
            k, v = Passed.apply(torch.stack((k, v))).unbind(0)
    return torch.cat(scores, -1).softmax(-1) @ torch.cat(values, 2)


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        mine = width // options.tp
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.qkv, self.out = nn.Linear(width, 3 * mine), nn.Linear(mine, width, bias=False)
        self.up, self.down = nn.Linear(width, 4 * mine), nn.Linear(4 * mine, width, bias=False)

    def forward(self, x):
        batch, length, _ = x.shape
        q, k, v = (
            each.view(batch, length, HEADS // options.tp, -1).transpose(1, 2)
            for each in self.qkv(Copy.apply(self.norms[0](x))).chunk(3, -1)
        )
        x = x + Reduce.apply(self.out(attention(q, k, v).transpose(1, 2).reshape(batch, length, -1)))
        return x + Reduce.apply(self.down(functional.gelu(self.up(Copy.apply(self.norms[1](x))))))


torch.manual_seed(0)
model = nn.Sequential(
    nn.Embedding(256, options.width),
    *(Block(options.width) for _ in range(options.layers)),
    nn.Linear(options.width, 256),
)
wrapped = options.gradients == "DistributedDataParallel"
if wrapped:
    model = nn.parallel.DistributedDataParallel(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
torch.manual_seed(rank // (options.tp * options.cp))
for _ in range(STEPS):
    optimizer.zero_grad()
    tokens = torch.randint(0, 256, (options.batch, options.length + 1))
    inputs, targets = tokens[:, :-1], tokens[:, 1:]
    place = CP[1].index(rank)
    inputs, targets = inputs.chunk(options.cp, 1)[place], targets.chunk(options.cp, 1)[place]
    loss = functional.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
    loss.backward()
    for group, ranks in (DP, CP):
        gradients = [each.grad for each in model.parameters()] if len(ranks) > 1 and not wrapped else []
        if options.gradients == "one for all" and gradients:
            flat = torch._utils._flatten_dense_tensors(gradients)
            dist.all_reduce(flat, group=group)
            flat.div_(len(ranks))
            torch._foreach_copy_(gradients, torch._utils._unflatten_dense_tensors(flat, gradients))
        else:
            for gradient in gradients:
                dist.all_reduce(gradient, group=group)
                gradient.div_(len(ranks))
    optimizer.step()
    log(loss.item())
dist.destroy_process_group()
