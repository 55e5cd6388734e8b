"""The page's section on kernels: names that can be read, tables that state what they leave out, nothing unescaped."""

from __future__ import annotations

import dataclasses

from perfscope.reports.page import kernels, page
from perfscope.results.tables import KernelRow, LaunchRow, ModuleRow, OperatorRow, RooflineRow
from tests.reports.examples import gpu


def kernel(name: str, **values) -> KernelRow:
    given = {
        "category": "compute", "operator": "aten::mm", "operator_class": "matrix", "count_per_step": 12.0,
        "us_per_step": 500.0, "mean_us": 41.7, "min_us": 40.0, "max_us": 50.0, "share": 0.1, "slowest_rank": 3,
        "slowest_over_median": 1.25, "dtype": "float32", "tensor_cores": False, "tflops": 12.0, "share_of_peak": 0.6,
    }  # fmt: skip
    return KernelRow(name=name, **{**given, **values})


def operator(name: str, **values) -> OperatorRow:
    given = {
        "operator_class": "matrix", "count_per_step": 4.0, "device_us_per_step": 10.0, "host_us_per_step": 3.0,
        "kernels_per_step": 4.0, "flops_per_step": None, "tflops": None, "share_of_peak": None, "dtype": None,
    }  # fmt: skip
    return OperatorRow(name=name, **{**given, **values})


def module(name: str, device: float, **values) -> ModuleRow:
    given = {"depth": 1, "count_per_step": 1.0, "host_us_per_step": 5.0, "kernels_per_step": 2.0}
    return ModuleRow(name=name, device_us_per_step=device, **{**given, **values})


def labels(table) -> list[str]:
    return [column.label for column in table.columns]


def texts(table, label: str) -> list[str]:
    at = labels(table).index(label)
    return [row[at].text for row in table.rows]


def test_what_is_worth_a_look_is_shown_however_cheap():
    rows = [kernel(f"k{number}") for number in range(kernels.SHOWN + 5)]
    table = kernels.kernel_table([*rows, kernel("small", worth_a_look="400 launches per step")])
    assert texts(table, "Kernel") == [*(f"k{number}" for number in range(kernels.SHOWN)), "small"]
    assert table.reading == "1 kernel is worth a look. The costliest 21 of 26 are shown; --json has more."
    assert texts(table, "Type")[0] == "float32, no tensor cores"
    assert texts(table, "Slowest rank")[0] == "1.25x"
    assert "Bound by" not in labels(table)


def test_columns_without_a_value_are_not_there():
    plain = kernel("k", dtype=None, tensor_cores=None, tflops=None, share_of_peak=None, slowest_rank=None)
    assert not {"Type", "Rate", "of peak", "Slowest rank"} & set(labels(kernels.kernel_table([plain])))
    host = kernels.operator_table([operator("aten::mm", device_us_per_step=0.0, kernels_per_step=0.0)])
    assert labels(host) == ["Operator", "Class", "Calls", "Host"]
    assert labels(kernels.module_table([module("phase", 0.0, kernels_per_step=0.0)])) == [
        "Range",
        "Depth",
        "Count",
        "Host",
    ]


def test_nsight_compute_s_measurements_get_columns():
    measured = RooflineRow(
        compute_share=0.8, memory_share=0.3, dram_share=None, occupancy=0.25, instances=3, bound="compute"
    )
    table = kernels.kernel_table([kernel("a", roofline=measured), kernel("b")])
    assert texts(table, "Compute") == ["80%", "–"]
    assert texts(table, "Bound by") == ["compute", "–"]


def test_instances_of_a_module_are_one_line():
    rows = [
        module("nn.Module: Model_0", 100.0, depth=0),
        *(module(f"nn.Module: Block_{number}", 20.0 + number) for number in range(3)),
        module("FSDP::pre_forward (blocks.3.attention)", 4.0),
        module("FSDP::pre_forward (blocks.11.attention)", 4.0),
        module("stage_1", 2.0),
        module("stage_2", 1.0),
    ]
    table = kernels.module_table(rows)
    assert texts(table, "Range") == [
        "nn.Module: Model", "nn.Module: Block", "FSDP::pre_forward (blocks.N.attention)", "stage_1", "stage_2",
    ]  # fmt: skip
    assert texts(table, "Count") == ["1", "3", "2", "1", "1"]


def test_the_section_shows_the_command_and_escapes_every_name():
    hostile = "</code><script>alert(1)</script><b title='\"x'>"
    launch = LaunchRow(
        rank=0, launches_per_step=10.0, call_us_mean=4.0, delay_us_median=9.0, delay_us_p95=20.0,
        queue_depth_median=2.0, starved_share=0.25, short_kernels_share=0.5,
    )  # fmt: skip
    summary = dataclasses.replace(
        gpu(),
        kernels=(kernel(hostile + "x" * 700, operator=hostile, operator_class=hostile, worth_a_look=hostile),),
        operators=(operator(hostile),),
        modules=(module(hostile, 3.0),),
        launches=(launch,),
        ncu_command=f"ncu --kernel-name '{hostile}'",
    )
    html = page.render(summary)
    assert "<script>alert" not in html
    assert "<b title" not in html
    assert html.count("&lt;script&gt;alert(1)") >= 6
    assert 'data-copies="ncu-command"' in html
    assert "Rank 0 is most launch-bound: 25% of launches found an idle device." in html


def test_without_kernels_or_operators_there_is_no_section():
    assert 'id="kernels-section"' not in page.render(dataclasses.replace(gpu(), kernels=(), operators=()))
