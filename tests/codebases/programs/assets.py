"""What programs with an entry point of their own read: ``assets.py FOLDER`` writes a tiny language model with its
tokenizer (``model``), data to fine-tune it on (``sft``) and to prefer
(``preferences``); a tiny CLIP (``clip``).
"""

import json
import sys
from pathlib import Path

from tiny import gpt2, sentence, tokenizer

folder = Path(sys.argv[1])
gpt2().save_pretrained(folder / "model")
tokenizer().save_pretrained(folder / "model")
ROWS = {
    "sft": lambda number: {"text": sentence(number)},
    "preferences": lambda number: {
        "prompt": sentence(number, 8), "chosen": sentence(number + 1, 8), "rejected": sentence(number + 2, 8)
    },
}  # fmt: skip
for name, row in ROWS.items():
    (folder / name).mkdir()
    lines = [json.dumps(row(number)) for number in range(200)]
    (folder / name / "train.jsonl").write_text("\n".join(lines) + "\n")
tiny_clip = {
    "embed_dim": 64,
    "vision_cfg": {"image_size": 32, "layers": 2, "width": 64, "patch_size": 8, "head_width": 32},
    "text_cfg": {"context_length": 16, "vocab_size": 49408, "width": 64, "heads": 2, "layers": 2},
}
(folder / "clip").mkdir()
described = {"model_cfg": tiny_clip, "preprocess_cfg": {"mean": [0.5] * 3, "std": [0.5] * 3}}
(folder / "clip" / "open_clip_config.json").write_text(json.dumps(described))
