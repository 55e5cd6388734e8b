"""Which rank a process is, from torch.distributed or launchers, and which process may record as that rank."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from perfscope.collectors.claims import Claim, claim_rank
from perfscope.collectors.identity import LAUNCHERS, Identity, attempt, from_environment, placed, rendezvous
from perfscope.recording.paths import BOOTSTRAP_FOLDER


def step_of_slurm(procid: int, tasks: int, local: int, per_node: str, node: int, **more: str) -> dict[str, str]:
    """A task of ``srun``: srun(1), "OUTPUT ENVIRONMENT VARIABLES"."""
    return {
        "SLURM_JOB_ID": "1234", "SLURM_STEP_ID": "0", "SLURM_PROCID": str(procid), "SLURM_NTASKS": str(tasks),
        "SLURM_STEP_NUM_TASKS": str(tasks), "SLURM_LOCALID": str(local), "SLURM_STEP_TASKS_PER_NODE": per_node,
        "SLURM_NODEID": str(node), **more,
    }  # fmt: skip


ELASTIC = {
    "GROUP_RANK": "1",
    "ROLE_RANK": "5",
    "TORCHELASTIC_RUN_ID": "job",
    "MASTER_ADDR": "node0",
    "MASTER_PORT": "1",
}
"""What torch.distributed.run sets beside the ranks (torch ``elastic/agent/server/local_elastic_agent.py``)."""

PYTORCHJOB = {
    "MASTER_ADDR": "job-master-0", "MASTER_PORT": "23456", "WORLD_SIZE": "3", "RANK": "2", "PYTHONUNBUFFERED": "0",
    "PET_NPROC_PER_NODE": "2", "PET_NNODES": "3", "PET_NODE_RANK": "2", "PET_MASTER_ADDR": "job-master-0",
}  # fmt: skip
"""A worker pod of Kubeflow's PyTorchJob (training-operator ``pkg/controller.v1/pytorch/envvar.go``): RANK is the pod's;
WORLD_SIZE counts pods or, in later versions, ranks."""

TRAINJOB = {
    "PET_NNODES": "2", "PET_NPROC_PER_NODE": "4", "PET_NODE_RANK": "1",
    "PET_MASTER_ADDR": "job-node-0-0.job", "PET_MASTER_PORT": "29500",
}  # fmt: skip
"""A pod of Kubeflow Trainer's TrainJob (trainer ``pkg/runtime/framework/plugins/torch/torch.go``), for torchrun."""

SAGEMAKER = {
    "SM_HOSTS": '["algo-1","algo-2"]', "SM_CURRENT_HOST": "algo-2", "SM_NUM_GPUS": "8",
    "SM_RESOURCE_CONFIG": '{"current_host":"algo-2","hosts":["algo-1","algo-2"]}',
}  # fmt: skip
"""sagemaker-training-toolkit, ENVIRONMENT_VARIABLES.md."""


def vertex(pool: int, index: int) -> dict[str, str]:
    """A replica on Vertex AI (documentation, "Distributed training": format of CLUSTER_SPEC)."""
    pools = {"workerpool0": ["a-0:2222"], "workerpool1": ["b-0:2222", "b-1:2222"], "workerpool2": ["c-0:2222"]}
    task = {"type": f"workerpool{pool}", "index": index, "trial": "TRIAL"}
    return {"CLUSTER_SPEC": json.dumps({"cluster": pools, "environment": "cloud", "task": task})}


