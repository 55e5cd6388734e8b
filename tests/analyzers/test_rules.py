"""Every rule: a case in which it fires, one in which it nearly does and rightly stays silent."""

from __future__ import annotations

import dataclasses

import pytest

from perfscope.analyzers.facts import JobFacts
from perfscope.analyzers.rules import dataloader_workers, ddp_buckets, evaluate, straggling_rank
from perfscope.analyzers.verdict import verdict
from perfscope.findings import Action, Confidence, Obtained, Prediction, Severity
from perfscope.metadata import RunMetadata
from perfscope.summary import ROWS, AccountRow, CollectiveRow, CostRow, DataLoaderRow, StragglerRow

STEP_US = 100_000.0


def account(rank: int, **rows: float) -> AccountRow:
    """A rank whose time outside ``rows`` is compute."""
    values = {f"{name}_us": rows.get(name, 0.0) for name in ROWS}
    values["compute_us"] = STEP_US - sum(values.values())
    exposed = values["exposed_comm_wait_us"] + values["exposed_comm_transfer_us"]
    return AccountRow(rank=rank, step_time_us=STEP_US, comm_us=exposed, hidden_comm_us=0.0, **values)


def facts(*ranks: AccountRow, **others: object) -> JobFacts:
    known = {
        "step_time_us": STEP_US, "steps": 8, "ranks": tuple(row.rank for row in ranks), "missing_ranks": (),
        "accounting": ranks, "dataloader": (), "collectives": (), "cost_model": (), "stragglers": (),
        "strategies": ("ddp",), "perturbation": None, "runs": {},
    }  # fmt: skip
    return JobFacts(**{**known, **others})  # type: ignore[arg-type]


def starved(blocking_us: float, *, workers: int | None = 0, batch_us: float | None = None, cores: int = 16) -> JobFacts:
    row = DataLoaderRow(
        rank=0, wait_us=blocking_us, blocking_us=blocking_us, batch_us=batch_us or blocking_us, num_workers=workers
    )
    runs = {0: RunMetadata(rank=0, cpu_count=cores, local_world_size=1)}
    return facts(account(0, idle_dataloader=blocking_us), dataloader=(row,), runs=runs)


class TestDataloaderWorkers:
    def test_recommends_the_smallest_number_that_keeps_up(self):
        # Loading takes 80 ms, the rest of the step 20 ms: 4 workers finish a batch every 20 ms.
        finding = dataloader_workers.evaluate(starved(80_000))
        assert finding is not None
        assert (finding.action.old, finding.action.new) == ("0", "4")
        assert "num_workers=4" in finding.action.how
        assert finding.ceiling == pytest.approx(100 / 20 - 1)
        assert finding.severity is Severity.HIGH
        assert finding.confidence is Confidence.HIGH

    def test_fires_from_five_percent(self):
        assert dataloader_workers.evaluate(starved(5_000)) is not None
        assert dataloader_workers.evaluate(starved(4_900)) is None

    def test_does_not_ask_for_more_workers_than_cores(self):
        finding = dataloader_workers.evaluate(starved(80_000, cores=2))
        assert finding is not None
        assert finding.action.new == "2"
        # Two workers finish a batch every 40 ms: the step cannot go below that.
        assert finding.ceiling == pytest.approx(100 / 40 - 1)
        assert "all the cores allow" in finding.action.how

    def test_says_so_when_the_cores_are_the_limit_already(self):
        finding = dataloader_workers.evaluate(starved(50_000, workers=2, batch_us=200_000, cores=2))
        assert finding is None or finding.action.new == finding.action.old

    def test_workers_that_do_not_keep_up(self):
        # Two workers deliver one batch each 100 ms step: 200 ms a batch; 40 ms of other work need 5 of them.
        finding = dataloader_workers.evaluate(starved(60_000, workers=2, batch_us=200_000))
        assert finding is not None
        assert (finding.action.old, finding.action.new) == ("2", "5")

    def test_unknown_number_of_workers_gets_no_number(self):
        row = DataLoaderRow(rank=0, wait_us=60_000, blocking_us=60_000, batch_us=None, num_workers=None)
        finding = dataloader_workers.evaluate(facts(account(0, idle_dataloader=60_000), dataloader=(row,)))
        assert finding is not None
        assert finding.action.new is None

    def test_one_starving_rank_is_left_to_the_straggler_rule(self):
        rows = (
            DataLoaderRow(rank=0, wait_us=50, blocking_us=50, batch_us=50, num_workers=0),
            DataLoaderRow(rank=1, wait_us=50_000, blocking_us=50_000, batch_us=50_000, num_workers=0),
        )
        late = StragglerRow(rank=1, cause="dataloader", lost_us=50_000, confidence="high")
        ranks = (account(0, exposed_comm_wait=50_000), account(1, idle_dataloader=50_000))
        found = evaluate(facts(*ranks, dataloader=rows, stragglers=(late,)))
        assert [finding.rule for finding in found] == [straggling_rank.RULE]


