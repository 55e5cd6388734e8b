"""Several roles of one recording: told apart, never in one account, and put side by side with who waits for whom."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path

import pytest

from perfscope import analyze
from perfscope.errors import UnusableInput
from perfscope.recording.role_jobs import open_main
from perfscope.recording.roles import kind_of_role, role_in_name
from perfscope.reports import terminal
from perfscope.reports.page import page
from perfscope.results.anonymous import anonymous
from perfscope.results.roles.side_by_side import Roles
from perfscope.results.summary import Summary
from tests.analyzers.roles.recorded import BASE_US, Process, Turns, in_turns, on_grid


@pytest.mark.parametrize(
    ("name", "role", "kind"),
    [
        ("actor_update", "actor_update", "update"),
        ("ref_compute_log_prob", "ref_compute_log_prob", "reference"),
        ("actor_compute_log_prob", "actor_compute_log_prob", "reference"),
        ("rollout_generate", "rollout_generate", "rollout"),
        ("agent_loop_rollout_replica_12", "agent_loop_rollout", "rollout"),
        ("rollout_step_5", "rollout", "rollout"),
        ("e2e", "e2e", "update"),
        ("actor_actor_update_rank0-of-8_tp0-pp0-dp0_pid7_20260113101500123.json.gz", "actor_update", "update"),
        ("actor_actor-compute-log-prob_step1_rank0-of-2_pid8_20261123.json.gz", "actor_compute_log_prob", "reference"),
        ("actor_rollout-generate_step12_rank1-of-2_pid8_20261123.json.gz", "actor_rollout_generate", "rollout"),
        ("actor_train_step1_rank0-of-2_pid8_20261123134810725.json.gz", "actor_train", "update"),
        ("critic_prof_rank-0.json.gz", "critic", "critic"),
        ("train_log_probs_rank_0.1718000000123.pt.trace.json.gz", "train_log_probs", "reference"),
        ("train_overall_rank_0.1718000000123.pt.trace.json.gz", "train_overall", "update"),
        ("actor_gpu-node_worker_process_4242.nsys-rep", "actor", "update"),
        ("vllm_generation_worker_0.nsys-rep", "vllm_generation", "rollout"),
        ("RewardModelWorker", "reward_model", "reward"),
        ("rank0_step10.json", "", "other"),
        ("node1_4242.1717000000123.pt.trace.json.gz", "", "other"),
        ("preference.json", "", "other"),
    ],
)
def test_roles_in_names(name: str, role: str, kind: str) -> None:
    assert role_in_name(name) == role
    assert kind_of_role(role) == kind


def iterations_of(folder: Path, turns: dict[str, list[Turns]]) -> Path:
    """A folder a role; the learner has two ranks that work alike."""
    for number, mine in enumerate(turns["rollout"]):
        Process("rollout", mine, pid=200 + number, name="generate").write(
            folder / f"rollout_replica_{number}" / "t.json"
        )
    for rank in range(2):
        learner = Process("learner", turns["learner"][0], rank, 2, pid=100 + rank, name="update", marked=True)
        learner.write(folder / "learner" / f"rank{rank}.json")
    return folder


def roles_of(summary: Summary) -> Roles:
    assert summary.roles is not None
    return summary.roles


def start_us(roles: Roles) -> float:
    return datetime.fromisoformat(roles.start).timestamp() * 1e6 - BASE_US


@pytest.mark.parametrize(("seed", "update_us", "bound"), [(1, 20_000, "rollout"), (2, 200_000, "learner")])
def test_who_waits_for_whom_is_what_was_planted(tmp_path: Path, seed: int, update_us: int, bound: str) -> None:
    turns = in_turns(seed, update_us=update_us)
    summary = analyze(iterations_of(tmp_path, turns))
    roles = roles_of(summary)
    begin = start_us(roles)
    busy = {role: on_grid(each, begin, begin + roles.window_us) for role, each in turns.items()}
    assert roles.together
    assert roles.stated
    assert roles.iterations >= 8
    assert roles.bound == bound
    rows = {row.role: row for row in roles.rows}
    for role, other in (("rollout", "learner"), ("learner", "rollout")):
        assert rows[role].busy_share == pytest.approx(busy[role].mean(), abs=0.005)
        assert rows[role].waits[other] == pytest.approx((~busy[role] & busy[other]).mean(), abs=0.005)
        assert rows[role].idle_share == pytest.approx((~busy[role] & ~busy[other]).mean(), abs=0.005)
        waits = sum(rows[role].waits.values())
        assert rows[role].busy_share + waits + rows[role].idle_share == pytest.approx(1, abs=1e-9)
    assert roles.headline.startswith(f"{bound.capitalize()} takes ")
    assert summary.verdict.headline == roles.headline
    assert summary.job.ranks == (0, 1)
    assert rows["rollout"].jobs == 2


def test_every_job_has_its_own_account(tmp_path: Path) -> None:
    """What the rollout does changes nothing in the learner's account, and the other way round."""
    turns = in_turns(3)
    iterations_of(tmp_path, turns)
    summary = analyze(tmp_path)
    alone = analyze(tmp_path / "learner")
    assert alone.roles is None
    assert summary.time_breakdown == alone.time_breakdown
    assert summary.job.step_time_us == alone.job.step_time_us
    jobs = {row.job: row for row in roles_of(summary).jobs}
    assert list(jobs) == ["learner", "rollout-0", "rollout-1"]
    assert [jobs[name].steps > 0 for name in jobs] == [True, False, False]
    assert analyze(tmp_path, role="rollout-1").job.ranks == (0,)
    with pytest.raises(UnusableInput, match="no role critic; choose from learner, rollout-0, rollout-1"):
        analyze(tmp_path, role="critic")


