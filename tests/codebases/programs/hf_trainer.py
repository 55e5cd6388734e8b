"""transformers' Trainer: plain, or with LoRA of PEFT (``--lora``)."""

import argparse
import tempfile

from log import STEPS, log
from tiny import Tokens, gpt2
from transformers import Trainer, TrainerCallback, TrainingArguments

parser = argparse.ArgumentParser()
parser.add_argument("--lora", action="store_true")
parser.add_argument("--load-ms", type=float, default=0.0)
parser.add_argument("--workers", type=int, default=0)
parser.add_argument("--anomaly", action="store_true")
parser.add_argument("--unused", action="store_true", help="look for unused parameters in every backward")
parser.add_argument("--bucket-mb", type=float, default=None)
parser.add_argument("--layers", type=int, default=2)
options = parser.parse_args()

if options.anomaly:
    import torch

    torch.autograd.set_detect_anomaly(True)


class Loss(TrainerCallback):
    def on_log(self, args, state, control, logs=None, **kwargs):
        if "loss" in (logs or {}):
            log(logs["loss"])


model = gpt2(options.layers)
if options.lora:
    from peft import LoraConfig, get_peft_model

    lora = LoraConfig(r=8, target_modules=["c_attn"], fan_in_fan_out=True, task_type="CAUSAL_LM")
    model = get_peft_model(model, lora)
common = {
    "output_dir": tempfile.mkdtemp(),
    "max_steps": STEPS,
    "per_device_train_batch_size": 4,
    "logging_steps": 1,
    "report_to": [],
    "use_cpu": True,
    "save_strategy": "no",
    "disable_tqdm": True,
    "dataloader_num_workers": options.workers,
    "dataloader_persistent_workers": options.workers > 0,
    "ddp_bucket_cap_mb": options.bucket_mb,
    "ddp_find_unused_parameters": options.unused,
}
data = Tokens(ms=options.load_ms)
Trainer(model, TrainingArguments(**common), train_dataset=data, callbacks=[Loss()]).train()
