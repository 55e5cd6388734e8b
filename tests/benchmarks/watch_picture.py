"""The picture of ``perfscope watch`` in the documentation: the terminal's screen while a real job trains.

    python -m tests.benchmarks.watch_picture [--into docs/images/watch.svg]

Four ranks train with torchrun; loading takes one of them longer.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from html import escape
from itertools import groupby
from pathlib import Path
from typing import Any, Final

from perfscope.reports.figures.colours import DARK
from tests.benchmarks.pages import ROOT
from tests.cli.watched import watching
from tests.collectors.harness import PERFSCOPE, kill_all

SCRIPT: Final = ROOT / "tests" / "collectors" / "scripts" / "paced.py"
CELL: Final = (8.4, 19)
"""Width and height of a letter's place, px."""
EDGE: Final = 14
FONTS: Final = "ui-monospace,SFMono-Regular,Menlo,Consolas,DejaVu Sans Mono,monospace"
COLOURS: Final = {
    "default": DARK["text"], "red": "#ff7b72", "green": "#56d364", "brown": "#e3b341", "cyan": "#76e3ea",
}  # fmt: skip
"""The terminal's colours, as pyte calls them (``brown`` is yellow); others are hexadecimal."""


def main() -> None:
    """Record, watch, draw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--into", type=Path, default=ROOT / "docs" / "images" / "watch.svg")
    parser.add_argument("--seconds", type=float, default=40, help="of training before the picture is taken")
    options = parser.parse_args()
    into = options.into.resolve()
    with tempfile.TemporaryDirectory() as scratch:
        os.chdir(scratch)  # where the job was recorded is of no interest
        shutil.copy(SCRIPT, "train.py")
        folder, stop = Path("rec"), Path("stop")
        command = ["torchrun", "--nproc-per-node", "4", "train.py"]
        command += ["--ms", "60", "--load-ms", "25", "--slow-rank", "2", "--until", str(stop)]
        job = subprocess.Popen(
            [*PERFSCOPE, "run", "--steps-only", "--output", str(folder), "--", *command],
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            start_new_session=True,
        )
        try:
            with watching(folder, columns=108, lines=16, term="xterm-256color") as terminal:
                terminal.until("rank 2:", 120)
                until = time.monotonic() + options.seconds
                while time.monotonic() < until:
                    terminal.look()
                drawn = svg(terminal.screen)
                terminal.press("q")
                terminal.ended()
            stop.touch()
            job.wait(60)
        finally:
            kill_all(job)
            os.chdir(ROOT)
    into.write_text(drawn, encoding="utf-8")
    sys.stdout.write(f"{into}\n")


def svg(screen: Any) -> str:
    """A screen of pyte's as an SVG picture."""
    width, height = screen.columns * CELL[0] + 2 * EDGE, screen.lines * CELL[1] + 2 * EDGE
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height:.0f}" role="img">',
        "<title>perfscope watch in a terminal</title>",
        f'<rect width="100%" height="100%" rx="8" fill="{DARK["page"]}"/>',
        f'<g font-family="{FONTS}" font-size="14">',
    ]
    for line in range(screen.lines):
        row = [screen.buffer[line][column] for column in range(screen.columns)]
        at = 0
        for (colour, bold), cells in groupby(row, lambda cell: (cell.fg, cell.bold)):
            text = "".join(cell.data for cell in cells)
            # Pictures join spaces: what stands apart is a text of its own.
            parts += [
                _text(found[0], at + found.start(), line, colour, bold=bold)
                for found in re.finditer(r"\S+(?: \S+)*", text)
            ]
            at += len(text)
    return "\n".join([*parts, "</g>", "</svg>", ""])


def _text(text: str, column: int, line: int, colour: str, *, bold: bool) -> str:
    fill = COLOURS.get(colour, f"#{colour}" if len(colour) == 6 else COLOURS["default"])
    x, y = EDGE + column * CELL[0], EDGE + (line + 0.75) * CELL[1]
    weight = ' font-weight="bold"' if bold else ""
    # As wide as its cells, whatever font there is.
    length = len(text) * CELL[0]
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" fill="{fill}"{weight} textLength="{length:.1f}" '
        f'lengthAdjust="spacingAndGlyphs">{escape(text)}</text>'
    )


if __name__ == "__main__":
    main()
