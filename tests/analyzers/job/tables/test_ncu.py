"""Nsight Compute: the command that is shown, and its exports read back in every form that it writes."""

from __future__ import annotations

import itertools
import re
import shlex
from pathlib import Path

import pytest

from perfscope.analyzers.job.tables.ncu import (
    MOST_LAUNCHES,
    canonical,
    name_pattern,
    ncu_command,
    read_export,
    with_roofline,
)
from perfscope.errors import PerfscopeError
from tests.analyzers.job.tables.test_kernels import kernel

GELU = (
    "void at::native::vectorized_elementwise_kernel<4, at::native::GeluCUDAKernelImpl(at::TensorIteratorBase&)::"
    "{lambda()#1}, at::detail::Array<char*, 2> >(int, at::native::GeluCUDAKernelImpl(at::TensorIteratorBase&)::"
    "{lambda()#1}, at::detail::Array<char*, 2>)"
)
GELU_AS_NCU_SPELLS_IT = (
    "void at::native::vectorized_elementwise_kernel<(int)4, at::native::GeluCUDAKernelImpl(at::TensorIteratorBase &)::"
    "[lambda() (instance 1)], at::detail::Array<char *, (int)2>>(int, T2, T3)"
)
GEMM = "ampere_bf16_s16816gemm_bf16_128x256_ldg8_f2f_stages_64x3_tn"

RAW = f'''==PROF== Connected to process 2489747 (/usr/bin/python3)
==PROF== Profiling "{GEMM}": 0%....50%....100% - 9 passes
"ID","Process ID","Process Name","Host Name","Kernel Name","Kernel Time","Context","Stream",\
"gpu__compute_memory_throughput.avg.pct_of_peak_sustained_elapsed",\
"gpu__dram_throughput.avg.pct_of_peak_sustained_elapsed",\
"gpu__time_duration.sum","sm__throughput.avg.pct_of_peak_sustained_elapsed","sm__warps_active.avg.pct_of_peak_sustained_active"
"","","","","","","","","%","%","usecond","%","%"
"0","2489747","python3","127.0.0.1","{GEMM}","2022-May-10 20:02:12","1","7","40.5","20.25","1,000.0","80.0","12.5"
"1","2489747","python3","127.0.0.1","{GEMM}","2022-May-10 20:02:13","1","7","50.5","30.25","3,000.0","60.0","12.5"
"2","2489747","python3","127.0.0.1","{GELU_AS_NCU_SPELLS_IT}","2022-May-10 20:02:14","1","7","91.75","91.75","10.0",\
"46.54","74.45"
'''

DETAILS = """\
"ID","Process ID","Process Name","Host Name","Kernel Name","Context","Stream","Block Size","Grid Size","Device","CC",\
"Section Name","Metric Name","Metric Unit","Metric Value","Rule Name","Rule Type","Rule Description"
"0","1","a","h","add(int, double *)","1","7","(256, 1, 1)","(8, 1, 1)","0","9.0","GPU Speed Of Light Throughput",\
"Memory Throughput","%","11.75",""
"0","1","a","h","add(int, double *)","1","7","(256, 1, 1)","(8, 1, 1)","0","9.0","GPU Speed Of Light Throughput",\
"Duration","us","239.01",""
"0","1","a","h","add(int, double *)","1","7","(256, 1, 1)","(8, 1, 1)","0","9.0","GPU Speed Of Light Throughput",\
"Compute (SM) Throughput","%","46.54",""
"0","1","a","h","add(int, double *)","1","7","(256, 1, 1)","(8, 1, 1)","0","9.0","Memory Workload Analysis",\
"Memory Throughput","byte/second","1,215,000,000.00",""
"0","1","a","h","add(int, double *)","1","7","(256, 1, 1)","(8, 1, 1)","0","9.0","Occupancy",\
"Achieved Occupancy","%","74.45",""
"0","1","a","h","add(int, double *)","1","1","(256, 1, 1)","(8, 1, 1)","0","9.0","SpeedOfLight","","","",\
"SOLBottleneck","INF","This kernel, ""add"", is …"
"""


