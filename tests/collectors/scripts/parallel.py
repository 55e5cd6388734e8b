"""Trainings as torch itself parallelises them, one mode per run; every rank prints at its end what was left patched.

Each mode is a function that makes a model and yields after each training step, so that their number is known.
"""

import argparse
import contextlib
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.optim.optimizer import register_optimizer_step_pre_hook

WIDTH, BATCH = 16, 8
MODES = {}


def mode(function):
    MODES[function.__name__] = function
    return function


class Net(nn.Module):
    def __init__(self, blocks=2):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU()) for _ in range(blocks))
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def batch():
    return torch.randn(BATCH, WIDTH)


def plain(model, optimizer):
    while True:
        optimizer.zero_grad()
        model(batch()).pow(2).mean().backward()
        optimizer.step()
        yield


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=1e-3)


@mode
def ddp():
    """Gradients of four batches in a row, exchanged with the last one only."""
    model = nn.parallel.DistributedDataParallel(Net())
    optimizer = sgd(model)
    while True:
        optimizer.zero_grad()
        for micro in range(4):
            with model.no_sync() if micro < 3 else contextlib.nullcontext():
                model(batch()).pow(2).mean().backward()
        optimizer.step()
        yield


@mode
def ddp_synchronous():
    """The same, exchanged every time."""
    model = nn.parallel.DistributedDataParallel(Net())
    optimizer = sgd(model)
    while True:
        optimizer.zero_grad()
        for _ in range(2):
            model(batch()).pow(2).mean().backward()
        optimizer.step()
        yield


@mode
def replicate():
    from torch.distributed._composable.replicate_with_fsdp import replicate

    model = Net()
    replicate(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp",)))
    yield from plain(model, sgd(model))


@mode
def zero1():
    from torch.distributed.optim import ZeroRedundancyOptimizer

    model = nn.parallel.DistributedDataParallel(Net())
    yield from plain(model, ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-3))


@mode
def fsdp1():
    from torch.distributed.fsdp import BackwardPrefetch, FullyShardedDataParallel, MixedPrecision, ShardingStrategy
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy

    model = FullyShardedDataParallel(
        Net(),
        auto_wrap_policy=ModuleWrapPolicy({nn.Sequential}),
        sharding_strategy=ShardingStrategy.SHARD_GRAD_OP,
        backward_prefetch=BackwardPrefetch.BACKWARD_POST,
        mixed_precision=MixedPrecision(param_dtype=torch.bfloat16),
        device_id=torch.device("cpu"),
    )
    yield from plain(model, sgd(model))


@mode
def fsdp1_hybrid():
    """Shards within the second dimension, replicas along the first."""
    from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy

    mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("replicas", "shards"))
    model = FullyShardedDataParallel(
        Net(), sharding_strategy=ShardingStrategy.HYBRID_SHARD, device_mesh=mesh, device_id=torch.device("cpu")
    )
    yield from plain(model, sgd(model))


def sharded(model, **options):
    from torch.distributed.fsdp import fully_shard

    for block in model.blocks:
        fully_shard(block, **options)
    fully_shard(model, **options)
    return model


@mode
def fsdp2():
    """Two batches in a row, reduced with the second; the first block fetches the second's parameters ahead."""
    from torch.distributed.fsdp import MixedPrecisionPolicy

    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("shards",))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model = sharded(Net(), mesh=mesh, mp_policy=policy)
    model.blocks[0].set_modules_to_forward_prefetch([model.blocks[1]])
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
    while True:
        optimizer.zero_grad()
        for last in (False, True):
            model.set_requires_gradient_sync(last)
            model(batch()).pow(2).mean().backward()
        optimizer.step()
        yield


@mode
def hsdp():
    mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("replicas", "shards"))
    model = sharded(Net(), mesh=mesh, reshard_after_forward=False)
    yield from plain(model, sgd(model))


def tensor_parallel(model, mesh):
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    return parallelize_module(model, mesh, {"blocks.0.0": ColwiseParallel(), "blocks.1.0": RowwiseParallel()})


class Split(Net):
    """Two layers with nothing but element-wise work between them, as tensor parallelism wants them."""

    def forward(self, x):
        return self.head(self.blocks[1](self.blocks[0](x)))


@mode
def tensor():
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    model = tensor_parallel(Split(), mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, foreach=False)
    yield from plain(model, optimizer)


@mode
def fsdp2_tensor():
    mesh = init_device_mesh("cpu", (dist.get_world_size() // 2, 2), mesh_dim_names=("dp", "tp"))
    model = sharded(tensor_parallel(Split(), mesh["tp"]), mesh=mesh["dp"])
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, foreach=False)
    yield from plain(model, optimizer)


def pipeline(schedule_class, per_rank, microbatches=4):
    from torch.distributed.pipelining import PipelineStage

    rank, ranks = dist.get_rank(), dist.get_world_size()
    modules = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU()) for _ in range(per_rank)]
    stages = [
        PipelineStage(module, rank + index * ranks, per_rank * ranks, torch.device("cpu"))
        for index, module in enumerate(modules)
    ]
    schedule = schedule_class(
        stages if per_rank > 1 else stages[0], microbatches, loss_fn=nn.functional.mse_loss, scale_grads=False
    )
    optimizer = torch.optim.SGD([each for module in modules for each in module.parameters()], lr=1e-3)
    while True:
        optimizer.zero_grad()
        inputs = (batch(),) if rank == 0 else ()
        targets = {"target": batch(), "losses": []} if rank == ranks - 1 else {}
        schedule.step(*inputs, **targets)
        optimizer.step()
        yield