def test_of_several_busy_roles_the_last_to_end_is_waited_for(tmp_path: Path) -> None:
    turns = {"learner": [], "reward": [], "rollout": []}
    for start in range(0, 1_000_000, 100_000):
        turns["rollout"].append((start, start + 50_000))
        turns["reward"].append((start + 20_000, start + 80_000))
        turns["learner"].append((start + 80_000, start + 100_000))
    for number, (role, mine) in enumerate(turns.items()):
        Process(role, mine, pid=100 + number).write(tmp_path / f"{role}.json")
    rows = {row.role: row for row in roles_of(analyze(tmp_path)).rows}
    # 80 ms idle: the reward's 60 ms first, what is left of the rollout's 50 after.
    assert rows["learner"].waits == pytest.approx({"reward": 0.6, "rollout": 0.2}, abs=0.02)


class TestLayouts:
    def test_verl_writes_a_folder_for_each_stage_of_one_process(self, tmp_path: Path) -> None:
        """Discrete: the profiler runs within each stage alone, so what is between is not known."""
        stages = {
            "rollout_generate": (0, 70_000),
            "ref_compute_log_prob": (75_000, 85_000),
            "actor_update": (90_000, 120_000),
        }
        for role, turn in stages.items():
            for rank in range(2):
                process = Process(role, [turn], rank, 2, pid=500 + rank, device=0)
                name = f"actor_{role}_rank{rank}-of-2_tp0-pp0-dp{rank}_pid{500 + rank}_2026011310150012{rank}.json"
                process.write(tmp_path / role / name)
        summary = analyze(tmp_path)
        roles = roles_of(summary)
        assert roles.main == "actor_update"
        assert not roles.together
        assert {row.role: round(row.busy_share, 2) for row in roles.rows} == {
            "actor_update": 0.25, "ref_compute_log_prob": 0.08, "rollout_generate": 0.58
        }  # fmt: skip
        assert all(not row.waits for row in roles.rows)
        assert roles.headline.startswith("Rollout_generate takes 58% of the time")
        assert {device.known_by for device in roles.devices} == {"process"}
        assert [device.hand_overs for device in roles.devices] == [2, 2]

    def test_verl_writes_all_stages_and_steps_into_one_folder(self, tmp_path: Path) -> None:
        """As verl 0.9 does, whose own profiler was run on two gloo ranks for these names."""
        stages = {"rollout-generate": 0, "actor-compute-log-prob": 75_000, "actor-update": 90_000}
        for step in (1, 2):
            for stage, start in stages.items():
                for rank in range(2):
                    begin = start + step * 200_000
                    process = Process("", [(begin, begin + 10_000)], rank, 2, pid=500 + rank, device=0)
                    name = f"actor_{stage}_step{step}_rank{rank}-of-2_pid{500 + rank}_2026112313472{step}80{rank}"
                    process.write(tmp_path / f"{name}.json")
        roles = roles_of(analyze(tmp_path))
        assert [row.role for row in roles.rows] == ["actor_update", "actor_compute_log_prob", "actor_rollout_generate"]
        assert roles.main == "actor_update"
        assert not roles.together
        # Of the two steps the last.
        assert {device.hand_overs for device in roles.devices} == {2}
        assert roles.window_us == pytest.approx(100_000, rel=0.01)

    def test_verl_with_a_server_that_generates(self, tmp_path: Path) -> None:
        turns = in_turns(5, rollouts=2)
        for number, mine in enumerate(turns["rollout"]):
            name = f"dp0_pp0_tp0_dcp0_ep0_rank0.171700000000{number}.pt.trace.json"
            Process("", mine, pid=200 + number).write(tmp_path / f"agent_loop_rollout_replica_{number}" / name)
        for prefix, shift in (("actor", 0), ("critic", 5000)):
            mine = [(start + shift, end + shift) for start, end in turns["learner"][0]]
            Process("", mine, 0, 2, pid=300 + shift).write(tmp_path / "e2e" / f"{prefix}_prof_rank-0.json")
        roles = roles_of(analyze(tmp_path))
        assert [row.role for row in roles.rows] == ["actor", "agent_loop_rollout", "critic"]
        assert roles.main == "actor"
        assert roles.bound == "agent_loop_rollout"

    def test_slime_writes_all_into_one_folder(self, tmp_path: Path) -> None:
        for number, role in enumerate(("train_log_probs", "train_actor")):
            for rank in range(2):
                turn = [(number * 50_000, number * 50_000 + 40_000)]
                process = Process(role, turn, rank, 2, pid=100 + rank)
                process.write(tmp_path / f"{role}_rank_{rank}.171700000{number}00{rank}.pt.trace.json")
        job = open_main(tmp_path)
        assert job.role == "train_actor"
        assert [source.path.name.split("_rank")[0] for source in job.sources] == ["train_actor"] * 2
        assert [row.job for row in roles_of(analyze(tmp_path)).jobs] == ["train_actor", "train_log_probs"]

    def test_folders_of_nothing_that_names_a_role_count_where_they_overlap_in_time(self, tmp_path: Path) -> None:
        for name, start in (("first", 0), ("second", 30_000)):
            Process("", [(start, start + 60_000)], 0, 2, pid=100 + start).write(tmp_path / name / "rank0.json")
        roles = roles_of(analyze(tmp_path))
        assert not roles.stated
        assert roles.bound is None
        assert roles.headline.startswith("2 jobs ran at the same time: first and second.")
        Process("", [(200_000, 260_000)], 0, 2, pid=9).write(tmp_path / "second" / "rank0.json")
        with pytest.raises(UnusableInput, match="name one of these"):
            analyze(tmp_path)

    def test_two_jobs_in_one_folder_are_told_apart_by_their_collectives(self, tmp_path: Path) -> None:
        """Both call themselves ranks 0 and 1 of 2; only their all-reduces show who belongs to whom."""
        for job, shift in enumerate((0, 13_000)):
            for rank in range(2):
                turns = [(start + shift, start + shift + 10_000) for start in range(0, 300_000, 30_000)]
                reduces = [(end, end + 3000) for _, end in turns]
                process = Process("", turns, rank, 2, pid=10 * job + (1 - rank if job else rank) + 1, reduces=reduces)
                process.write(tmp_path / f"node_{process.pid}.17170000000{process.pid:02}.pt.trace.json")
        summary = analyze(tmp_path)
        assert [row.ranks for row in roles_of(summary).jobs] == [(0, 1), (0, 1)]
        assert summary.job.failures == ()
        assert all(row.exposed_comm_wait_us < 500 for row in summary.time_breakdown)

    def test_jobs_of_two_sizes_in_one_folder_are_not_one_account(self, tmp_path: Path) -> None:
        for rank in range(3):
            Process("", [(0, 90_000)], rank, 3, pid=rank + 1).write(
                tmp_path / f"node_{rank + 1}.171700000000{rank}.pt.trace.json"
            )
        Process("", [(10_000, 80_000)], 0, 2, pid=9).write(tmp_path / "node_9.1717000000009.pt.trace.json")
        summary = analyze(tmp_path)
        assert summary.job.ranks == (0, 1, 2)
        assert [(row.ranks, row.world_size) for row in roles_of(summary).jobs] == [((0, 1, 2), 3), ((0,), 2)]


