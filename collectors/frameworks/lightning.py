"""Lightning's Trainer and Fabric, under either name of the package: settings, ranges of validation and checkpoints."""

from __future__ import annotations

from typing import Any, Final

from perfscope.collectors.discovery import JobObjects, loaded
from perfscope.collectors.frameworks.hooks import RangedFunction
from perfscope.collectors.frameworks.values import plain, settings_of
from perfscope.recording.vocabulary import CHECKPOINT, EVALUATION

TRAINERS: Final = (
    ("lightning.pytorch.trainer.trainer", "Trainer"),
    ("pytorch_lightning.trainer.trainer", "Trainer"),
)
FABRICS: Final = (("lightning.fabric.fabric", "Fabric"), ("lightning_fabric.fabric", "Fabric"))

PHASES: Final = tuple(
    RangedFunction(f"{package}.{module}", owner, attribute, name)
    for package in ("lightning.pytorch", "pytorch_lightning")
    for module, owner, attribute, name in (
        ("loops.evaluation_loop", "_EvaluationLoop", "run", EVALUATION),
        ("loops.evaluation_loop", "EvaluationLoop", "run", EVALUATION),
        ("trainer.trainer", "Trainer", "save_checkpoint", CHECKPOINT),
    )
) + tuple(RangedFunction(module, owner, "save", CHECKPOINT) for module, owner in FABRICS)

_TRAINER: Final = (
    "precision", "accumulate_grad_batches", "num_devices", "num_nodes", "gradient_clip_val",
    "gradient_clip_algorithm", "max_steps", "max_epochs", "val_check_interval", "check_val_every_n_epoch",
    "log_every_n_steps", "limit_train_batches", "limit_val_batches", "reload_dataloaders_every_n_epochs",
    "overfit_batches",
)  # fmt: skip
_STRATEGY: Final = (
    "_ddp_kwargs", "_process_group_backend", "sharding_strategy", "cpu_offload", "_data_parallel_size",
    "_tensor_parallel_size", "kwargs", "_fsdp_kwargs",
)  # fmt: skip


def describe(objects: JobObjects) -> dict[str, Any] | None:
    """Arguments of the job's Trainer (or Fabric) and of its strategy; None without either."""
    trainers = [each for each in objects.trainers if isinstance(each, loaded(TRAINERS))]
    if trainers:
        return _describe_trainer(trainers[0])
    fabrics = [each for each in objects.trainers if isinstance(each, loaded(FABRICS))]
    if fabrics:
        precision = getattr(fabrics[0]._precision, "precision", None)
        return {"fabric": True, "precision": plain(precision), **_describe_strategy(fabrics[0]._strategy)}
    return None


def _describe_trainer(trainer: Any) -> dict[str, Any]:
    import torch

    settings = settings_of(trainer, _TRAINER)
    connector = getattr(trainer, "_accelerator_connector", None)
    asked_for = getattr(connector, "_strategy_flag", None)
    settings.update(settings_of(connector, ("use_distributed_sampler",)))
    settings["benchmark"] = bool(torch.backends.cudnn.benchmark)
    if isinstance(asked_for, str):
        settings["strategy"] = asked_for
    return {**settings, **_describe_strategy(trainer.strategy)}


def _describe_strategy(strategy: Any) -> dict[str, Any]:
    """``strategy_class`` and, under ``strategy_arguments``, what it was made with."""
    arguments = {name.lstrip("_"): value for name, value in settings_of(strategy, _STRATEGY).items()}
    arguments = {name.removesuffix("_kwargs").replace("kwargs", "fsdp"): value for name, value in arguments.items()}
    return {"strategy_class": type(strategy).__name__, "strategy_arguments": arguments}
