"""Secrets in a recording's path and in names of NVTX ranges are in nothing that is made of it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from perfscope.analyzers.analyze import analyze
from perfscope.analyzers.compare.compare import compare
from perfscope.reports import terminal
from perfscope.reports.page import page
from tests.analyzers.readers.nsys_exports import Export
from tests.benchmarks import generate

CANARY = "9fQ2canary7Zr4Lw8Xk3Vb6Nd1"
NAMES = (
    f"fetch hf_{CANARY}", f"fetch https://me:{CANARY}@host/x", f"fetch token={CANARY}", f"fetch Bearer {CANARY}",
    f'fetch {{"api_key": "{CANARY}"}}', f"fetch https://bucket/key?X-Amz-Signature={CANARY}",
)  # fmt: skip


def shown(folder: Path) -> str:
    found = analyze(folder, workers=1)
    differences = compare(found, found)
    return "\n".join(
        (page.render(found), json.dumps(found.to_dict()), terminal.verdict(found), json.dumps(differences.to_dict()))
    )


@pytest.fixture(autouse=True)
def uncached(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PERFSCOPE_CACHE", "off")


@pytest.mark.parametrize("name", [f"out-hf_{CANARY}", f"api_key={CANARY}", f"a&sig={CANARY}&b"])
def test_a_recording_s_path(name: str, tmp_path: Path) -> None:
    folder = tmp_path / name
    folder.mkdir()
    generate.write_rank(folder / "rank0.json", 0, 1, 1000)
    text = shown(folder)
    assert "[redacted]" in text
    assert CANARY not in text


def test_names_of_nvtx_ranges(tmp_path: Path) -> None:
    made = Export(tmp_path / "report.sqlite")
    made.process(100, "python")
    for step in range(3):
        at = 100_000 * step
        made.nvtx(100, 100, f"ProfilerStep#{step}", at, at + 99_000)
        made.call(100, 100, "cudaLaunchKernel", at + 10_000, at + 15_000, step)
        made.kernel(100, "gemm", at + 20_000, at + 60_000, correlation=step)
        for place, name in enumerate(NAMES):
            made.nvtx(
                100, 100, name, at + 60_000 + 5_000 * place, at + 64_000 + 5_000 * place, registered=place % 2 > 0
            )
    made.close()
    text = shown(tmp_path)
    assert "fetch " in text
    assert CANARY not in text
