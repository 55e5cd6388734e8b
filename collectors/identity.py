"""Who this process is in its job: rank, world size and the like, from torch.distributed or the launcher's variables."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final


@dataclass(frozen=True)
class Identity:
    """A process's place in its job."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    backend: str = ""
    """Of the default process group; empty without torch.distributed."""


_LAUNCHERS: Final = (
    ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
    ("HOROVOD_RANK", "HOROVOD_SIZE", "HOROVOD_LOCAL_RANK", "HOROVOD_LOCAL_SIZE"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    ("MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_LOCAL_RANK", "MV2_COMM_WORLD_LOCAL_SIZE"),
    ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_NTASKS_PER_NODE"),
)
"""Variables for rank, world size, local rank, local world size, of each launcher; the first that names a rank is taken.
Slurm comes last because it is there below every other launcher too; outside a step of ``srun`` (in a batch script) it
names rank 0 of the whole allocation, but does not set ``SLURM_STEP_NUM_TASKS``."""

_ONE_HOST: Final = ("localhost", "127.0.0.1", "::1")


def identify(environment: Mapping[str, str] | None = None) -> Identity:
    """Find out who this process is. ``torch.distributed`` decides where it is initialised."""
    environment = os.environ if environment is None else environment
    claimed = from_environment(environment)
    distributed: Any = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        return claimed
    rank, world_size = int(distributed.get_rank()), int(distributed.get_world_size())
    backend = str(distributed.get_backend())
    if (claimed.rank, claimed.world_size) == (rank, world_size):
        return Identity(rank, world_size, claimed.local_rank, claimed.local_world_size, backend)
    if environment.get("MASTER_ADDR") in _ONE_HOST:
        # Processes that the script started itself on one host: nobody set local ranks, but they are known.
        return Identity(rank, world_size, rank, world_size, backend)
    return Identity(rank, world_size, _number(environment, "LOCAL_RANK", 0), 1, backend)


def from_environment(environment: Mapping[str, str]) -> Identity:
    """What the launcher's variables say; rank 0 of 1 where they say nothing."""
    for rank, world_size, local_rank, local_world_size in _LAUNCHERS:
        if environment.get(rank, "").isdecimal() and environment.get(world_size, "").isdecimal():
            return Identity(
                int(environment[rank]),
                int(environment[world_size]),
                _number(environment, local_rank, 0),
                _number(environment, local_world_size, 1),
            )
    return Identity()


def attempt(environment: Mapping[str, str] | None = None) -> int:
    """Elastic restarts of this job before this one."""
    return _number(os.environ if environment is None else environment, "TORCHELASTIC_RESTART_COUNT", 0)


def _number(environment: Mapping[str, str], name: str, default: int) -> int:
    text = environment.get(name, "")
    return int(text) if text.isdecimal() else default
