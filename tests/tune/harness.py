"""Real trainings under settings applied from outside."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from perfscope.collectors.config import CollectorConfig
from perfscope.collectors.launch.folder import package_root
from perfscope.collectors.launch.run import Launch, child_environment
from perfscope.collectors.overrides.overrides import Overrides
from perfscope.recording.metadata import load_run
from perfscope.recording.paths import BOOTSTRAP_FOLDER, run_file
from tests.collectors.harness import of_ranks
from tests.waiting import PATIENCE_S, free_port

JOB = Path(__file__).parent / "scripts" / "job.py"
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")


def job(*arguments: object) -> tuple[str, ...]:
    """The command of a two-rank training."""
    return (*TORCHRUN, str(JOB), *(str(argument) for argument in arguments))


def environment() -> dict[str, str]:
    """One thread per rank, as on a machine with few cores."""
    return {**os.environ, "OMP_NUM_THREADS": "1"}


def trained(
    folder: Path, overrides: Overrides, *arguments: object, steps: int = 12
) -> tuple[list[Any], dict[str, Any]]:
    """Each rank's losses and last parameters, and what rank 0 reports as applied."""
    config = CollectorConfig(output=str(folder), package_root=package_root(), mode="steps", sample_every=0.0)
    options = map(str, ("--steps", steps, "--losses", folder, *arguments))
    command = of_ranks(2, str(JOB), *options)  # sooner than torchrun, which imports torch to start them
    Launch(config, command).prepare()
    overrides.save(folder / BOOTSTRAP_FOLDER)
    result = subprocess.run(
        command,
        env=child_environment({**environment(), "MASTER_PORT": str(free_port())}, folder / BOOTSTRAP_FOLDER),
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert result.returncode == 0, result.stderr[-3000:]
    ranks = [json.loads((folder / f"rank-{rank}.json").read_text(encoding="utf-8")) for rank in range(2)]
    return ranks, load_run(run_file(folder, 0)).applied
