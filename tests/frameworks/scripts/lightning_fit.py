"""Lightning with its own launcher: accumulation, validation and a checkpoint between the steps."""

import argparse
import os

import lightning
import torch
from lightning.pytorch.loops.evaluation_loop import _EvaluationLoop
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from witness import Witness

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=10)
parser.add_argument("--accumulate", type=int, default=2)
parser.add_argument("--strategy", default="ddp")
parser.add_argument("--devices", type=int, default=2)
parser.add_argument("--precision", default="32-true")
parser.add_argument("--root", default=".")
options = parser.parse_args()

torch.set_num_threads(1)


class Net(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 4))

    def forward(self, x):
        return self.body(x)

    def training_step(self, batch, _):
        x, y = batch
        witness.look()
        return nn.functional.cross_entropy(self(x), y)

    def validation_step(self, batch, _):
        x, y = batch
        self.log("loss", nn.functional.cross_entropy(self(x), y), sync_dist=True)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


witness = Witness(_EvaluationLoop, lightning.Trainer, torch.autograd, torch.distributed)
lightning.seed_everything(0)
data = TensorDataset(torch.randn(1024, 32), torch.randint(0, 4, (1024,)))
hooks = {}
if "TEST_CALLBACK" in os.environ:
    from perfscope.integrations.lightning import PerfScopeCallback

    hooks["callbacks"] = [PerfScopeCallback(os.environ["TEST_CALLBACK"], wait=1, warmup=1, active=3)]
elif "TEST_PROFILER" in os.environ:
    from perfscope.integrations.lightning import PerfScopeProfiler

    hooks["profiler"] = PerfScopeProfiler(os.environ["TEST_PROFILER"], wait=1, warmup=1, active=3)
trainer = lightning.Trainer(
    accelerator="cpu",
    devices=options.devices,
    strategy=options.strategy,
    precision=options.precision,
    max_steps=options.steps,
    accumulate_grad_batches=options.accumulate,
    val_check_interval=4,
    limit_val_batches=2,
    enable_progress_bar=False,
    enable_model_summary=False,
    logger=False,
    default_root_dir=options.root,
    gradient_clip_val=1.0,
    **hooks,
)
net = Net()
trainer.fit(net, DataLoader(data, batch_size=8), DataLoader(data, batch_size=8))
loss = float(sum(each.double().sum() for each in net.parameters()))
witness.report(trainer.global_rank, trainer.world_size, trainer.global_step, loss)
