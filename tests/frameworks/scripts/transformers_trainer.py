"""The Trainer with a tiny language model made on the spot: accumulation, evaluation and checkpoints between steps."""

import os

import torch
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, HfArgumentParser, Trainer, TrainerCallback, TrainingArguments
from witness import Witness

(arguments,) = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses()
torch.set_num_threads(1)
torch.manual_seed(0)


class Tokens(Dataset):
    def __len__(self):
        return 256

    def __getitem__(self, index):
        tokens = torch.randint(0, 64, (16,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": tokens, "labels": tokens}


class Look(TrainerCallback):
    def on_step_end(self, *_, **__):
        witness.look()


callbacks = [Look()]
if "TEST_CALLBACK" in os.environ:
    from perfscope.integrations.transformers import PerfScopeCallback

    callbacks.append(PerfScopeCallback(os.environ["TEST_CALLBACK"], wait=1, warmup=1, active=3))
witness = Witness(Trainer, torch.autograd, torch.distributed)
model = GPT2LMHeadModel(GPT2Config(vocab_size=64, n_positions=16, n_embd=32, n_layer=2, n_head=2))
trainer = Trainer(model=model, args=arguments, train_dataset=Tokens(), eval_dataset=Tokens(), callbacks=callbacks)
result = trainer.train()
witness.report(arguments.process_index, arguments.world_size, trainer.state.global_step, result.training_loss)
