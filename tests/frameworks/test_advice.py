"""The framework understands what advice asks its users to type."""

from __future__ import annotations

import importlib.util
import inspect
import json
import subprocess
import sys

import pytest

from tests.analyzers.rules.arguments import ARGUMENTS

pytestmark = pytest.mark.frameworks

TRANSFORMERS = """
import dataclasses, json
from transformers import TrainingArguments
from transformers.training_args import OptimizerNames
arguments = [field.name for field in dataclasses.fields(TrainingArguments)]
print(json.dumps([arguments, [each.value for each in OptimizerNames]]))
"""


def needs(package: str) -> None:
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed; make frameworks has an environment of its own")


def test_transformers_has_every_argument():
    needs("transformers")
    # In a process of its own: importing it changes the environment of whoever does.
    done = subprocess.run([sys.executable, "-c", TRANSFORMERS], capture_output=True, text=True, check=True)
    arguments, optimizers = json.loads(done.stdout.splitlines()[-1])
    typed = set(ARGUMENTS["transformers.TrainingArguments"].split())
    assert typed <= set(arguments)
    assert {"group_by_length", "train_sampling_strategy"} & set(arguments)
    assert "adamw_torch_fused" in optimizers


def test_accelerate_has_every_argument():
    needs("accelerate")
    from accelerate import Accelerator, DistributedDataParallelKwargs
    from accelerate.commands.launch import launch_command_parser
    from accelerate.utils import DataLoaderConfiguration

    options = {name for action in launch_command_parser()._actions for name in action.option_strings}
    assert {"--num_cpu_threads_per_process", "--mixed_precision", "--dynamo_backend", "--dynamo_mode"} <= options
    for function in (Accelerator, DataLoaderConfiguration, DistributedDataParallelKwargs):
        (typed,) = (names for path, names in ARGUMENTS.items() if path.endswith(f".{function.__name__}"))
        assert set(typed.split()) <= set(inspect.signature(function).parameters)


def test_lightning_has_every_argument():
    needs("lightning")
    from lightning.fabric import Fabric
    from lightning.pytorch import Trainer

    assert set(ARGUMENTS["lightning.pytorch.Trainer"].split()) <= set(inspect.signature(Trainer).parameters)
    assert set(ARGUMENTS["lightning.fabric.Fabric"].split()) <= set(inspect.signature(Fabric).parameters)
    assert callable(Fabric.no_backward_sync)


def test_deepspeed_has_every_argument():
    needs("deepspeed")
    from deepspeed.runtime.config import DeepSpeedConfig
    from deepspeed.runtime.engine import DeepSpeedEngine
    from deepspeed.runtime.zero.offload_config import DeepSpeedZeroOffloadOptimizerConfig

    assert "compile_kwargs" in inspect.signature(DeepSpeedEngine.compile).parameters
    assert {"device", "pin_memory"} <= set(DeepSpeedZeroOffloadOptimizerConfig.model_fields)
    assert "wall_clock_breakdown" in inspect.getsource(DeepSpeedConfig)
