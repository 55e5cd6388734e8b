"""DeepSpeed's pipeline engine: two stages, four micro-batches per step, evaluation between the steps."""

import argparse

import deepspeed
import torch
from deepspeed.comm.torch import TorchBackend
from deepspeed.pipe import PipelineModule
from deepspeed.runtime.pipe.engine import PipelineEngine
from torch import nn
from torch.utils.data import TensorDataset
from witness import Witness

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=8)
parser.add_argument("--stages", type=int, default=2)
parser.add_argument("--local_rank", type=int, default=-1)
parser = deepspeed.add_config_arguments(parser)
options = parser.parse_args()

torch.set_num_threads(1)
torch.manual_seed(0)
deepspeed.init_distributed("gloo")
layers = [nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 4)]
model = PipelineModule(layers, num_stages=options.stages, loss_fn=nn.functional.cross_entropy)
data = TensorDataset(torch.randn(1024, 32), torch.randint(0, 4, (1024,)))
engine, _, _, _ = deepspeed.initialize(
    args=options, model=model, model_parameters=list(model.parameters()), training_data=data
)
witness = Witness(TorchBackend, deepspeed.DeepSpeedEngine, PipelineEngine, torch.autograd, torch.distributed)
for step in range(options.steps):
    engine.train_batch()
    witness.look()
    if step % 4 == 3:
        batches = [(torch.randn(8, 32), torch.randint(0, 4, (8,))) for _ in range(4)]
        engine.eval_batch(iter(batches))
witness.report(engine.global_rank, deepspeed.comm.get_world_size(), engine.global_steps)