class TestStragglingRank:
    def late(self, lost_us: float, next_us: float = 0.0, share: float = 0.6) -> JobFacts:
        rows = [
            StragglerRow(
                rank=3, cause="compute", lost_us=lost_us, confidence="high", host="node7", share_of_steps=share
            )
        ]
        if next_us:
            rows.append(StragglerRow(rank=1, cause="host", lost_us=next_us, confidence="medium"))
        return facts(account(1, exposed_comm_wait=lost_us), account(3), stragglers=tuple(rows))

    def test_names_rank_host_and_cause(self):
        finding = straggling_rank.evaluate(self.late(25_000))
        assert finding is not None
        assert "Rank 3" in finding.title
        assert "computation" in finding.title
        assert "node7" in finding.action.setting
        assert finding.ceiling == pytest.approx(100 / 75 - 1)

    def test_silent_below_five_percent_and_where_ranks_take_turns(self):
        assert straggling_rank.evaluate(self.late(4_900)) is None
        assert straggling_rank.evaluate(self.late(10_000, next_us=4_000)) is None
        assert straggling_rank.evaluate(self.late(10_000, next_us=3_000)) is not None
        assert straggling_rank.evaluate(self.late(10_000, next_us=4_000, share=0.875)) is not None
        assert straggling_rank.evaluate(self.late(16_000, next_us=14_000)) is not None

    def test_a_slow_cpu_is_not_looked_for_with_nvidia_smi(self):
        case = dataclasses.replace(self.late(25_000), runs={3: RunMetadata(rank=3)})
        finding = straggling_rank.evaluate(case)
        assert finding is not None
        assert "nvidia" not in finding.action.how
        assert "OMP_NUM_THREADS" in finding.action.how

    def test_every_cause_of_the_contract_has_a_remedy(self):
        for cause in ("compute", "dataloader", "launch", "host", "sync", "copy", "communication"):
            row = StragglerRow(rank=0, cause=cause, lost_us=30_000, confidence="high")
            finding = straggling_rank.evaluate(facts(account(0), account(1), stragglers=(row,)))
            assert finding is not None
            assert finding.action.how


class TestDdpBuckets:
    def reduced(self, counts: dict[int, int], *, alpha_us: float, gbps: float, exposed_us: float, **others) -> JobFacts:
        """``counts``: bucket bytes -> all-reduces a step; two ranks, so that bus bandwidth is algorithm bandwidth."""
        rows = tuple(
            CollectiveRow(
                group="0", ranks=(0, 1), kind="all_reduce", dtype="float32", bytes=size, count=8 * count,
                transfer_us=alpha_us + size / gbps / 1e3, wait_us=0.0, algbw_gbps=gbps, busbw_gbps=gbps,
                last_arriver={},
            )
            for size, count in counts.items()
        )  # fmt: skip
        cost = CostRow(group="0", kind="all_reduce", alpha_us=alpha_us, busbw_gbps=gbps, residual=0.01)
        ranks = tuple(account(rank, exposed_comm_transfer=exposed_us) for rank in (0, 1))
        runs = {0: RunMetadata(settings={"ddp": {"bucket_cap_mb": 1.0}})}
        return facts(*ranks, **{"collectives": rows, "cost_model": (cost,), "runs": runs, **others})

    def test_many_small_buckets_want_a_larger_cap(self):
        # 100 buckets of 1 MiB: 300 us to start each, 105 us to move it at 10 GB/s.
        finding = ddp_buckets.evaluate(self.reduced({1 << 20: 100}, alpha_us=300, gbps=10, exposed_us=30_000))
        assert finding is not None
        assert finding.action.old == "1"
        # 4·alpha/slope = 12 MB, rounded up to 12 MiB: 9 buckets instead of 100 save 91·300 us.
        assert finding.action.new == "12"
        assert finding.ceiling == pytest.approx(100_000 / (100_000 - 91 * 300) - 1)

    def test_a_late_big_bucket_wants_a_smaller_cap(self):
        # 200 MB in two buckets, the larger 180 MB: 18 ms at 10 GB/s, all of it after the backward.
        late = self.reduced({20_000_000: 1, 180_000_000: 1}, alpha_us=100, gbps=10, exposed_us=18_000)
        finding = ddp_buckets.evaluate(late)
        assert finding is not None
        # sqrt(100 us · 200 MB / 0.0001 us/B) = 14.1 MB.
        assert finding.action.new == "13"
        assert "too big" in finding.title

    @pytest.mark.parametrize(
        "change",
        [
            {"strategies": ("fsdp",)},
            {"cost_model": ()},
            {"steps": 0},
            {"collectives": ()},
            {"runs": {0: RunMetadata(settings={"ddp": {"implementation": "horovod"}})}},
        ],
    )
    def test_silent_without_torchs_ddp_a_cost_model_steps_or_all_reduces(self, change):
        case = self.reduced({1 << 20: 100}, alpha_us=300, gbps=10, exposed_us=30_000)
        assert ddp_buckets.evaluate(dataclasses.replace(case, **change)) is None

    def test_silent_when_hidden_or_when_the_size_is_right(self):
        assert ddp_buckets.evaluate(self.reduced({1 << 20: 100}, alpha_us=300, gbps=10, exposed_us=4_900)) is None
        right = self.reduced({25 << 20: 4, 1 << 20: 1}, alpha_us=30, gbps=10, exposed_us=8_000)
        assert ddp_buckets.evaluate(right) is None


