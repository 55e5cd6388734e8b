"""Run the acceptance on this machine's GPUs and print its table.

    python -m tests.gpu [--only account] [--device cpu] [--minutes 10] [--output FOLDER]

The exit code is 1 where a point does not hold, 2 where there is no GPU. Every recording, page, summary and output stays
in the folder, with the table as ``table.md`` and ``points.json``.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Final

import torch

from perfscope import __version__
from tests.gpu import account, care, changes, nsys, several
from tests.gpu.points import HEAD, Point, guarded, skipped
from tests.gpu.recorded import Place

AREAS: Final[dict[str, Callable[[Place], Iterable[Point]]]] = {
    "account": account.checks,
    "changes": changes.checks,
    "several": several.checks,
    "care": care.checks,
    "nsys": nsys.checks,
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", choices=list(AREAS), help="may be repeated")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"), help="cpu: as far as that goes")
    parser.add_argument("--minutes", type=float, default=10.0, help="after which what is left is skipped")
    parser.add_argument("--output", type=Path, default=Path("gpu-acceptance"), help="folder that keeps the evidence")
    options = parser.parse_args()
    devices = torch.cuda.device_count() if options.device == "cuda" else 0
    if options.device == "cuda" and not devices:
        reason = f"torch {torch.__version__} sees no CUDA device: install a CUDA build, or try --device cpu"
        print(reason, file=sys.stderr)
        return 2
    if options.output.exists() and any(options.output.iterdir()):
        print(f"{options.output} is not empty: name another folder with --output", file=sys.stderr)
        return 2
    place = Place(options.device, devices, options.output)
    about = _about(devices)
    print(f"{about}\n\n{HEAD}", flush=True)
    points: list[Point] = []
    began = time.monotonic()
    over = began + 60 * options.minutes
    for area in options.only or AREAS:
        for point in guarded(area, lambda area=area: AREAS[area](place)):  # type: ignore[misc]
            print(point.row(), flush=True)
            points.append(point)
            if time.monotonic() > over:
                points.append(skipped(area, "what is left", f"{options.minutes:g} minutes are over"))
                print(points[-1].row(), flush=True)
                break
        if time.monotonic() > over:
            break
    failed = sum(point.holds is False for point in points)
    left_out = sum(point.holds is None for point in points)
    summary = f"{len(points)} points: {failed} do not hold, {left_out} skipped; {time.monotonic() - began:.0f} s"
    print(f"\n{summary}")
    table = "\n".join([about, "", HEAD, *(point.row() for point in points), "", summary, ""])
    options.output.mkdir(parents=True, exist_ok=True)
    (options.output / "table.md").write_text(table, encoding="utf-8")
    (options.output / "points.json").write_text(
        json.dumps([point.as_json() for point in points], indent=1), encoding="utf-8"
    )
    return 1 if failed else 0


def _about(devices: int) -> str:
    names = ", ".join(torch.cuda.get_device_name(index) for index in range(devices)) or "CPU (stand-in for a GPU)"
    versions = f"CUDA {torch.version.cuda or '–'}, Python {platform.python_version()}"
    return f"PerfScope {__version__}, torch {torch.__version__}, {versions}: {names}"


if __name__ == "__main__":
    sys.exit(main())
