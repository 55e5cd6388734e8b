"""Who this process is in its job: rank, world size and the like, from torch.distributed or the launcher's variables.

``torch.distributed`` decides once it is initialised. Launchers' variables count before that, and hold the
place on the host, which it does not know. Where several launchers are at work (torchrun inside srun inside a batch
script) the innermost is meant: the order of ``LAUNCHERS``. What one leaves open the next fills in, if it names the same
rank.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

Environment = Mapping[str, str]


@dataclass(frozen=True)
class Identity:
    """A process's place in its job."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    backend: str = ""
    """Of the default process group; empty without torch.distributed."""


@dataclass(frozen=True)
class Launcher:
    """The variables of one kind of launcher; of alternatives the first that is there counts."""

    name: str
    rank: str
    world_size: str
    local_rank: tuple[str, ...]
    local_world_size: tuple[str, ...] = ()


LAUNCHERS: Final = (
    Launcher("torchrun", "RANK", "WORLD_SIZE", ("LOCAL_RANK",), ("LOCAL_WORLD_SIZE", "LOCAL_SIZE")),
    Launcher("horovodrun", "HOROVOD_RANK", "HOROVOD_SIZE", ("HOROVOD_LOCAL_RANK",), ("HOROVOD_LOCAL_SIZE",)),
    Launcher(
        "Open MPI", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE",
        ("OMPI_COMM_WORLD_LOCAL_RANK",), ("OMPI_COMM_WORLD_LOCAL_SIZE",)
    ),
    Launcher(
        "MVAPICH2", "MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE",
        ("MV2_COMM_WORLD_LOCAL_RANK",), ("MV2_COMM_WORLD_LOCAL_SIZE",)
    ),
    Launcher(
        "MPICH or Intel MPI", "PMI_RANK", "PMI_SIZE",
        ("MPI_LOCALRANKID", "PMI_LOCAL_RANK"), ("MPI_LOCALNRANKS", "PMI_LOCAL_SIZE")
    ),
    Launcher(
        "jsrun", "JSM_NAMESPACE_RANK", "JSM_NAMESPACE_SIZE",
        ("JSM_NAMESPACE_LOCAL_RANK",), ("JSM_NAMESPACE_LOCAL_SIZE",)
    ),
    Launcher("Flux", "FLUX_TASK_RANK", "FLUX_JOB_SIZE", ("FLUX_TASK_LOCAL_ID",)),
    Launcher("srun", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", ("SLURM_LOCALID",), ("SLURM_NTASKS_PER_NODE",)),
    Launcher("Kubeflow", "PET_NODE_RANK", "PET_NNODES", ()),
)  # fmt: skip
"""Innermost first.

The first row is also that of ``torch.distributed.launch``, Accelerate, DeepSpeed (``LOCAL_SIZE``), Ray Train and, for
whole pods, Kubeflow's PyTorchJob. Slurm is there below every other launcher too; outside a step of ``srun`` (in a batch
script) it names rank 0 of the whole allocation, but does not set ``SLURM_STEP_NUM_TASKS``. Kubeflow's variables
(training-operator ``envvar.go``, trainer ``plugins/torch/torch.go``) describe nodes, not processes.
"""

_ONE_HOST: Final = ("localhost", "127.0.0.1", "::1")


@dataclass(frozen=True)
class _Claim:
    """What one launcher sets; None where it does not."""

    rank: int
    world_size: int
    local_rank: int | None = None
    local_world_size: int | None = None


def identify(environment: Environment | None = None) -> Identity:
    """Find out who this process is. ``torch.distributed`` decides where it is initialised."""
    environment = os.environ if environment is None else environment
    distributed: Any = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        return from_environment(environment)
    return placed(int(distributed.get_rank()), int(distributed.get_world_size()), _backend(distributed), environment)


def _backend(distributed: Any) -> str:
    """The default group's backend; where it has one for each type of device, that of the accelerators."""
    name = str(distributed.get_backend())
    if name != "undefined" or not hasattr(distributed, "get_backend_config"):
        return name
    by_device = dict(each.partition(":")[::2] for each in str(distributed.get_backend_config()).split(","))
    return next((backend for device, backend in by_device.items() if device != "cpu"), by_device.get("cpu", name))


def placed(rank: int, world_size: int, backend: str, environment: Environment) -> Identity:
    """A rank that torch.distributed knows, with its place on its host from the launchers' variables."""
    claims = list(_claims(environment))
    known = _joined([claim for claim in claims if (claim.rank, claim.world_size) == (rank, world_size)])
    if known is not None:
        return replace(known, backend=backend)
    if environment.get("MASTER_ADDR") in _ONE_HOST:
        # Processes that the script started itself on one host: nobody set local ranks, but they are known.
        return Identity(rank, world_size, rank, world_size, backend)
    for claim in claims:
        # A launcher that started one process a node, which started the ranks of its node, in order.
        here, rest = divmod(world_size, claim.world_size)
        if here > 1 and not rest and rank // here == claim.rank:
            return Identity(rank, world_size, rank % here, here, backend)
    return Identity(rank, world_size, _number(environment, "LOCAL_RANK") or 0, 1, backend)


def from_environment(environment: Environment) -> Identity:
    """The identity that the launcher's variables name; rank 0 of 1 without any."""
    claims = list(_claims(environment))
    if not claims:
        return Identity()
    first = claims[0]
    known = _joined([claim for claim in claims if (claim.rank, claim.world_size) == (first.rank, first.world_size)])
    return known or Identity()


def attempt(environment: Environment | None = None) -> int:
    """Elastic restarts of this job before this one."""
    return _number(os.environ if environment is None else environment, "TORCHELASTIC_RESTART_COUNT") or 0


def rendezvous(environment: Environment) -> str:
    """Where the ranks of the job meet; empty where that is not set."""
    address, port = environment.get("MASTER_ADDR", ""), environment.get("MASTER_PORT", "")
    return f"{address}:{port}" if address and port else ""


def _claims(environment: Environment) -> Iterator[_Claim]:
    """What every launcher and cloud service at work sets, the innermost first."""
    for launcher in LAUNCHERS:
        rank, world_size = _number(environment, launcher.rank), _number(environment, launcher.world_size)
        if rank is not None and world_size and rank < world_size:
            local_size = _first_number(environment, launcher.local_world_size)
            if launcher.rank == "SLURM_PROCID":
                local_size = _slurm_tasks_here(environment) or local_size
            yield _Claim(rank, world_size, _first_number(environment, launcher.local_rank), local_size)
    # Services that describe nodes, not processes: last, because whatever the node starts knows better.
    yield from filter(None, (_sagemaker(environment), _vertex(environment)))


def _joined(claims: list[_Claim]) -> Identity | None:
    """One identity of claims to the same rank: each place from the first that knows it."""
    if not claims:
        return None
    local_rank = next((claim.local_rank for claim in claims if claim.local_rank is not None), 0)
    local_size = next((claim.local_world_size for claim in claims if claim.local_world_size), 1)
    return Identity(claims[0].rank, claims[0].world_size, local_rank, max(local_size, local_rank + 1))


def _slurm_tasks_here(environment: Environment) -> int | None:
    """Tasks of the step on this node, from a list such as ``4(x2),3`` (srun(1)) and the node's number in it."""
    node = _number(environment, "SLURM_NODEID")
    counts: list[int] = []
    for part in environment.get("SLURM_STEP_TASKS_PER_NODE", "").split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part.strip())
        if match is None:
            return None
        counts += [int(match[1])] * int(match[2] or 1)
    return counts[node] if node is not None and node < len(counts) else None


