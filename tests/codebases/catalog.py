"""The programs: how each is started, what is known of it, and what is planted in it."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Final

PROGRAMS: Final = Path(__file__).parent / "programs"
BESIDE: Final = Path(sys.executable).parent
"""Where the launchers are."""

ASSETS: Final = "{assets}"
"""In a command: the folder that ``programs/assets.py`` wrote."""
PORT: Final = "{port}"
"""In a command: a port that is free."""
ADVISED: Final = "{advised}"
"""In a command that follows advice: the advised value."""

OWN_LOG: Final = r"step \d+ loss (\S+) at ([\d.]+)"
"""What programs that log with ``programs/log.py`` print after a step: the loss, and the time in s."""
TRAINER_LOG: Final = r"'loss': '?([-+\w.]+)"
"""What the Trainer prints itself."""


@dataclass(frozen=True)
class Program:
    """One training program of two ranks, unless it says otherwise."""

    name: str
    command: tuple[str, ...]
    strategy: tuple[str, ...] = ("ddp",)
    """As the report should name it."""
    ranks: int = 2
    steps: int = 20
    log: str = OWN_LOG
    """What its first rank prints after each step: a pattern with the loss and, where it has a clock, the time in s."""
    repeatable: bool = True
    """Two runs have the same losses."""
    jobs: tuple[int, ...] = ()
    """Ranks of each further training that the same command runs."""
    planted: str = ""
    rule: str = ""
    """What finds it: the first finding's rule, where something is planted."""
    followed: tuple[str, ...] = ()
    """The command that follows that advice, by the framework's own option, with ``ADVISED`` as its value."""


def _script(name: str, *arguments: str) -> tuple[str, ...]:
    return (str(PROGRAMS / f"{name}.py"), *arguments)


def _torchrun(name: str, *arguments: str, ranks: int = 2) -> tuple[str, ...]:
    return _module(*_script(name, *arguments), ranks=ranks)