@pytest.mark.parametrize(
    ("high_share", "confidence"), [(0.9, Confidence.HIGH), (1.1, Confidence.MEDIUM)], ids=["a gain", "perhaps none"]
)
def test_no_advice_is_sure_whose_gain_is_in_doubt(high_share, confidence):
    step_ns = STEP_US * 1e3
    told = Prediction(low=0.5 * step_ns, mid=0.7 * step_ns, high=high_share * step_ns)
    finding, *_ = evaluate(dataclasses.replace(starved(80_000), predict=lambda changes: told))
    assert finding.predicted_step_ns == told
    assert finding.confidence is confidence


@pytest.mark.parametrize(
    ("perturbation", "confidence"),
    [(None, Confidence.HIGH), (1.2, Confidence.HIGH), (1.3, Confidence.MEDIUM), (3.6, Confidence.LOW)],
)
def test_no_finding_is_surer_than_its_recording(perturbation, confidence):
    (finding,) = evaluate(dataclasses.replace(starved(80_000), perturbation=perturbation))
    assert finding.confidence is confidence


class TestVerdict:
    def test_healthy_says_so_and_how_much_is_compute(self):
        said = verdict(facts(account(0, exposed_comm_transfer=8_000), account(1, exposed_comm_transfer=8_000)), ())
        assert said.healthy
        assert "92%" in said.headline
        assert said.first_action is None

    def test_a_large_loss_without_a_rule_is_not_called_healthy(self):
        said = verdict(facts(account(0, idle_sync=30_000)), ())
        assert not said.healthy
        assert "synchronisation" in said.headline

    def test_the_first_finding_is_the_headline_and_its_setting_the_first_action(self):
        case = starved(80_000)
        said = verdict(case, evaluate(case))
        assert "Data loading" in said.headline
        assert said.first_action is not None
        assert said.first_action.startswith("Set DataLoader(num_workers=4) (now 0).")
        assert "at most 400% more" in said.first_action

    @pytest.mark.parametrize(
        ("setting", "old", "new", "said"),
        [
            ("OMP_NUM_THREADS", "8", "1", "Set OMP_NUM_THREADS to 1 (now 8)."),
            ("batch size per rank", None, "16", "Set batch size per rank to 16."),
            ("TrainingArguments(bf16=True)", "float32", "bfloat16", "Set TrainingArguments(bf16=True) (now float32)."),
            ("--overlap-grad-reduce", "not set", "set", "Set --overlap-grad-reduce (now not set)."),
            ("DistributedDataParallel.no_sync()", "not used", "used", "As it is written."),
            ("FSDP units", "48 gathers a step", "larger units", "As it is written."),
        ],
    )
    def test_the_first_action_names_the_value_or_says_how(self, setting, old, new, said):
        case = starved(80_000)
        (finding, *_) = evaluate(case)
        action = Action(setting=setting, old=old, new=new, how="As it is written.")
        first = verdict(case, (dataclasses.replace(finding, action=action),)).first_action
        assert first is not None
        assert first.startswith(f"{said} It can bring")

    def test_the_first_action_brings_what_was_predicted(self):
        case = starved(80_000)
        (finding, *_) = evaluate(case)
        prediction = Prediction(low=70e6, mid=80e6, high=90e6)
        played = dataclasses.replace(finding, predicted_step_ns=prediction, obtained=Obtained.REPLAYED)
        first = verdict(case, (played,)).first_action
        assert first is not None
        assert "It can bring about 25% more steps a second." in first

    def test_a_replay_that_gains_more_raises_the_bound(self):
        case = dataclasses.replace(
            starved(10_000), predict=lambda settings: Prediction(low=50e6, mid=50e6, high=50e6) if settings else None
        )
        gains = {
            finding.rule: (finding.ceiling, STEP_US * 1e3 / finding.predicted_step_ns.mid - 1)
            for finding in evaluate(case)
            if finding.predicted_step_ns is not None
        }
        assert gains["dataloader-workers"] == pytest.approx((1.0, 1.0))

    def test_findings_come_worst_first(self):
        late = StragglerRow(rank=0, cause="host", lost_us=10_000, confidence="high")
        case = dataclasses.replace(starved(80_000), stragglers=(late,))
        assert [finding.rule for finding in evaluate(case)] == [dataloader_workers.RULE, straggling_rank.RULE]