def _sagemaker(environment: Environment) -> _Claim | None:
    """Amazon SageMaker starts one process per host (sagemaker-training-toolkit, ENVIRONMENT_VARIABLES.md)."""
    hosts = _json(environment, "SM_HOSTS")
    here = environment.get("SM_CURRENT_HOST")
    if not isinstance(hosts, list) or here not in hosts:
        return None
    return _Claim(hosts.index(here), len(hosts))


def _vertex(environment: Environment) -> _Claim | None:
    """Vertex AI starts one replica a machine; pool 0 is the primary, pool 1 the workers ("Distributed training")."""
    spec = _json(environment, "CLUSTER_SPEC")
    if not isinstance(spec, dict):
        return None
    cluster, task = spec.get("cluster"), spec.get("task")
    if not isinstance(cluster, dict) or not isinstance(task, dict) or not isinstance(task.get("index"), int):
        return None
    pools = [cluster.get(f"workerpool{number}") or [] for number in (0, 1)]
    before = {"workerpool0": 0, "workerpool1": len(pools[0])}.get(str(task.get("type")))
    return None if before is None else _Claim(before + task["index"], sum(map(len, pools)))


def _json(environment: Environment, name: str) -> object:
    try:
        return json.loads(environment.get(name, ""))
    except ValueError:
        return None


def _first_number(environment: Environment, names: tuple[str, ...]) -> int | None:
    return next((value for name in names if (value := _number(environment, name)) is not None), None)


def _number(environment: Environment, name: str) -> int | None:
    text = environment.get(name, "")
    return int(text) if text.isascii() and text.isdecimal() else None