def written(folder: Path, text: str, name: str = "kernels.csv") -> Path:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


def test_the_raw_page_averages_launches_by_their_time(tmp_path):
    gemm, gelu = read_export(written(tmp_path, RAW))
    assert (gemm.name, gemm.roofline.instances) == (GEMM, 2)
    assert gemm.roofline.compute_share == pytest.approx((0.8 * 1 + 0.6 * 3) / 4)
    assert gemm.roofline.memory_share == pytest.approx((0.405 * 1 + 0.505 * 3) / 4)
    assert gemm.roofline.dram_share == pytest.approx((0.2025 * 1 + 0.3025 * 3) / 4)
    assert (gemm.roofline.occupancy, gemm.roofline.bound) == (pytest.approx(0.125), "compute")
    assert (gelu.roofline.memory_share, gelu.roofline.bound) == (pytest.approx(0.9175), "memory")


def test_the_details_page_s_labels(tmp_path):
    (add,) = read_export(written(tmp_path, DETAILS))
    roofline = add.roofline
    assert (roofline.compute_share, roofline.memory_share) == (pytest.approx(0.4654), pytest.approx(0.1175))
    assert (roofline.dram_share, roofline.occupancy, roofline.bound) == (None, pytest.approx(0.7445), "latency")
    # The same as earlier versions label it.
    old = DETAILS.replace("Compute (SM) Throughput", "Compute (SM) [%]").replace(
        '"GPU Speed Of Light Throughput","Memory Throughput"', '"GPU Speed Of Light Throughput","Memory [%]"'
    )
    assert read_export(written(tmp_path, old, "old.csv"))[0].roofline == roofline


def test_decimal_commas(tmp_path):
    text = (
        DETAILS.replace("11.75", "11,75")
        .replace("46.54", "46,54")
        .replace("74.45", "74,450")
        .replace("239.01", "2.239,01")
    )
    roofline = read_export(written(tmp_path, text))[0].roofline
    assert (roofline.compute_share, roofline.memory_share) == (pytest.approx(0.4654), pytest.approx(0.1175))
    assert roofline.occupancy == pytest.approx(0.7445)


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"NVR\x00\x01\x02", "is a report of Nsight Compute itself; export it: ncu --import"),
        (b"step,loss\n1,2.5\n", "holds no table of kernels"),
        (b"", "holds no table of kernels"),
        (
            b'"ID","Process ID","Kernel Name","launch__grid_size"\n"","","","block"\n"0","1","add","8"\n',
            "--section Speed",
        ),
    ],
)
def test_what_cannot_be_used_names_the_file_and_the_remedy(content, expected, tmp_path):
    path = tmp_path / "some.csv"
    path.write_bytes(content)
    with pytest.raises(PerfscopeError, match=rf"some\.csv.*{re.escape(expected)}"):
        read_export(path)
    with pytest.raises(PerfscopeError, match=r"absent\.csv.*cannot be read"):
        read_export(tmp_path / "absent.csv")


CAT = (
    "void at::native::(anonymous namespace)::CatArrayBatchedCopy<at::native::(anonymous namespace)::OpaqueType<2u>, 4>"
    "(at::native::(anonymous namespace)::OpaqueType<2u>*)"
)
CAT_AS_NCU_SPELLS_IT = (
    "void at::native::<unnamed>::CatArrayBatchedCopy<at::native::<unnamed>::OpaqueType<(unsigned int)2>, (int)4>(T1 *)"
)
ADD = (
    "void at::native::elementwise_kernel<128, 2, at::native::gpu_kernel_impl_nocast<at::native::CUDAFunctor_add"
    "<float> >(at::TensorIteratorBase&, at::native::CUDAFunctor_add<float> const&)::{lambda(int)#1}>(int, int)"
)
ADD_AS_NCU_SPELLS_IT = (
    "void at::native::elementwise_kernel<(int)128, (int)2, void at::native::gpu_kernel_impl_nocast<at::native::"
    "CUDAFunctor_add<float>>(at::TensorIteratorBase &, const T1 &)::[lambda(int) (instance 1)]>(int, T3)"
)
FLASH = "void flash_fwd_kernel<Flash_fwd_kernel_traits<64, false, cutlass::bfloat16_t>, true>(Flash_fwd_params)"
FLASH_AS_NCU_SPELLS_IT = (
    "void flash_fwd_kernel<Flash_fwd_kernel_traits<(int)64, (bool)0, cutlass::bfloat16_t>, (bool)1>(Flash_fwd_params)"
)


