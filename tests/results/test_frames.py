"""The summary as DataFrames: every table, its types, and nothing lost on the way."""

from __future__ import annotations

import dataclasses
import doctest
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

import perfscope
from perfscope.results import frames as tables
from perfscope.results.categories import CATEGORIES
from perfscope.results.frames import Frames
from perfscope.results.summary import Summary
from perfscope.results.tables import CurvePoint, CurveRow, KernelRow, MemoryTimeline, Pipeline, RooflineRow, StageRow
from tests.reports.examples import EXAMPLES, gpu, healthy, starved, straggler
from tests.results import api_reference

NOT_TABLES = {"capture", "verdict", "ncu_command", "perfscope_version", "source"}
"""Fields of a summary that are no tables."""
TABLES_OF = {"job": {"job", "steps", "failures"}, "pipeline": {"pipeline", "stages"}}
TABLES_OF |= {"time_breakdown": {"time_breakdown", "named_host"}, "collectives": {"collectives", "last_arrivers"}}
TABLES_OF |= {"utilisation": {"utilisation", "flops_by_dtype"}}
TABLES_OF |= {
    "history": {"history", "history_ranks", "history_stages", "history_bin_stages", "outlier_steps", "slow_ranks"}
}
TABLES_OF["history"] |= {"history_stragglers", "goodput", "recording_cost"}
TABLES_OF |= {"hang": {"hang", "hang_missing", "hang_victims", "hang_call_sites", "hang_mismatches"}}
TABLES_OF |= {"findings": {"findings", "evidence"}, "cost": {"cost", "savings"}}
TABLES_OF |= {"snapshots": {"memory_snapshots", "memory_holders", "memory_growth", "memory_failures"}}
TABLES_OF |= {"roles": {"roles", "role_waits", "role_phases", "role_jobs", "role_turns", "shared_devices"}}
TABLES_OF |= {"system": {"hosts", "devices", "throttled", "processes", "system_timeline"}}
"""Fields of a summary that make several tables, or tables of other names."""

UNITLESS = {"current", "best", "value", "step", "rank", "index", "device", "finding", "depth", "stage", "slowest_rank"}
"""Numbers that have no unit, or name it in another column."""


def kernel(**changes: Any) -> KernelRow:
    values: dict[str, Any] = {
        "name": "gemm", "category": "compute", "operator": "aten::mm", "operator_class": "matrix",
        "count_per_step": 2.0, "us_per_step": 200.0, "mean_us": 100.0, "min_us": 90.0, "max_us": 110.0, "share": 0.5,
        "slowest_rank": 3, "slowest_over_median": 1.1, "dtype": "bfloat16", "tensor_cores": True, "tflops": 300.0,
        "share_of_peak": 0.3,
    }  # fmt: skip
    return KernelRow(**{**values, **changes})


def full() -> Summary:
    """A summary with something in tables that the examples leave empty."""
    stage = StageRow(
        stage=0, ranks=(0, 1), busy_us=10.0, bubble_start_us=1.0, bubble_steady_us=0.0, bubble_drain_us=2.0,
        forward_us=None, backward_us=None, flops_per_step=None,
    )  # fmt: skip
    roofline = RooflineRow(
        compute_share=0.7, memory_share=0.2, dram_share=None, occupancy=0.5, instances=3, bound="compute"
    )
    return dataclasses.replace(
        straggler(),
        kernels=(kernel(roofline=roofline), kernel(name="add", tensor_cores=None, slowest_rank=None)),
        memory_timeline=(
            MemoryTimeline(
                rank=0, device=0, time_us=(0.0, 5.0), allocated_bytes=(1 << 40, 2), reserved_bytes=(None, 4)
            ),
        ),
        curves=(
            CurveRow(
                setting="ddp.bucket_cap_mb", unit="MiB", current=None, best=25.0,
                points=(
                    CurvePoint(value=25.0, low_us=90.0, mid_us=95.0, high_us=99.0),
                    CurvePoint(value=50.0, low_us=92.0, mid_us=97.0, high_us=99.5),
                ),
            ),
        ),
        pipeline=Pipeline(
            stages=(stage,), microbatches=None, virtual_stages=1, schedule="1f1b", bubble_share=0.2,
            ideal_bubble_share=None, imbalance=1.1,
        ),
    )  # fmt: skip


