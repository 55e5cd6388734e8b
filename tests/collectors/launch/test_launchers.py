"""Real launchers, several nodes as several agents on loopback: who the ranks are and where their recording goes."""

from __future__ import annotations

import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from perfscope.analyzers.analyze import analyze
from perfscope.analyzers.job.system.samples import read_samples
from perfscope.recording.gather import gather
from perfscope.recording.job import open_job
from perfscope.recording.metadata import load_launch
from perfscope.recording.paths import LAUNCH_FILE
from tests.collectors.harness import SCRIPTS, SHORT, Recording, needs_torch, record
from tests.waiting import free_port

pytestmark = [pytest.mark.training, needs_torch]

DDP = str(SCRIPTS / "ddp.py")


def agent(node: int, port: int, *more: str) -> tuple[str, ...]:
    """torchrun on one of two nodes, which meet by rendezvous."""
    return (
        sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--node-rank", str(node), "--nproc-per-node",
        "1", "--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{port}", "--rdzv-id", "two-nodes", *more,
    )  # fmt: skip


def on_two_nodes(folders: tuple[Path, Path], *options: str) -> list[Recording]:
    """What two nodes record of DDP, whose samplers are up before the recorded steps also on a busy machine."""
    port = free_port()
    script = (DDP, "--settle", "2")
    with ThreadPoolExecutor(2) as nodes:
        return list(
            nodes.map(
                lambda node: record(folders[node], *agent(node, port), *script, options=(*SHORT, *options)), range(2)
            )
        )


def identities(*recordings: Recording) -> dict[int, tuple[int, int, int]]:
    """rank -> (world size, local rank, local world size)."""
    found = {}
    for recording in recordings:
        for rank, run in open_job(recording.folder).runs.items():
            found[rank] = (run.world_size, run.local_rank, run.local_world_size)
    return found


def test_nodes_that_share_no_file_system(tmp_path: Path) -> None:
    """Each writes its own folder; gathered they are one recording, with every rank and on one clock."""
    recordings = on_two_nodes((tmp_path / "a", tmp_path / "b"))
    assert [recording.exit_code for recording in recordings] == [0, 0], recordings[0].err + recordings[1].err
    assert identities(*recordings) == {0: (2, 0, 1), 1: (2, 0, 1)}
    meeting = {run.rendezvous for recording in recordings for run in open_job(recording.folder).runs.values()}
    assert len(meeting) == 1
    assert meeting != {""}
    result = gather([str(recording.folder) for recording in recordings], tmp_path / "all")
    assert (result.ranks, result.missing) == ((0, 1), ())
    launch = load_launch(tmp_path / "all" / LAUNCH_FILE)
    assert (len(launch.nodes), launch.exit_code) == (2, 0)
    summary = analyze(tmp_path / "all", workers=1)
    assert summary.job.missing_ranks == ()
    assert all(row.aligned for row in summary.clock)
    assert summary.system is not None
    (samples,) = (tmp_path / "all").glob("host-*.samples.jsonl")  # both nodes are this host
    assert len(read_samples(samples, 0, 2**62)) == 2


def test_nodes_that_share_a_folder(tmp_path: Path) -> None:
    folder = tmp_path / "shared"
    recordings = on_two_nodes((folder, folder), "--join")
    assert [recording.exit_code for recording in recordings] == [0, 0], recordings[0].err + recordings[1].err
    assert identities(recordings[0]) == {0: (2, 0, 1), 1: (2, 0, 1)}


def test_a_restart_is_recorded_by_those_that_come_after(tmp_path: Path) -> None:
    recording = record(
        tmp_path / "recording", sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2",
        "--max-restarts", "1", str(SCRIPTS / "restart.py"), str(tmp_path / "store"),
        options=("--wait", "1", "--warmup", "0", "--active", "4"),
    )  # fmt: skip
    assert recording.exit_code == 0, recording.err
    runs = [recording.run(rank) for rank in (0, 1)]
    assert [(run.attempt, run.rank, run.local_rank, run.outcome) for run in runs] == [
        (1, 0, 0, "finished"), (1, 1, 1, "finished"),
    ]  # fmt: skip
    assert analyze(recording.folder, workers=1).job.ranks == (0, 1)


def test_torch_distributed_launch(tmp_path: Path) -> None:
    recording = record(
        tmp_path / "recording", sys.executable, "-W", "ignore", "-m", "torch.distributed.launch", "--use-env",
        "--nproc-per-node", "2", "--master-port", str(free_port()), DDP, options=SHORT,
    )  # fmt: skip
    assert recording.exit_code == 0, recording.err
    assert identities(recording) == {0: (2, 0, 2), 1: (2, 1, 2)}


@pytest.mark.parametrize("program", ["mpirun.openmpi", "mpiexec.hydra"])
def test_mpi(tmp_path: Path, program: str) -> None:
    if shutil.which(program) is None:
        pytest.skip(f"no {program} on this machine")
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    rights = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    more = ("--oversubscribe",) if "openmpi" in program else ()
    recording = record(
        tmp_path / "recording", program, *more, "-np", "2", sys.executable, str(SCRIPTS / "mpi.py"),
        options=SHORT, environment={**place, **rights},
    )  # fmt: skip
    assert recording.exit_code == 0, recording.err
    assert identities(recording) == {0: (2, 0, 2), 1: (2, 1, 2)}


def test_slurm(tmp_path: Path) -> None:
    if shutil.which("srun") is None or subprocess.run(["sinfo"], capture_output=True, check=False).returncode:
        pytest.skip("no Slurm cluster on this machine")
    recording = record(
        tmp_path / "recording", "srun", "--ntasks", "2", sys.executable, str(SCRIPTS / "slurm.py"), options=SHORT
    )
    assert recording.exit_code == 0, recording.err
    assert identities(recording) == {0: (2, 0, 2), 1: (2, 1, 2)}