@pytest.mark.parametrize(
    ("kineto", "ncu"),
    [
        (GEMM, GEMM),
        (GELU, GELU_AS_NCU_SPELLS_IT),
        (CAT, CAT_AS_NCU_SPELLS_IT),
        (ADD, ADD_AS_NCU_SPELLS_IT),
        (FLASH, FLASH_AS_NCU_SPELLS_IT),
    ],
)
def test_one_kernel_as_two_profilers_spell_it(kineto, ncu):
    assert canonical(kineto) == canonical(ncu)
    # The pattern that the command is given finds it in ncu's spelling too.
    assert re.search(name_pattern(kineto), ncu)


def test_measurements_join_the_rows_that_they_are_of(tmp_path):
    rows = [
        kernel(name=name) for name in (GELU, GEMM, "void copy<float>(int)", "void copy<int>(int)", "void lone<1>(int)")
    ]
    table = RAW.replace(
        '"2","2489747"',
        '"8","1","p","h","void copy<double>(T1)","t","1","7","1","1","1.0","1","1"\n'
        '"9","1","p","h","void lone<(int)1, (int)2>(T1)","t","1","7","1","1","1.0","1","1"\n'
        '"2","2489747"',
    )
    found, strangers = with_roofline(rows, read_export(written(tmp_path, table)))
    assert {row.name for row in found if row.roofline} == {GELU, GEMM, "void lone<1>(int)"}
    # Two kernels here are called copy: which of them was measured is not known.
    assert strangers == ("void copy<double>(T1)",)


def test_the_command_profiles_what_is_worth_a_look():
    rows = [
        kernel(name=GEMM, count_per_step=12.0, worth_a_look="slow"),
        kernel(name=GELU, count_per_step=6.0, worth_a_look="short"),
        kernel(name="void at::native::reduce_kernel<512>(int)"),
        kernel(name="ncclDevKernel_AllReduce", category="communication", worth_a_look="never"),
    ]
    text = ncu_command(
        rows, ["NVIDIA H100 80GB HBM3"], ["torchrun", "--nproc-per-node", "2", "train.py", "--name", "my run"]
    )
    assert text is not None
    profile, export = text.replace("\\\n", "").split("\n")
    words = shlex.split(profile)
    options = dict(itertools.pairwise(words))
    assert words[0] == "ncu"
    assert options["--kernel-name-base"] == "demangled"
    pattern = options["--kernel-name"].removeprefix("regex:")
    assert re.search(pattern, GEMM)
    assert re.search(pattern, GELU_AS_NCU_SPELLS_IT)
    assert not any(re.search(pattern, row.name) for row in rows[2:])
    assert (options["--launch-skip"], options["--launch-count"]) == ("54", "18")
    assert words[words.index("torchrun") :] == ["torchrun", "--nproc-per-node", "2", "train.py", "--name", "my run"]
    assert export == f"ncu --import {options['--export']}.ncu-rep --csv --page raw > perfscope-kernels.csv"


def test_there_is_no_command_without_a_reason_or_for_another_vendor_s_device():
    slow = kernel(name=GEMM, count_per_step=1e6, worth_a_look="slow")
    assert ncu_command([kernel()], ["NVIDIA H100 80GB HBM3"], ["python"]) is None
    assert ncu_command([slow], ["AMD Instinct MI300X"], ["python"]) is None
    assert ncu_command([slow], [], ["python"]) is None
    text = ncu_command([slow], ["Tesla V100-SXM2-16GB"], [])
    assert text is not None
    assert f"--launch-count {MOST_LAUNCHES} " in text
    assert "YOUR COMMAND" in text
