"""Which role a process has, and that processes of different roles never record into one job."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from perfscope.collectors.identity import Identity
from perfscope.collectors.jobs import join_job
from perfscope.collectors.role import stated_role
from perfscope.recording.paths import BOOTSTRAP_FOLDER


@pytest.mark.parametrize(
    ("environment", "role"),
    [
        ({"PERFSCOPE_ROLE": "judge", "ROLE_NAME": "trainer"}, "judge"),
        ({"PERFSCOPE_ROLE": " ", "ROLE_NAME": "trainer"}, "trainer"),
        ({"ROLE_NAME": "default"}, ""),
        ({}, ""),
    ],
)
def test_the_environment_states_a_role(environment: dict[str, str], role: str) -> None:
    assert stated_role(environment) == role


_CHILD = """
import json, multiprocessing, sys
from dataclasses import asdict
def child():
    from perfscope.collectors.role import identify_with_role, stated_role
    role = stated_role({})
    print(json.dumps([role, asdict(identify_with_role(role))["world_size"]]), flush=True)
process = multiprocessing.get_context("fork").Process(target=child, name=sys.argv[1])
process.start()
process.join()
"""


@pytest.mark.parametrize(
    ("name", "role", "world_size"), [("rollout-3", "rollout", 1), ("RewardWorker", "reward", 1), ("Process-1", "", 2)]
)
def test_a_child_that_a_rank_started_for_another_role_is_no_rank(name: str, role: str, world_size: int) -> None:
    """It inherits the rank's variables all the same; without a role of its own it may be the rank itself."""
    environment = {**os.environ, "RANK": "0", "WORLD_SIZE": "2", "PYTHONPATH": ":".join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", _CHILD, name], env=environment, capture_output=True, text=True, check=True
    )
    assert json.loads(done.stdout) == [role, world_size]


def test_the_title_of_a_ray_actor_states_its_class(tmp_path: Path) -> None:
    titled = "exec -a ray::RolloutWorker.generate " + sys.executable
    code = "from perfscope.collectors.role import stated_role; print(stated_role({}))"
    done = subprocess.run(
        ["bash", "-c", f'{titled} -c "{code}"'], capture_output=True, text=True, check=True,
        env={**os.environ, "PYTHONPATH": ":".join(sys.path)},
    )  # fmt: skip
    assert done.stdout.strip() == "rollout"


def test_roles_of_one_size_and_port_record_into_folders_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    monkeypatch.setenv("MASTER_PORT", "29500")
    (tmp_path / BOOTSTRAP_FOLDER).mkdir()
    places = [join_job(tmp_path, Identity(rank, 2), role) for role in ("learner", "rollout") for rank in range(2)]
    assert places == [tmp_path, tmp_path, tmp_path / "job-1", tmp_path / "job-1"]
