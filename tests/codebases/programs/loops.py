"""Loops of one's own: ``gan`` (two DDP models), ``lbfgs`` (closures), ``compiled`` (nanoGPT: a compiled model with
accumulation), ``ddp``, ``slow_rank`` (``ddp`` whose rank 1 sleeps), ``fsdp`` (fully_shard), ``pipeline`` (1F1B).
"""

import sys
import time

import torch
import torch.distributed as dist
from log import STEPS, log
from tiny import Tokens, mlp
from torch import nn
from torch.nn.parallel import DistributedDataParallel

how = sys.argv[1]
torch.set_num_threads(1)
dist.init_process_group("gloo")
rank = dist.get_rank()


class GPT(nn.Module):
    """nanoGPT's shape, with torch's layers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words = nn.Embedding(512, 128)
        layer = {"dim_feedforward": 512, "dropout": 0.0, "batch_first": True, "norm_first": True}
        self.blocks = nn.ModuleList(nn.TransformerEncoderLayer(128, 4, **layer) for _ in range(3))
        self.head = nn.Linear(128, 512, bias=False)

    def forward(self, tokens, targets):
        x = self.words(tokens)
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1])
        for block in self.blocks:
            x = block(x, src_mask=mask, is_causal=True)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), targets.flatten())


def gan() -> None:
    maker, judge = DistributedDataParallel(mlp(64, 2)), DistributedDataParallel(mlp(64, 2), broadcast_buffers=False)
    of_maker, of_judge = torch.optim.Adam(maker.parameters()), torch.optim.Adam(judge.parameters())
    torch.manual_seed(rank)
    for _ in range(STEPS):
        of_judge.zero_grad()
        (judge(maker(torch.randn(32, 64)).detach()).mean() - judge(torch.randn(32, 64)).mean()).backward()
        of_judge.step()
        of_maker.zero_grad()
        loss = judge(maker(torch.randn(32, 64))).pow(2).mean()
        loss.backward()
        of_maker.step()
        log(loss.item())


def lbfgs() -> None:
    model = DistributedDataParallel(mlp(64, 2))
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=3, lr=0.1)
    torch.manual_seed(rank)
    x = torch.randn(64, 64)

    def closure():
        optimizer.zero_grad()
        loss = (model(x) - x).pow(2).mean()
        loss.backward()
        return loss

    for _ in range(STEPS):
        log(optimizer.step(closure).item())


def language(*, compiled: bool = False, sharded: bool = False, slow: float = 0.0) -> None:
    model = GPT()
    if sharded:
        from torch.distributed.fsdp import fully_shard

        for block in model.blocks:
            fully_shard(block)
        fully_shard(model)
    elif compiled:
        model = DistributedDataParallel(torch.compile(model, backend="aot_eager"))
    else:
        model = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    accumulate = 2 if compiled else 1
    data = Tokens()
    sampler = torch.utils.data.distributed.DistributedSampler(data, shuffle=False)
    loader = iter(torch.utils.data.DataLoader(data, batch_size=4, sampler=sampler))
    for _ in range(STEPS):
        for micro in range(accumulate):
            if accumulate > 1:
                model.require_backward_grad_sync = micro == accumulate - 1
            tokens = next(loader)["input_ids"]
            loss = model(tokens[:, :-1], tokens[:, 1:].contiguous()) / accumulate
            loss.backward()
        if slow and rank == 1:
            time.sleep(slow)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        log(loss.item())


def pipeline() -> None:
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    stage = PipelineStage(mlp(), rank, 2, torch.device("cpu"))
    schedule = Schedule1F1B(stage, n_microbatches=4, loss_fn=nn.functional.mse_loss)
    optimizer = torch.optim.AdamW(stage.submod.parameters(), lr=1e-3)
    torch.manual_seed(0)
    for _ in range(STEPS):
        x, losses = torch.randn(64, 256), []
        optimizer.zero_grad()
        schedule.step(x) if rank == 0 else schedule.step(target=x, losses=losses)
        optimizer.step()
        log(sum(losses).item() if losses else 0.0, 1 - rank)


if how in ("gan", "lbfgs", "pipeline"):
    {"gan": gan, "lbfgs": lbfgs, "pipeline": pipeline}[how]()
else:
    language(compiled=how == "compiled", sharded=how == "fsdp", slow=0.15 * (how == "slow_rank"))
dist.destroy_process_group()