class TestTables:
    def test_every_part_of_a_summary_is_a_table(self) -> None:
        parts = {field.name for field in dataclasses.fields(Summary)} - NOT_TABLES
        expected = {table for part in parts for table in TABLES_OF.get(part, {part})}
        assert set(tables.TABLES) == expected, "perfscope.results.frames lacks a table, or has one too many"

    def test_every_table_is_an_attribute_that_says_what_it_holds(self) -> None:
        attributes = {name for name in dir(Frames) if not name.startswith("_")}
        assert attributes == {*tables.TABLES, "describe"}
        for name in tables.TABLES:
            assert getattr(Frames, name).__doc__

    @pytest.mark.parametrize("example", EXAMPLES)
    def test_rows_and_types_do_not_depend_on_what_is_there(self, example: str) -> None:
        frames, others = EXAMPLES[example]().frames, full().frames
        for name in frames:
            assert frames[name] is getattr(frames, name)
            assert frames[name].dtypes.to_dict() == others[name].dtypes.to_dict()
            assert isinstance(frames[name].index, pd.RangeIndex)

    @pytest.mark.parametrize("name", tables.TABLES)
    def test_every_number_has_a_unit_in_its_description(self, name: str) -> None:
        described = healthy().frames.describe(name)
        assert list(described["column"]) == list(healthy().frames[name].columns)
        for row in described.itertuples():
            assert row.meaning, f"{name}.{row.column} has no meaning: annotate its field"
            if row.dtype in ("float64",) and row.column not in UNITLESS:
                assert row.unit, f"{name}.{row.column} has no unit in its annotation"

    def test_an_unknown_table_names_those_that_there_are(self) -> None:
        with pytest.raises(KeyError, match="no table 'nonsense'; there are job, steps, time_breakdown"):
            healthy().frames["nonsense"]
        with pytest.raises(KeyError, match="no table"):
            healthy().frames.describe("nonsense")

    def test_the_whole_says_how_large_its_tables_are(self) -> None:
        assert "time_breakdown (2)" in repr(healthy().frames)
        assert len(healthy().frames) == len(list(healthy().frames))


