"""PerfScope against Holistic Trace Analysis on the same files, side by side and in turn.

    python -m tests.benchmarks.vs_hta --cache ~/.cache/perfscope-benchmarks --real TRACE.json.gz

``perfscope analyze`` is the whole command: it reads the traces, analyzes the job, writes the page and prints the
verdict, with nothing in its cache. HTA loads the traces and makes its temporal breakdown. Both use as many processes as
they choose. HTA gets an environment of its own below ``--cache``, made on the first run; the generated traces, 8 ranks
of 64 MB by default, are made there too.

``--real`` (or ``PERFSCOPE_REAL_TRACE``) is a real recording of one rank: a set of a job's ranks is made of it, each a
copy with its rank's number, as text with one value a line (``indent=1``), packed. Below the table stands what
PerfScope's own time goes to, measured in one process (``--workers 1``).
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

from tests.benchmarks import generate, measure

HTA = ("HolisticTraceAnalysis==0.5.0", "pandas<3")

THEIRS = """
import sys
from hta.trace_analysis import TraceAnalysis
if __name__ == "__main__":
    frame = TraceAnalysis(trace_dir=sys.argv[1]).get_temporal_breakdown(visualize=False)
    assert len(frame) == int(sys.argv[2]), frame
"""

PHASES = """
import sys, time

def timed(module, name, phase):
    real = getattr(module, name)
    def call(*arguments, **options):
        before = time.process_time()
        try:
            return real(*arguments, **options)
        finally:
            spent[phase] = spent.get(phase, 0.0) + time.process_time() - before
    setattr(module, name, call)

spent = {}
from perfscope.analyzers import cached, readers, summarize
from perfscope.cli import analyze
from perfscope.reports.page import page
spent["imports"] = time.process_time()
timed(readers, "read", "reading")
timed(cached, "analyze_rank", "ranks")
timed(summarize, "summarize", "job")
timed(page, "write", "page")
try:
    analyze.command([sys.argv[1], "--workers", "1", "--output", sys.argv[2]])
except SystemExit as end:
    assert not end.code, end.code
whole = time.process_time()
spent["rest"] = whole - sum(spent.values())
print(" | ".join(f"{phase} {seconds:.2f}" for phase, seconds in spent.items()), f"| CPU s in all {whole:.2f}")
"""
"""CPU seconds of each part of the command, in one process."""


def hta_python(cache: Path) -> Path:
    """The interpreter of an environment with HTA, made where there is none yet."""
    folder = cache / "hta-0.5.0"
    python = folder / "bin" / "python"
    marker = folder / "complete"
    if not marker.exists():
        print(f"making {folder} with {' '.join(HTA)} …", flush=True)
        venv.create(folder, with_pip=True, clear=True)
        subprocess.run([python, "-m", "pip", "install", "--quiet", *HTA], check=True)
        marker.touch()
    return python


def real_set(folder: Path, trace: Path, ranks: int) -> None:
    """Copies of one rank's recording as those of so many ranks."""
    with gzip.open(trace) if trace.name.endswith(".gz") else trace.open("rb") as file:
        document = json.load(file)
    folder.mkdir(parents=True)
    for rank in range(ranks):
        distributed = {**document.get("distributedInfo", {}), "rank": rank, "world_size": ranks}
        text = json.dumps({**document, "distributedInfo": distributed}, indent=1).encode()
        (folder / f"rank{rank}.json.gz").write_bytes(gzip.compress(text, 6, mtime=0))


def compare(name: str, folder: Path, ranks: int, python: Path, rounds: int, page: Path) -> list[str]:
    """Lines of the table for one folder of traces."""
    analyze = [sys.executable, "-m", "perfscope", "analyze", str(folder), "--output", str(page)]
    costs = measure.interleaved(
        {
            "perfscope": lambda: measure.run(analyze, {"PERFSCOPE_CACHE": "off"}),
            "HTA": lambda: measure.run([str(python), "-c", THEIRS, str(folder), str(ranks)]),
        },
        rounds,
    )
    ours, theirs = measure.median(costs["perfscope"]), measure.median(costs["HTA"])
    rows = [
        f"| {name} | {tool} | {cost.wall_s:.2f} | {cost.cpu_s:.2f} | {cost.peak_bytes / 1e6:.0f} |"
        for tool, cost in (("HTA", theirs), ("PerfScope", ours))
    ]
    ratio = (
        f"| {name} | **ratio** | **{theirs.wall_s / ours.wall_s:.1f}×** | **{theirs.cpu_s / ours.cpu_s:.1f}×** | "
        f"**1/{theirs.peak_bytes / ours.peak_bytes:.1f}** |"
    )
    return [*rows, ratio]


def phases(folder: Path, page: Path) -> str:
    """What PerfScope's CPU time goes to."""
    environment = {**measure.compiling(), "PERFSCOPE_CACHE": "off"}
    command = [sys.executable, "-c", PHASES, str(folder), str(page)]
    output = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout
    return output.strip().splitlines()[-1]


def main() -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cache", type=Path, required=True, help="folder for HTA's environment and the traces")
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--megabytes", type=float, default=64, help="unpacked size of each rank's trace (default 64)")
    parser.add_argument("--rounds", type=int, default=3, help="runs of each tool, in turn (default 3)")
    parser.add_argument("--forms", nargs="*", choices=("plain", "gz"), default=["plain", "gz"])
    parser.add_argument("--real", type=Path, default=os.environ.get("PERFSCOPE_REAL_TRACE"), metavar="TRACE")
    options = parser.parse_args()
    python = hta_python(options.cache)
    sets = {form: options.cache / f"set-{options.ranks}x{options.megabytes:g}-{form}" for form in options.forms}
    for form, folder in sets.items():
        if not folder.exists():
            generate.write_set(folder, options.ranks, int(options.megabytes * 1e6), packed=form == "gz")
    if options.real is not None:
        sets["real"] = options.cache / f"real-{options.ranks}"
        if not sets["real"].exists():
            real_set(sets["real"], Path(options.real), options.ranks)
    print("| set | tool | wall s | CPU s | peak MB |\n|---|---|---|---|---|", flush=True)
    with tempfile.TemporaryDirectory() as scratch:
        page = Path(scratch) / "report.html"
        for name, folder in sets.items():
            print("\n".join(compare(name, folder, options.ranks, python, options.rounds, page)), flush=True)
        print("\nCPU seconds in one process:")
        for name, folder in sets.items():
            print(f"{name}: {phases(folder, page)}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
