"""sentence-transformers' trainer with a multiple-negatives loss."""

import tempfile

import torch
from datasets import Dataset
from log import log
from sentence_transformers import (
    SentenceTransformer,
    SentenceTransformerTrainer,
    SentenceTransformerTrainingArguments,
    losses,
    models,
)
from tiny import sentence, tokenizer
from transformers import BertConfig, BertModel, TrainerCallback


class Loss(TrainerCallback):
    def on_log(self, args, state, control, logs=None, **kwargs):
        if "loss" in (logs or {}):
            log(logs["loss"])


folder = tempfile.mkdtemp()
torch.manual_seed(0)
shape = {"num_hidden_layers": 2, "hidden_size": 128, "num_attention_heads": 4, "intermediate_size": 256}
BertModel(BertConfig(vocab_size=512, max_position_embeddings=64, **shape)).save_pretrained(folder)
tokenizer().save_pretrained(folder)
words = models.Transformer(folder, max_seq_length=32)
model = SentenceTransformer(modules=[words, models.Pooling(128)], device="cpu")
data = Dataset.from_dict(
    {"anchor": [sentence(each) for each in range(400)], "positive": [sentence(each + 1) for each in range(400)]}
)
arguments = SentenceTransformerTrainingArguments(
    output_dir=tempfile.mkdtemp(), max_steps=20, per_device_train_batch_size=8, logging_steps=1, report_to=[],
    use_cpu=True, save_strategy="no", disable_tqdm=True,
)  # fmt: skip
SentenceTransformerTrainer(
    model, arguments, train_dataset=data, loss=losses.MultipleNegativesRankingLoss(model), callbacks=[Loss()]
).train()
