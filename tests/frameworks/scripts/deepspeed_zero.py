"""DeepSpeed's engine as its tutorial has it: any ZeRO stage, evaluation and a checkpoint between the steps."""

import argparse

import deepspeed
import torch
from deepspeed.comm.torch import TorchBackend
from deepspeed.runtime.zero import partitioned_param_coordinator, stage3, stage_1_and_2
from torch import nn
from torch.utils.data import TensorDataset
from witness import Witness

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=10)
parser.add_argument("--accumulate", type=int, default=1)
parser.add_argument("--checkpoint", default="")
parser.add_argument("--checkpoint-at", type=int, default=5)
parser.add_argument("--local_rank", type=int, default=-1)  # the launcher adds it
parser = deepspeed.add_config_arguments(parser)
options = parser.parse_args()

torch.set_num_threads(1)
torch.manual_seed(0)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 4))

    def forward(self, x, y):
        return nn.functional.cross_entropy(self.body(x).float(), y)


samples = 2 * 8 * options.steps * options.accumulate
data = TensorDataset(torch.randn(samples, 32), torch.randint(0, 4, (samples,)))
model = Net()
engine, _, loader, _ = deepspeed.initialize(
    args=options, model=model, model_parameters=model.parameters(), training_data=data
)
dtype = next(engine.parameters()).dtype
witness = Witness(
    TorchBackend,
    deepspeed.DeepSpeedEngine,
    partitioned_param_coordinator.PartitionedParameterCoordinator,
    stage3.DeepSpeedZeroOptimizer_Stage3,
    stage_1_and_2,
    stage_1_and_2.DeepSpeedZeroOptimizer,
    torch.autograd,
    torch.distributed,
)
for iteration, (x, y) in enumerate(loader):
    loss = engine(x.to(dtype), y)
    engine.backward(loss)
    witness.look()
    engine.step()
    if iteration % 4 == 3:  # evaluation between the steps
        engine.eval()
        with torch.no_grad():
            engine(x.to(dtype), y)
        engine.train()
    if options.checkpoint and iteration == options.checkpoint_at * options.accumulate - 1:
        engine.save_checkpoint(options.checkpoint)
witness.report(engine.global_rank, engine.world_size, engine.global_steps)