def test_captures_that_share_less_than_a_step_show_no_iteration(tmp_path: Path) -> None:
    """The rollout was recorded in two steps of its own, of which the learner's recording has the end of one."""
    learner = [(at, at + 90_000) for at in range(180_000, 900_000, 180_000)]
    Process("learner", learner, 0, 1, pid=1, marked=True).write(tmp_path / "learner" / "rank0.json")
    Process("rollout", [(0, 80_000), (90_000, 240_000)], pid=2).write(tmp_path / "rollout" / "rank0.json")
    roles = roles_of(analyze(tmp_path))
    assert not roles.together
    assert "recorded one after the other" in roles.headline
    Process("rollout", [(0, 80_000), (90_000, 600_000)], pid=2).write(tmp_path / "rollout" / "rank0.json")
    assert roles_of(analyze(tmp_path)).together


def test_a_device_that_two_jobs_share(tmp_path: Path) -> None:
    turns = {"learner": [(at, at + 30_000) for at in range(0, 1_000_000, 100_000)]}
    turns["rollout"] = [(at + 20_000, at + 80_000) for at in range(0, 1_000_000, 100_000)]
    for number, (role, mine) in enumerate(turns.items()):
        Process(role, mine, pid=7, device=0, rank=0, world=number + 1).write(tmp_path / role / "rank0.json")
    (device,) = roles_of(analyze(tmp_path)).devices
    assert device.shares == pytest.approx({"learner": 0.3, "rollout": 0.6}, abs=0.02)
    assert device.together_share == pytest.approx(0.1, abs=0.02)
    assert device.free_share == pytest.approx(0.2, abs=0.02)


def test_page_terminal_and_json(tmp_path: Path) -> None:
    summary = analyze(iterations_of(tmp_path, in_turns(4)))
    again = Summary.from_dict(summary.to_dict())
    assert again == summary
    html = page.render(summary)
    assert 'href="#roles">Roles side by side' in html
    assert "roles" in summary.figures
    text = terminal.verdict(summary)
    assert "waits for rollout" in text
    assert "The rest is of learner" in text
    frames = summary.frames
    assert list(frames.role_waits.waits_for) == ["rollout", "learner"]
    hidden = anonymous(summary)
    assert "generate" not in str(hidden.to_dict()["roles"]["rows"])
    assert str(tmp_path) not in str(hidden.to_dict())