@pytest.mark.parametrize(
    ("environment", "identity"),
    [
        ({}, Identity()),
        # torchrun, torch.distributed.launch, accelerate launch
        (
            {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4", **ELASTIC},
            Identity(5, 8, 1, 4),
        ),
        # DeepSpeed's launcher, which has a name of its own for the number of ranks here
        ({"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_SIZE": "4"}, Identity(5, 8, 1, 4)),
        # Ray Train (python/ray/train/torch/config.py)
        (
            {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4", "NODE_RANK": "1"},
            Identity(5, 8, 1, 4),
        ),
        ({"HOROVOD_RANK": "1", "HOROVOD_SIZE": "2", "HOROVOD_LOCAL_RANK": "1"}, Identity(1, 2, 1, 2)),
        # Open MPI 4 (mpirun(1), "Exported Environment Variables")
        (
            {
                "OMPI_COMM_WORLD_RANK": "2", "OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_RANK": "0",
                "OMPI_COMM_WORLD_LOCAL_SIZE": "2", "PMIX_RANK": "2",
            },
            Identity(2, 4, 0, 2),
        ),
        # MPICH's Hydra and Intel MPI
        (
            {"PMI_RANK": "3", "PMI_SIZE": "4", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"},
            Identity(3, 4, 1, 2),
        ),
        ({"PMI_RANK": "3", "PMI_SIZE": "4"}, Identity(3, 4, 0, 1)),
        # Cray PALS
        ({"PMI_RANK": "3", "PMI_SIZE": "4", "PMI_LOCAL_RANK": "1", "PMI_LOCAL_SIZE": "2"}, Identity(3, 4, 1, 2)),
        (
            {"MV2_COMM_WORLD_RANK": "1", "MV2_COMM_WORLD_SIZE": "2", "MV2_COMM_WORLD_LOCAL_RANK": "1"},
            Identity(1, 2, 1, 2),
        ),
        (
            {
                "JSM_NAMESPACE_RANK": "7", "JSM_NAMESPACE_SIZE": "12", "JSM_NAMESPACE_LOCAL_RANK": "1",
                "JSM_NAMESPACE_LOCAL_SIZE": "6",
            },
            Identity(7, 12, 1, 6),
        ),
        ({"FLUX_TASK_RANK": "3", "FLUX_JOB_SIZE": "4", "FLUX_TASK_LOCAL_ID": "1"}, Identity(3, 4, 1, 2)),
        # Slurm: two nodes alike, nodes that differ, a task of an array job
        (step_of_slurm(5, 8, 1, "4(x2)", 1), Identity(5, 8, 1, 4)),
        (step_of_slurm(6, 7, 2, "4,3", 1), Identity(6, 7, 2, 3)),
        (step_of_slurm(9, 11, 1, "4(x2),3", 2, SLURM_ARRAY_TASK_ID="2"), Identity(9, 11, 1, 3)),
        (step_of_slurm(1, 2, 1, "", 0, SLURM_NTASKS_PER_NODE="2"), Identity(1, 2, 1, 2)),
        # a batch script outside srun: the allocation is larger, this process is alone
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "4", "SLURM_LOCALID": "0"}, Identity()),
        # srun --mpi=pmi2: what PMI leaves open, Slurm sets
        (step_of_slurm(5, 8, 1, "4(x2)", 1, PMI_RANK="5", PMI_SIZE="8"), Identity(5, 8, 1, 4)),
        # a script that sets RANK and WORLD_SIZE from Slurm's variables
        (step_of_slurm(5, 8, 1, "4(x2)", 1, RANK="5", WORLD_SIZE="8"), Identity(5, 8, 1, 4)),
        # torchrun inside srun: torchrun's word counts
        (
            step_of_slurm(
                1, 2, 0, "1(x2)", 1, RANK="9", WORLD_SIZE="16", LOCAL_RANK="1", LOCAL_WORLD_SIZE="8", **ELASTIC
            ),
            Identity(9, 16, 1, 8),
        ),
        # mpirun inside an allocation of Slurm: its daemons are tasks of a step
        (
            step_of_slurm(
                1, 2, 0, "1(x2)", 1, OMPI_COMM_WORLD_RANK="3", OMPI_COMM_WORLD_SIZE="4",
                OMPI_COMM_WORLD_LOCAL_RANK="1", OMPI_COMM_WORLD_LOCAL_SIZE="2",
            ),
            Identity(3, 4, 1, 2),
        ),
        # python in the pods of a PyTorchJob; torchrun in them overwrites RANK and the rest
        (PYTORCHJOB, Identity(2, 3, 0, 1)),
        (
            {**PYTORCHJOB, "RANK": "5", "WORLD_SIZE": "6", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"},
            Identity(5, 6, 1, 2),
        ),
        (TRAINJOB, Identity(1, 2, 0, 1)),
        ({**TRAINJOB, "PET_NNODES": "1:4"}, Identity()),  # elastic: so many to so many
        # one process a host
        (SAGEMAKER, Identity(1, 2, 0, 1)),
        (
            {**SAGEMAKER, "RANK": "15", "WORLD_SIZE": "16", "LOCAL_RANK": "7", "LOCAL_WORLD_SIZE": "8"},
            Identity(15, 16, 7, 8),
        ),
        ({"SM_HOSTS": "nonsense", "SM_CURRENT_HOST": "algo-1"}, Identity()),
        (vertex(0, 0), Identity(0, 3, 0, 1)),
        (vertex(1, 1), Identity(2, 3, 0, 1)),
        (vertex(2, 0), Identity()),  # a parameter or reduction server
        ({"CLUSTER_SPEC": "{}"}, Identity()),
        ({"RANK": "not a number", "WORLD_SIZE": "8"}, Identity()),
        ({"RANK": "8", "WORLD_SIZE": "8"}, Identity()),
        ({"RANK": "", "WORLD_SIZE": ""}, Identity()),
    ],
)  # fmt: skip
def test_launchers_variables(environment: dict[str, str], identity: Identity) -> None:
    assert from_environment(environment) == identity


@pytest.mark.parametrize(
    ("rank", "world_size", "environment", "place"),
    [
        # the launcher agrees, and knows the place
        (5, 8, {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}, (1, 4)),
        # the script counts otherwise than the innermost launcher, but as another does
        (5, 8, step_of_slurm(5, 8, 1, "4(x2)", 1, RANK="1", WORLD_SIZE="2"), (1, 4)),
        # processes that the script started itself, on one host
        (1, 2, {"MASTER_ADDR": "localhost"}, (1, 2)),
        (1, 2, {"MASTER_ADDR": "127.0.0.1", "RANK": "0", "WORLD_SIZE": "1"}, (1, 2)),
        # … on each host that a launcher or a service started it on: pod 2 of 3 has ranks 4 and 5
        (5, 6, PYTORCHJOB, (1, 2)),
        (5, 6, {**PYTORCHJOB, "WORLD_SIZE": "6"}, (1, 2)),
        (5, 8, TRAINJOB, (1, 4)),
        (9, 16, SAGEMAKER, (1, 8)),
        (4, 6, vertex(1, 1), (0, 2)),
        (6, 8, step_of_slurm(1, 2, 0, "1(x2)", 1), (2, 4)),
        # ranks that do not lie on their hosts in order: nothing is made up
        (1, 6, PYTORCHJOB, (0, 1)),
        (1, 4, {"MASTER_ADDR": "node0", "LOCAL_RANK": "1"}, (1, 1)),
    ],
)
def test_torch_distributed_sets_the_rank_and_launchers_the_host(
    rank: int, world_size: int, environment: dict[str, str], place: tuple[int, int]
) -> None:
    assert placed(rank, world_size, "nccl", environment) == Identity(rank, world_size, *place, "nccl")


def test_the_order_of_launchers_is_documented(root: Path) -> None:
    text = (root / "docs" / "launching.md").read_text(encoding="utf-8").partition("## How a process's rank is found")[2]
    rows = [text.index(f"`{launcher.rank}`") for launcher in LAUNCHERS]
    assert rows == sorted(rows)
    for launcher in LAUNCHERS:
        for name in (launcher.world_size, *launcher.local_rank, *launcher.local_world_size):
            assert f"`{name}`" in text


def test_where_ranks_meet() -> None:
    assert rendezvous({"MASTER_ADDR": "node0", "MASTER_PORT": "29500"}) == "node0:29500"
    assert rendezvous({"MASTER_ADDR": "node0"}) == ""


def test_elastic_restarts_are_counted() -> None:
    assert attempt({}) == 0
    assert attempt({"TORCHELASTIC_RESTART_COUNT": "2"}) == 2


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / BOOTSTRAP_FOLDER).mkdir()
    return tmp_path


def claim_elsewhere(folder: Path, attempt: int = 0, *, then: str = "") -> subprocess.Popen[str]:
    """Another process claims rank 0 and has done so when this returns."""
    code = (
        "import sys; from pathlib import Path; from perfscope.collectors.claims import claim_rank;"
        f"print(claim_rank(Path({str(folder)!r}), 0, {attempt}, recorded=False), flush=True); {then}"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stdin=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "None\n"
    return process


def test_a_rank_is_claimed_once_and_by_its_holder_again(folder: Path) -> None:
    assert claim_rank(folder, 0, 0, recorded=False) is None
    assert claim_rank(folder, 0, 0, recorded=False) is None
    assert claim_rank(folder, 1, 0, recorded=False) is None


def test_a_living_holder_keeps_the_claim_and_a_later_attempt_takes_it(folder: Path) -> None:
    process = claim_elsewhere(folder, then="sys.stdin.read()")
    try:
        holder = claim_rank(folder, 0, 0, recorded=False)
        assert holder is not None
        assert holder.pid == process.pid
        assert claim_rank(folder, 0, 1, recorded=False) is None
    finally:
        process.communicate("")


def test_a_dead_holder_is_replaced_unless_it_left_a_recording(folder: Path) -> None:
    process = claim_elsewhere(folder)
    process.communicate("")
    assert claim_rank(folder, 0, 0, recorded=True) is not None
    assert claim_rank(folder, 0, 0, recorded=False) is None


def test_an_earlier_attempt_does_not_take_a_claim_back(folder: Path) -> None:
    claim_elsewhere(folder, attempt=3).communicate("")
    assert claim_rank(folder, 0, 2, recorded=False) is not None


def test_another_process_with_the_same_pid_is_not_the_holder() -> None:
    mine = Claim.mine(0)
    assert mine.alive()
    assert not Claim(mine.host, os.getpid(), "another time", 0).alive()


def test_a_broken_claim_is_replaced(folder: Path) -> None:
    (folder / BOOTSTRAP_FOLDER / "claim-00000.json").write_text("{")
    assert claim_rank(folder, 0, 0, recorded=False) is None
