"""``perfscope analyze`` with the user's own formulas, with Nsight Compute's export, and the process that it runs in."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

import perfscope
from perfscope.cli.main import main
from tests.generator import JobSpec, ModelSpec, simulate

SPEC = JobSpec(ranks=2, steps=3, model=ModelSpec(layers=2, tokens=1024))
FORMULA = """
import perfscope

@perfscope.flops("aten::gelu")
def gelu(shapes, types, inputs):
    return {factor} * shapes[0][0]
"""
EXPORT = """==PROF== Connected to process 7
"ID","Kernel Name","sm__throughput.avg.pct_of_peak_sustained_elapsed",\
"gpu__compute_memory_throughput.avg.pct_of_peak_sustained_elapsed"
"","","%","%"
"0","{kernel}","85.5","20.0"
"1","void somebody_elses<(int)3>(T1)","10.0","10.0"
"""


@pytest.fixture(scope="module")
def traces(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("job")
    simulate(SPEC).write(folder)
    return folder


def run(traces: Path, folder: Path, *arguments: object) -> Result:
    places = ["--output", folder / "out.html", "--json", folder / "out.json"]
    return CliRunner().invoke(main, ["analyze", str(traces), *map(str, places), *map(str, arguments)])


def summary(traces: Path, folder: Path, *arguments: object) -> dict:
    result = run(traces, folder, *arguments)
    assert result.exit_code == 0, result.output
    return json.loads((folder / "out.json").read_text())


@pytest.mark.parametrize("workers", [1, 2])
def test_formulas_of_the_user_s_reach_every_worker_and_no_earlier_result(traces, tmp_path, workers, monkeypatch):
    monkeypatch.setenv("PERFSCOPE_CACHE", str(tmp_path / "cache"))

    def flops(*arguments: object) -> float:
        return summary(traces, tmp_path, "--workers", workers, *arguments)["utilisation"]["model_flops_per_step"]

    own = tmp_path / "my_flops.py"
    own.write_text(FORMULA.format(factor=1000))
    plain = flops()
    gelus = SPEC.ranks * SPEC.model.layers * SPEC.model.tokens
    assert flops("--flops", own) == plain + 1000 * gelus
    own.write_text(FORMULA.format(factor=3000))
    assert flops("--flops", own) == plain + 3000 * gelus
    assert flops() == plain


def test_a_formula_that_fails_is_reported_with_its_file(traces, tmp_path):
    own = tmp_path / "my_flops.py"
    own.write_text(FORMULA.format(factor="no_such_name"))
    result = run(traces, tmp_path, "--flops", own)
    assert result.exit_code == 2
    assert "my_flops.py: the formula of aten::gelu failed on shapes" in result.output
    own.write_text("x = 1\n")
    result = run(traces, tmp_path, "--flops", own)
    assert result.exit_code == 1
    assert "my_flops.py: defines no formula" in result.output


def test_nsight_compute_s_export_joins_the_table(traces, tmp_path):
    kernels = summary(traces, tmp_path)["kernels"]
    gemm = next(row["name"] for row in kernels if row["operator_class"] == "matrix")
    export = tmp_path / "kernels.csv"
    export.write_text(EXPORT.format(kernel=gemm))
    found = summary(traces, tmp_path, "--ncu", export)
    measured = {row["name"]: row["roofline"] for row in found["kernels"] if row["roofline"]}
    assert measured.keys() == {gemm}
    assert (measured[gemm]["compute_share"], measured[gemm]["bound"]) == (0.855, "compute")
    assert any("void somebody_elses" in note["text"] for note in found["notes"])
    assert "Bound by" in (tmp_path / "out.html").read_text()


def test_an_export_that_is_none_names_the_file_and_the_remedy(traces, tmp_path):
    export = tmp_path / "some.csv"
    export.write_text("a,b\n1,2\n")
    result = run(traces, tmp_path, "--ncu", export)
    assert result.exit_code == 1
    assert "some.csv: holds no table of kernels" in result.output
    assert "ncu --import" in result.output


def test_the_same_from_python(traces, tmp_path):
    own = tmp_path / "my_flops.py"
    own.write_text(FORMULA.format(factor=5000))
    plain, found = perfscope.analyze(traces), perfscope.analyze(traces, flops=own)
    assert plain.utilisation.model_flops_per_step is not None
    assert found.utilisation.model_flops_per_step is not None
    gelus = SPEC.ranks * SPEC.model.layers * SPEC.model.tokens
    assert found.utilisation.model_flops_per_step - plain.utilisation.model_flops_per_step == 5000 * gelus


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="counts threads in /proc")
def test_one_thread_analyzes(traces: Path, tmp_path: Path) -> None:
    """Numpy's library of linear algebra begins with a thread for each core, unless it is told otherwise."""
    script = """
import os, sys
from perfscope.cli.main import main
main(["analyze", *sys.argv[1:]], standalone_mode=False)
print("threads", len(os.listdir("/proc/self/task")))
"""
    command = [sys.executable, "-c", script, str(traces), "--workers", "1", "--output", str(tmp_path / "out.html")]
    environment = {name: value for name, value in os.environ.items() if name != "OPENBLAS_NUM_THREADS"}
    printed = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout
    assert printed.splitlines()[-1] == "threads 1"
