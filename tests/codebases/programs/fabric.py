"""LitGPT's model in a loop of Lightning's Fabric, as its pretraining has it, with accumulation; or, with ``--trainer``,
Lightning's Trainer.
"""

import argparse

import lightning as L  # noqa: N812 - its own custom
import torch
from litgpt.config import Config
from litgpt.model import GPT
from litgpt.utils import chunked_cross_entropy
from log import STEPS, log
from tiny import Tokens

parser = argparse.ArgumentParser()
parser.add_argument("--trainer", action="store_true")
parser.add_argument("--strategy", default="ddp")
parser.add_argument("--accumulate", type=int, default=1)
parser.add_argument("--load-ms", type=float, default=0.0)
parser.add_argument("--workers", type=int, default=0)
parser.add_argument("--anomaly", action="store_true")
parser.add_argument("--sync-all", action="store_true", help="exchange gradients in every micro-batch")
options = parser.parse_args()
config = Config(n_layer=2, n_embd=128, n_head=4, vocab_size=512, padded_vocab_size=512, block_size=64, head_size=32)


class Module(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.model = GPT(config)

    def training_step(self, batch, _):
        self.loss = chunked_cross_entropy(self.model(batch["input_ids"]), batch["labels"])
        return self.loss

    def on_train_batch_end(self, outputs, batch, batch_idx):
        log(self.loss.item(), self.global_rank)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def main() -> None:
    data = Tokens(1000 * options.accumulate, ms=options.load_ms)
    loader = torch.utils.data.DataLoader(
        data, batch_size=4, num_workers=options.workers, persistent_workers=options.workers > 0
    )
    if options.trainer:
        quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
        trainer = L.Trainer(
            accelerator="cpu",
            devices=2,
            strategy=options.strategy,
            max_steps=STEPS,
            detect_anomaly=options.anomaly,
            **quiet,
        )
        trainer.fit(Module(), loader)
        return
    fabric = L.Fabric(accelerator="cpu", devices=2, strategy=options.strategy)
    fabric.launch()
    torch.manual_seed(0)
    model = GPT(config)
    model, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
    for number, batch in enumerate(fabric.setup_dataloaders(loader)):
        held = (number + 1) % options.accumulate != 0
        with fabric.no_backward_sync(model, enabled=held and not options.sync_all):
            loss = chunked_cross_entropy(model(batch["input_ids"]), batch["labels"])
            fabric.backward(loss / options.accumulate)
        if not held:
            optimizer.step()
            optimizer.zero_grad()
            log(loss.item(), fabric.global_rank)
        if number == STEPS * options.accumulate - 1:
            break


if __name__ == "__main__":
    main()
