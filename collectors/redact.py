"""Keeps secrets out of a recording: command lines and environment variables are stored without them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any, Final

REDACTED: Final = "[redacted]"

ENVIRONMENT_PREFIXES: Final = (
    "ACCELERATE_", "CUBLAS_", "CUDA_", "CUDNN_", "DS_", "FI_", "FSDP_", "GLOO_", "HIP_", "HOROVOD_", "HSA_", "KMP_",
    "MKL_", "NCCL_", "NVIDIA_TF32_OVERRIDE", "OMP_", "OPENBLAS_", "PYTORCH_", "RCCL_", "ROCR_", "TORCH_",
    "TORCHDYNAMO_", "TORCHINDUCTOR_", "TP_", "UCX_", "XLA_", "SLURM_CPUS_", "SLURM_CPU_BIND", "SLURM_GPUS",
    "SLURM_JOB_NUM_NODES", "SLURM_MEM_BIND", "SLURM_NNODES", "SLURM_NTASKS", "SLURM_TASKS_PER_NODE",
    "SLURM_THREADS_PER_CORE",
)  # fmt: skip
"""Variables that change how a run performs; only names that begin so are stored.

Cache folders are not: they are named after users."""

_SECRET_NAME = re.compile(r"secret|token|key|passw|credential|auth", re.IGNORECASE)
"""In an environment variable's name: its value is left out. Wide on purpose: losing a harmless one costs little."""

_SECRET_WORDS: Final = frozenset(
    ("secret", "token", "key", "apikey", "password", "passwd", "passphrase", "pwd", "credential", "credentials", "auth")
)
"""In an option's name as a whole word: ``--hf-token``, not ``--max-tokens`` or ``--tokenizer``."""

_SECRET_SHAPES: Final = re.compile(
    r"\b(?:hf_[A-Za-z0-9]{16,}|sk-[A-Za-z0-9_-]{16,}|gh[opsu]_[A-Za-z0-9]{16,}|github_pat_\w{16,}|glpat-[\w-]{16,}"
    r"|AKIA[A-Z0-9]{12,}|xox[abps]-[\w-]{10,}|eyJ[\w-]{10,}\.[\w-]{10,}\.[\w-]*)"
)
"""Values that are secrets whatever they are called."""

_URL_PASSWORD = re.compile(r"(?<=://)[^/@\s]+(?=@)")


def redact_command(arguments: Iterable[str]) -> tuple[str, ...]:
    """A command line without the values of options that look like secrets, and without values that are secrets."""
    redacted: list[str] = []
    secret_follows = False
    for argument in arguments:
        name, equals, value = argument.partition("=")
        if secret_follows and not argument.startswith("-") and not _harmless(argument):
            redacted.append(REDACTED)
            secret_follows = False
            continue
        names_secret = _names_secret(name)
        secret_follows = names_secret and not equals and argument.startswith("-")
        if names_secret and equals and not _harmless(value):
            redacted.append(f"{name}={REDACTED}")
        else:
            redacted.append(redact_value(argument))
    return tuple(redacted)


def redact_value(value: str) -> str:
    """A value without the secrets that have a secret's shape."""
    return _SECRET_SHAPES.sub(REDACTED, _URL_PASSWORD.sub(REDACTED, value))


def redact_settings(value: Any, *, secret: bool = False) -> Any:
    """A JSON value without what lies under keys that name secrets, and without values that are secrets.

    ``secret``: the value lies under such a key.
    """
    if isinstance(value, dict):
        return {name: redact_settings(each, secret=secret or _names_secret(str(name))) for name, each in value.items()}
    if isinstance(value, list):
        return [redact_settings(each, secret=secret) for each in value]
    if secret and not isinstance(value, (bool, type(None))) and not _harmless(str(value)):
        return REDACTED
    return redact_value(value) if isinstance(value, str) else value


def performance_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables that change how a run performs, secrets left out, sorted by name."""
    return {
        name: redact_value(environment[name])
        for name in sorted(environment)
        if name.startswith(ENVIRONMENT_PREFIXES) and not _SECRET_NAME.search(name) and not name.endswith("_CACHE_DIR")
    }


def _names_secret(name: str) -> bool:
    words = re.split(r"[^a-z0-9]+", re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower())
    return not _SECRET_WORDS.isdisjoint(words)


def _harmless(value: str) -> bool:
    """Short numbers and switches are settings (``--num-key-value-heads 8``), not secrets."""
    return value.lower() in ("", "true", "false", "none") or (value.isdecimal() and len(value) < 6)