def _module(*arguments: str, ranks: int = 2) -> tuple[str, ...]:
    return (sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", *arguments)


def _python(name: str, *arguments: str) -> tuple[str, ...]:
    return (sys.executable, *_script(name, *arguments))


def _accelerate(name: str, *arguments: str) -> tuple[str, ...]:
    launcher = (str(BESIDE / "accelerate"), "launch", "--multi_gpu", "--num_processes=2", "--num_machines=1")
    return (*launcher, "--mixed_precision=no", "--dynamo_backend=no", *_script(name, *arguments))


def _deepspeed(name: str, *arguments: str) -> tuple[str, ...]:
    return (str(BESIDE / "deepspeed"), "--num_accelerators", "2", "--master_port", PORT, *_script(name, *arguments))


def _trl(what: str, data: str) -> tuple[str, ...]:
    """One of TRL's own programs, as ``trl sft`` runs it."""
    return _module(
        "-m", f"trl.scripts.{what}", f"--model_name_or_path={ASSETS}/model", f"--dataset_name={ASSETS}/{data}",
        "--output_dir=out", "--max_steps=20", "--per_device_train_batch_size=4", "--logging_steps=1",
        "--logging_strategy=steps", "--save_strategy=no", "--use_cpu=true", "--bf16=false", "--report_to=none",
        "--disable_tqdm=true", "--max_length=64", "--gradient_checkpointing=false", "--dtype=float32",
    )  # fmt: skip


_LONG: Final = 40
"""Steps where advice is judged: enough without the profiler for predictions to be of those."""


def _planted(
    name: str, planted: str, rule: str, command: tuple[str, ...], followed: tuple[str, ...],
    strategy: tuple[str, ...] = ("ddp",),
) -> Program:  # fmt: skip
    return Program(name, command, strategy, steps=_LONG, planted=planted, rule=rule, followed=followed)


def _by_hand(name: str, strategy: tuple[str, ...], *arguments: str, ranks: int = 2) -> Program:
    return Program(f"by hand: {name}", _torchrun("by_hand", *arguments, ranks=ranks), strategy, ranks)


_CLIP = _python(
    "with_torchvision", "-m", "open_clip_train.main", "--dataset-type=synthetic", "--train-num-samples=160",
    "--batch-size=8", "--workers=0", "--epochs=1", f"--model=local-dir:{ASSETS}/clip", "--device=cpu",
    "--precision=fp32", "--log-every-n-steps=1", "--warmup=5",
)  # fmt: skip
"""Its DDP cannot be had on CPUs: it hands device_ids over."""

PLAIN: Final = (
    Program("transformers Trainer, torchrun", _torchrun("hf_trainer")),
    Program("transformers Trainer, accelerate launch", _accelerate("hf_trainer")),
    Program("PEFT LoRA in the Trainer", _torchrun("hf_trainer", "--lora")),
    Program("trl sft", _trl("sft", "sft"), log=TRAINER_LOG),
    Program("trl dpo", _trl("dpo", "preferences"), log=TRAINER_LOG),
    Program("sentence-transformers trainer", _torchrun("sentences")),
    Program("diffusers UNet2D, accelerate launch", _accelerate("diffusion")),
    Program("timm ViT", _torchrun("with_torchvision", *_script("images"))),
    Program("timm ResNet-10t", _torchrun("with_torchvision", *_script("images", "--model", "resnet10t"))),
    Program("open_clip_train", _CLIP, ("single",), 1, log=r"Train Epoch.*Contrastive_loss: (\S+)"),
    Program("LitGPT, Lightning Fabric", _python("fabric")),
    Program("LitGPT, Lightning Trainer", _python("fabric", "--trainer")),
    Program("Lightning Trainer, ddp_notebook", _python("fabric", "--trainer", "--strategy", "ddp_notebook")),
    Program("pytorch-ignite, its own launcher", _python("engine")),
    Program("DeepSpeed ZeRO 1", _deepspeed("zero", "--stage", "1"), ("zero1",)),
    Program("DeepSpeed ZeRO 2", _deepspeed("zero", "--stage", "2"), ("zero2",)),
    Program("DeepSpeed ZeRO 3", _deepspeed("zero", "--stage", "3"), ("zero3",)),
    Program("Ray Train TorchTrainer", _python("ray_train")),
    Program("stable-baselines3 PPO, environments as processes", _python("players"), ("single",), 1),
    Program("mp.spawn, rendezvous by file", _python("started", "spawn")),
    Program("Accelerate's notebook_launcher", _python("started", "notebook")),
    Program(
        "a trial run, then notebook_launcher", _python("started", "notebook", "trial"), ("single",), 1, 12, jobs=(2,)
    ),
    Program(
        "hogwild: workers on one shared model", _python("started", "hogwild"), ("single",), 1, repeatable=False,
        jobs=(1,),
    ),
    Program("two trainings as subprocesses", _python("started", "subprocesses"), ("single",), 1, jobs=(1,)),
    Program("GAN, two DDP models", _torchrun("loops", "gan")),
    Program("LBFGS", _torchrun("loops", "lbfgs")),
    Program("nanoGPT's loop, torch.compile, accumulation", _torchrun("loops", "compiled")),
    Program("fully_shard", _torchrun("loops", "fsdp"), ("fsdp",)),
    Program("torch pipelining, 1F1B", _torchrun("loops", "pipeline"), ("pipeline",)),
    _by_hand("tensor parallel", ("tensor",), "--tp", "2"),
    _by_hand("context parallel, ring", ("context", "data"), "--cp", "2"),
    _by_hand("context parallel, gathered K and V", ("context", "data"), "--cp", "2", "--gather"),
    _by_hand("tensor and data parallel", ("data", "tensor"), "--dp", "2", "--tp", "2", ranks=4),
    _by_hand("tensor and context parallel", ("context", "data", "tensor"), "--cp", "2", "--tp", "2", ranks=4),
)  # fmt: skip

PLANTED: Final = (
    _planted(
        "transformers Trainer", "samples take 40 ms to load", "dataloader-workers",
        _torchrun("hf_trainer", "--load-ms", "40"), _torchrun("hf_trainer", "--load-ms", "40", "--workers", ADVISED),
    ),
    _planted(
        "transformers Trainer", "buckets of 1 kB", "ddp-bucket-size",
        # Of many layers: ten reductions of a small model are no bottleneck.
        _torchrun("hf_trainer", "--layers", "12", "--bucket-mb", "0.001"),
        _torchrun("hf_trainer", "--layers", "12", "--bucket-mb", ADVISED),
    ),
    _planted(
        "transformers Trainer", "detect_anomaly", "debug-settings",
        _torchrun("hf_trainer", "--anomaly"), _torchrun("hf_trainer"),
    ),
    _planted(
        "Lightning Trainer", "samples take 40 ms to load", "dataloader-workers",
        _python("fabric", "--trainer", "--load-ms", "40"),
        _python("fabric", "--trainer", "--load-ms", "40", "--workers", ADVISED),
    ),
    _planted(
        "Lightning Fabric", "accumulation without no_sync", "ddp-no-sync",
        _python("fabric", "--accumulate", "4", "--sync-all"), _python("fabric", "--accumulate", "4"),
    ),
    _planted(
        "DeepSpeed ZeRO 2", "buckets of 2,000 elements", "deepspeed-communication",
        _deepspeed("zero", "--bucket", "2000"), _deepspeed("zero", "--bucket", ADVISED), ("zero2",),
    ),
    _planted(
        "data parallel by hand", "a reduction for each gradient", "gradients-by-hand",
        _torchrun("by_hand", "--dp", "2"), _torchrun("by_hand", "--dp", "2", "--gradients", ADVISED), ("data",),
    ),
    _planted(
        "DistributedDataParallel", "rank 1 sleeps 150 ms a step", "straggling-rank",
        _torchrun("loops", "slow_rank"), _torchrun("loops", "ddp"),
    ),
    # Not TORCH_DISTRIBUTED_DEBUG=DETAIL: DistributedDataParallel of torch 2.13 dies of it with gloo (SIGSEGV).
    _planted(
        "Lightning Trainer", "detect_anomaly", "debug-settings",
        _python("fabric", "--trainer", "--anomaly"), _python("fabric", "--trainer"),
    ),
)  # fmt: skip

CATALOG: Final = (*PLAIN, *PLANTED)
