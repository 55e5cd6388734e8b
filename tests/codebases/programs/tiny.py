"""Models and data that need no network: tiny, random, the same in every run."""

import torch
from torch import nn


def gpt2(layers: int = 2):
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    special = {"bos_token_id": 2, "eos_token_id": 3, "pad_token_id": 0}
    return GPT2LMHeadModel(GPT2Config(n_layer=layers, n_embd=64, n_head=4, vocab_size=512, n_positions=128, **special))


class Tokens(torch.utils.data.Dataset):
    """Samples as ``transformers`` wants them; ``ms`` is how long each takes to load."""

    def __init__(self, samples: int = 1000, length: int = 64, ms: float = 0.0) -> None:
        self.tokens = torch.randint(0, 512, (samples, length), generator=torch.Generator().manual_seed(0))
        self.ms = ms

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, place: int):
        if self.ms:
            import time

            time.sleep(self.ms / 1e3)
        return {"input_ids": self.tokens[place], "labels": self.tokens[place]}


def tokenizer():
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {"[PAD]": 0, "[UNK]": 1, "[CLS]": 2, "[SEP]": 3, **{f"w{each}": each + 4 for each in range(500)}}
    made = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    special = {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    return PreTrainedTokenizerFast(tokenizer_object=made, eos_token="[SEP]", **special)


def sentence(number: int, length: int = 24) -> str:
    return " ".join(f"w{(number * 7 + each * 13) % 500}" for each in range(length))


def mlp(width: int = 256, layers: int = 4) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(each for _ in range(layers) for each in (nn.Linear(width, width), nn.ReLU())))