@mode
def gpipe():
    from torch.distributed.pipelining import ScheduleGPipe

    yield from pipeline(ScheduleGPipe, 1)


@mode
def one_forward_one_backward():
    from torch.distributed.pipelining import Schedule1F1B

    yield from pipeline(Schedule1F1B, 1)


@mode
def interleaved():
    from torch.distributed.pipelining import ScheduleInterleaved1F1B

    yield from pipeline(ScheduleInterleaved1F1B, 2)


@mode
def zero_bubble():
    from torch.distributed.pipelining import ScheduleInterleavedZeroBubble

    yield from pipeline(ScheduleInterleavedZeroBubble, 2)


@mode
def compiled():
    model = torch.compile(nn.parallel.DistributedDataParallel(Net()), backend="aot_eager")
    yield from plain(model, sgd(model))


@mode
def gan():
    """Five steps of a critic to one of the generator."""
    generator = nn.parallel.DistributedDataParallel(Net())
    critic = nn.parallel.DistributedDataParallel(Net())
    generator_optimizer, critic_optimizer = sgd(generator), sgd(critic)
    while True:
        for _ in range(5):
            critic_optimizer.zero_grad()
            critic(batch()).mean().backward()
            critic_optimizer.step()
        generator_optimizer.zero_grad()
        critic.module(generator(batch())).mean().backward()
        generator_optimizer.step()
        yield


@mode
def evaluation():
    """The model is evaluated after every fourth step, by all ranks and past the wrapper."""
    model = nn.parallel.DistributedDataParallel(Net())
    for step, _ in enumerate(plain(model, sgd(model)), 1):
        if step % 4 == 0:
            model.eval()
            with torch.no_grad():
                for _ in range(3):
                    model.module(batch())
            model.train()
        yield


@mode
def every_collective():
    """One of each in every step: what is checked is that they work as without us and how they are described."""
    model = nn.parallel.DistributedDataParallel(Net())
    rank, ranks = dist.get_rank(), dist.get_world_size()
    pair = dist.new_group(list(range(ranks)), group_desc="pair")
    for _ in plain(model, sgd(model)):
        collectives(rank, ranks, pair)
        yield


def collectives(rank, ranks, group):
    import torch.distributed._functional_collectives as functional

    x, parts = torch.full((4,), float(rank)), [torch.zeros(4) for _ in range(ranks)]
    total = sum(range(ranks))
    wide = torch.zeros(4 * ranks)
    dist.all_reduce(x, group=group)
    assert (x == total).all()
    dist.broadcast(x, 0, group=group)
    dist.reduce(x.clone(), 0, group=group)
    dist.all_gather(parts, x, group=group)
    assert all((part == total).all() for part in parts)
    dist.all_gather_into_tensor(wide, x, group=group)
    assert (wide == total).all()
    dist.reduce_scatter_tensor(torch.zeros(4), wide, group=group)
    dist.all_to_all_single(torch.zeros(4 * ranks), wide, group=group)
    dist.gather(x, parts if rank == 0 else None, 0, group=group)
    dist.scatter(x, parts if rank == 0 else None, 0, group=group)
    dist.barrier(group=group)
    objects = [None] * ranks
    dist.all_gather_object(objects, {"rank": rank}, group=group)
    assert [each["rank"] for each in objects] == list(range(ranks))
    reduced = functional.all_reduce(torch.full((4,), float(rank)), "sum", group)
    assert (reduced == total).all()
    to, source = (rank + 1) % ranks, (rank - 1) % ranks
    received = torch.zeros(4)
    requests = [
        dist.P2POp(dist.isend, torch.full((4,), float(rank)), to, group),
        dist.P2POp(dist.irecv, received, source, group),
    ]
    for work in dist.batch_isend_irecv(requests):
        work.wait()
    assert (received == source).all()
    with torch.inference_mode():
        dist.all_reduce(torch.ones(4, dtype=torch.int64))


def patched():
    """Identities of every name that a recording may replace, and the keys of c10d's operators with kernels."""
    from torch.utils.data import dataloader

    stage = sys.modules.get("torch.distributed.pipelining.stage")
    owners = {
        "autograd": torch.autograd,
        "distributed": torch.distributed,
        "c10d": dist.distributed_c10d,
        "loader": dataloader._BaseDataLoaderIter,
        "profiler": torch.autograd.profiler,
        "stage": getattr(stage, "_PipelineStageBase", object),
        "group": dist.ProcessGroup,
    }
    names = {
        (where, key): id(value)
        for where, owner in owners.items()
        for key, value in vars(owner).items()
        if callable(value)
    }
    operators = [name for name in torch._C._dispatch_get_all_op_names() if name.startswith("c10d::")]
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    return names | {("dispatcher", name): has(name, "BackendSelect") for name in operators}


parser = argparse.ArgumentParser()
parser.add_argument("mode", choices=sorted(MODES))
parser.add_argument("--steps", type=int, default=12)
options = parser.parse_args()
torch.set_num_threads(1)
dist.init_process_group("gloo")
torch.manual_seed(0)
during = set()
before = {}


def remember(*_):
    before.update(before or patched())


# At the end of the first forward and backward everything has been imported, and no recording has begun.
hook = register_optimizer_step_pre_hook(remember)
for step, _ in enumerate(MODES[options.mode](), 1):
    hook.remove()
    during |= {where for where, value in patched().items() if before.get(where) != value}
    if step == options.steps:
        break
left = sorted({where for where, value in patched().items() if before.get(where) != value})
kinds = sorted({where[0] for where in during})
sys.stdout.write(f"rank {dist.get_rank()} steps {step} patched during: {kinds} after: {left}\n")
sys.stdout.flush()
dist.destroy_process_group()
