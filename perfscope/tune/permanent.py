"""How a change is made permanent: the line to write, for the framework in use."""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from typing import Final

from perfscope.analyzers.rules.communication.ddp_arguments import written
from perfscope.analyzers.rules.typed import data_loader, training_arguments
from perfscope.results.findings import blocks
from perfscope.tune.candidates import Candidate, Value, shown

_TRAINERS: Final = ("transformers", "lightning", "accelerate")
"""Frameworks that make loaders and DDP for the script, outermost first."""

_TRANSFORMERS: Final = {
    "dataloader.num_workers": "dataloader_num_workers",
    "dataloader.pin_memory": "dataloader_pin_memory",
    "dataloader.prefetch_factor": "dataloader_prefetch_factor",
    "dataloader.persistent_workers": "dataloader_persistent_workers",
    "ddp.bucket_cap_mb": "ddp_bucket_cap_mb",
    "ddp.static_graph": "ddp_static_graph",
    "ddp.find_unused_parameters": "ddp_find_unused_parameters",
}
"""Arguments of ``TrainingArguments``."""

_NO_SYNC: Final = {
    "transformers": "TrainingArguments(gradient_accumulation_steps={k})    # instead of accumulating by hand",
    "lightning": "Trainer(accumulate_grad_batches={k})    # instead of accumulating by hand",
    "accelerate": "Accelerator(gradient_accumulation_steps={k})    "
    "# and each micro-batch under: with accelerator.accumulate(model):",
    "": "with model.no_sync():    # around forward and backward of all micro-batches of a step but the last",
}  # fmt: skip

_BF16: Final = {
    "accelerate": 'Accelerator(kwargs_handlers=[DistributedDataParallelKwargs('
    'comm_hook=DDPCommunicationHookType.BF16)])',
    "lightning": "Trainer(strategy=DDPStrategy(ddp_comm_hook=default_hooks.bf16_compress_hook))",
    "": "model.register_comm_hook(None, default_hooks.bf16_compress_hook)    "
    "# from torch.distributed.algorithms.ddp_comm_hooks import default_hooks",
}  # fmt: skip


def how_to_keep(changes: Sequence[Candidate], frameworks: Collection[str], microbatches: int) -> list[str]:
    """The lines to write, for each place that changes; changes of one call or file are in one. Other arguments stay.

    ``frameworks``: those of which the recording has settings.
    """
    trainer = next((name for name in _TRAINERS if name in frameworks), "")
    lines: list[str] = []
    of_trainer = {_TRANSFORMERS[each.name]: each.new for each in changes if each.name in _TRANSFORMERS}
    if trainer == "transformers" and of_trainer:
        lines += _code(training_arguments(**_python(of_trainer)))
        changes = [each for each in changes if each.name not in _TRANSFORMERS]
    loader = _of(changes, "dataloader.")
    if loader:
        lines += _code(data_loader(**_python(loader)))
    ddp = _of(changes, "ddp.")
    no_sync, dtype = ddp.pop("no_sync", False), ddp.pop("comm_dtype", None)
    if ddp:
        lines += _code(written(trainer, **_python(ddp)))
    if no_sync:
        lines.append(_NO_SYNC.get(trainer, _NO_SYNC[""]).format(k=microbatches))
    if dtype is not None:
        lines.append(_BF16.get(trainer, _BF16[""]))
    for name, value in _of(changes, "env.").items():
        lines.append(f"unset {name}" if value is None else f"export {name}={shown(value)}")
    deepspeed = _of(changes, "deepspeed.")
    if deepspeed:
        lines.append(f"DeepSpeed's JSON: {json.dumps(_nested(deepspeed))}")
    return lines


def _of(changes: Sequence[Candidate], prefix: str) -> dict[str, Value]:
    return {each.name.removeprefix(prefix): each.new for each in changes if each.name.startswith(prefix)}


def _code(how: str) -> list[str]:
    """The lines of code in what advice asks to type, without remarks."""
    typed = [line for block in blocks(how) if block.language == "python" for line in block.text.splitlines()]
    return [line.partition("  #")[0] for line in typed if not line.startswith("#")]


def _python(values: dict[str, Value]) -> dict[str, str]:
    return {name: f"{value:g}" if isinstance(value, float) else repr(value) for name, value in values.items()}


def _nested(values: dict[str, Value]) -> dict[str, object]:
    """``{"a.b": 1}`` as ``{"a": {"b": 1}}``."""
    whole: dict[str, object] = {}
    for path, value in values.items():
        *parents, name = path.split(".")
        place = whole
        for parent in parents:
            inner = place.setdefault(parent, {})
            assert isinstance(inner, dict)
            place = inner
        place[name] = value
    return whole