class TestValues:
    def test_a_row_for_each_rank_with_the_numbers_of_the_summary(self) -> None:
        summary = straggler()
        frame = summary.frames.time_breakdown
        assert list(frame["rank"]) == [0, 1, 2, 3]
        assert list(frame["compute_us"]) == [row.compute_us for row in summary.time_breakdown]
        total = frame[[f"{name}_us" for name in CATEGORIES]].sum(axis=1)
        assert total.to_list() == pytest.approx(frame["step_time_us"].to_list())

    def test_who_came_last_has_a_row_for_each_rank(self) -> None:
        frame = straggler().frames.last_arrivers
        assert frame[["bytes", "rank", "share"]].to_numpy().tolist() == [
            [26_214_400, 2, 1.0],
            [1_048_576, 2, 0.83],
            [1_048_576, 1, 0.17],
        ]
        assert "last_arriver" not in straggler().frames.collectives

    def test_evidence_leads_to_its_finding(self) -> None:
        frames = straggler().frames
        joined = frames.evidence.join(frames.findings["title"], on="finding")
        assert joined["title"].str.startswith("Rank 2").sum() == 4
        assert frames.evidence["value"].dtype == "float64"

    def test_what_to_change_is_spread_out_under_the_json_s_names(self) -> None:
        row = straggler().frames.findings.iloc[0]
        assert (row["action_setting"], row["action_from"], row["action_to"]) == ("rank 2 on node-b", None, None)
        assert (row["predicted_step_us_low"], row["predicted_step_us_high"]) == (65_000.0, 71_000.0)
        assert starved().frames.findings["predicted_step_us_low"].isna().all()

    def test_a_row_inside_a_row_is_spread_out_and_missing_where_it_is_not_there(self) -> None:
        frame = full().frames.kernels
        assert frame["roofline_bound"].to_list() == ["compute", None]
        assert frame["roofline_instances"].isna().to_list() == [False, True]
        assert frame["slowest_rank"].dtype == "Int64"
        assert frame["tensor_cores"].dtype == "boolean"
        assert frame["tensor_cores"].isna().to_list() == [False, True]

    def test_bytes_stay_whole_numbers_also_where_some_are_missing(self) -> None:
        frame = full().frames.memory_timeline
        assert frame["allocated_bytes"].to_list() == [1 << 40, 2]
        assert frame["reserved_bytes"].isna().to_list() == [True, False]
        assert frame["reserved_bytes"].dtype == "Int64"

    def test_a_lane_has_a_row_for_each_entry_with_its_texts(self) -> None:
        frame = gpu().frames.lanes
        assert len(frame) == sum(len(lane.start_us) for lane in gpu().lanes)
        collective = frame[frame["lane"] == "communication"].iloc[0]
        assert (collective["name"], collective["group"], collective["bytes"]) == ("all_gather", "fsdp", 404_750_336)
        assert frame["operator"].iloc[0] == "aten::mm"

    def test_a_curve_has_a_row_for_each_point(self) -> None:
        frame = full().frames.curves
        assert frame["value"].to_list() == [25.0, 50.0]
        assert frame["mid_us"].to_list() == [95.0, 97.0]
        assert frame["setting"].unique().tolist() == ["ddp.bucket_cap_mb"]
        assert frame["current"].isna().all()

    def test_steps_strips_and_stages(self) -> None:
        frames = full().frames
        assert frames.steps["step_time_us"].mean() == pytest.approx(straggler().job.step_time_us)
        assert len(frames.step_timeline) == sum(len(strip.start_us) for strip in straggler().step_timeline)
        assert frames.stages["ranks"].to_list() == [(0, 1)]
        assert (len(frames.pipeline), len(healthy().frames.pipeline)) == (1, 0)

    def test_a_named_part_of_the_host_s_time_has_a_row(self) -> None:
        first, *others = healthy().time_breakdown
        named = dataclasses.replace(first, named_host_us={"gc": 3.0, "checkpoint": 1.0})
        frame = dataclasses.replace(healthy(), time_breakdown=(named, *others)).frames.named_host
        assert frame.to_numpy().tolist() == [[0, "gc", 3.0], [0, "checkpoint", 1.0]]


def test_meanings_are_those_of_the_fields() -> None:
    meanings = {column.name: column.meaning for column in tables.TABLES["time_breakdown"].columns}
    assert meanings["comm_us"] == "Time in which a collective ran on this rank: hidden plus exposed."
    assert meanings["rank"] == "Global rank."


def test_pandas_is_not_imported_before_it_is_asked_for(samples: Path) -> None:
    code = (
        "import sys, perfscope; s = perfscope.analyze(sys.argv[1]); "
        "assert 'pandas' not in sys.modules; s.frames.job; assert 'pandas' in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code, str(samples / "healthy")], check=True)


def test_the_api_can_be_discovered() -> None:
    assert {"analyze", "load_summary", "Summary"} <= set(dir(perfscope))
    assert perfscope.Summary is Summary


class TestDocumentation:
    def test_examples_do_what_they_show(
        self, root: Path, samples: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        for name, sample in (("traces", "slow_rank"), ("before", "starved"), ("after", "healthy")):
            shutil.copytree(samples / sample, tmp_path / name)
        monkeypatch.chdir(tmp_path)
        text = (root / "docs" / "api.md").read_text(encoding="utf-8")
        examples = doctest.DocTestParser().get_doctest(text, {}, "docs/api.md", "docs/api.md", 0)
        output: list[str] = []
        results = doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE).run(examples, out=output.append)
        assert results.attempted >= 20
        assert results.failed == 0, "".join(output)

    def test_every_table_and_column_is_listed(self, root: Path) -> None:
        text = (root / "docs" / "api.md").read_text(encoding="utf-8")
        written = text[text.index(api_reference.HEADING) :]
        assert written == api_reference.reference(), "write it anew: python -m tests.results.api_reference"
