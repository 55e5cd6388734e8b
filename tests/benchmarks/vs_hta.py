"""PerfScope against Holistic Trace Analysis on the same files, side by side and in turn.

    python -m tests.benchmarks.vs_hta --cache ~/.cache/perfscope-benchmarks

PerfScope reads the traces and makes its whole analysis of the job (``perfscope.analyze``, nothing from its cache); HTA
loads them and makes its temporal breakdown. Both use as many processes as they choose. HTA gets an environment of its
own below ``--cache``, made on the first run; the traces, 8 ranks of 64 MB by default, are made there too.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import venv
from pathlib import Path

from tests.benchmarks import generate, measure

HTA = ("HolisticTraceAnalysis==0.5.0", "pandas<3")

OURS = """
import sys, perfscope
if __name__ == "__main__":
    summary = perfscope.analyze(sys.argv[1])
    assert len(summary.job.ranks) == int(sys.argv[2]), summary.job
"""
THEIRS = """
import sys
from hta.trace_analysis import TraceAnalysis
if __name__ == "__main__":
    frame = TraceAnalysis(trace_dir=sys.argv[1]).get_temporal_breakdown(visualize=False)
    assert len(frame) == int(sys.argv[2]), frame
"""


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


def compare(name: str, folder: Path, ranks: int, python: Path, rounds: int) -> list[str]:
    """Lines of the table for one folder of traces."""
    costs = measure.interleaved(
        {
            "perfscope": lambda: measure.run(
                [sys.executable, "-c", OURS, str(folder), str(ranks)], {"PERFSCOPE_CACHE": "off"}
            ),
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


def main() -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cache", type=Path, required=True, help="folder for HTA's environment and the traces")
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--megabytes", type=float, default=64, help="unpacked size of each rank's trace (default 64)")
    parser.add_argument("--rounds", type=int, default=3, help="runs of each tool, in turn (default 3)")
    parser.add_argument("--forms", nargs="+", choices=("plain", "gz"), default=["plain", "gz"])
    options = parser.parse_args()
    python = hta_python(options.cache)
    print("| set | tool | wall s | CPU s | peak MB |\n|---|---|---|---|---|", flush=True)
    for form in options.forms:
        folder = options.cache / f"set-{options.ranks}x{options.megabytes:g}-{form}"
        if not folder.exists():
            generate.write_set(folder, options.ranks, int(options.megabytes * 1e6), packed=form == "gz")
        print("\n".join(compare(form, folder, options.ranks, python, options.rounds)), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
