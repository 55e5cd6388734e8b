"""What to type in several rules' advice: calls with the arguments that change, and a remark that the others stay."""

from __future__ import annotations

from typing import Final

from perfscope.results.findings import code

_QUOTE: Final = '"'


def call(assigned: str, first: str = "", before: str = "", /, **arguments: object) -> str:
    """Code that calls with ``first`` and ``arguments`` what the beginning of a line, ``assigned``, ends with; after the
    lines ``before``.
    """
    listed = ", ".join((*((first,) if first else ()), *(f"{name}={value}" for name, value in arguments.items())))
    return code("python", f"{before}\n{assigned}({listed})  # your other arguments stay".lstrip())


def data_loader(**arguments: object) -> str:
    """Arguments of a DataLoader."""
    return call("loader = DataLoader", "dataset", **arguments)


def training_arguments(**arguments: object) -> str:
    """Arguments of transformers' Trainer, which most scripts also take as options."""
    options = " ".join(f"--{name} {str(value).strip(_QUOTE)}" for name, value in arguments.items())
    remark = f"# as options, where the script takes them: {options}"
    return call("args = TrainingArguments", "output_dir", remark, **arguments)


def fsdp1(*imported: str, before: str = "", **arguments: object) -> str:
    """Arguments of FullyShardedDataParallel, with what else is ``imported`` from its package."""
    return call("model = FullyShardedDataParallel", "model", _import(imported, before), **arguments)


def fsdp2(*imported: str, before: str = "", **arguments: object) -> str:
    """Arguments of fully_shard, as every module that is sharded gets them."""
    listed = "".join(f", {name}={value}" for name, value in arguments.items())
    remark = "  # your other arguments stay" * bool(arguments)
    typed = f"for module in [*blocks, model]:\n    fully_shard(module{listed}){remark}"
    return "With a list of the modules inside the model that are sharded for blocks:\n" + code(
        "python", f"{_import(imported, before, 'fully_shard')}\n{typed}"
    )


def _import(names: tuple[str, ...], before: str, function: str = "FullyShardedDataParallel") -> str:
    return f"from torch.distributed.fsdp import {', '.join(sorted((function, *names)))}\n{before}".rstrip()


def in_deepspeed(settings: str) -> str:
    """Settings of DeepSpeed's JSON."""
    return "In the DeepSpeed JSON:\n" + code("json", settings)


def in_accelerate(settings: str) -> str:
    """Settings of the file that ``accelerate config`` writes."""
    return "In the file of accelerate config:\n" + code("yaml", settings)
