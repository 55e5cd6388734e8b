"""Runs each program of the catalog bare and recorded, and prints what was recorded beside the truth, as two tables.

``python -m tests.codebases.table [--only REGEX] [--output FOLDER] [--turns N] [--tries N] [--write]``: the truth is
what the program prints after each of its steps. Where something is planted, the first advice is followed, and its gain
measured: without a profiler, in up to ``--turns`` turns with the program as it is (0: not at all). What is wrong while
other processes keep the machine busy is run again, up to ``--tries`` times in all. ``--write`` puts the tables, with
the rows that earlier runs left in the same folder, into docs/frameworks.md; others stay as they are there.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.codebases.catalog import CATALOG, PLAIN, PLANTED, PROGRAMS, Program
from tests.codebases.judging import Row, judge, kept

BUSY = 0.1
"""Cores used by other processes from which a wrong row is repeated."""
DOCUMENT = Path(__file__).parents[2] / "docs" / "frameworks.md"
BEGIN, END = "<!-- written by make codebases CODEBASES_ARGS=--write -->", "<!-- until here -->"

_PLAIN = (
    "| program | ranks | steps | losses, bare and recorded | `strategies` | step time, here / its own stopwatch | |"
)
_PLANTED = (
    "| program | planted | losses, bare and recorded | first finding | predicted / now | measured / now (turns) | |"
)


def folder_of(program: Program, output: Path) -> Path:
    """Where its recording and its row are."""
    return output / re.sub(r"\W+", "-", f"{program.name} {program.planted}").strip("-")


def line_of(program: Program, row: Row) -> str:
    """One line of a table."""
    verdict = "right" if not row.wrong else "; ".join(row.wrong).replace("|", "\\|").replace("\n", " ")
    if program.planted:
        cells = [program.planted, row.losses, row.finding, row.expected, row.measured]
    else:
        cells = [row.ranks, row.steps, row.losses, row.strategy, row.step_time]
    return f"| {' | '.join([program.name, *cells, verdict])} |"


def tables(rows: dict[str, Row], output: Path, written: str = "") -> str:
    """Both tables, and a sentence that counts what is right; programs without a row keep their line of ``written``."""
    parts, lines = [], list[list[str]]()
    for header, programs in ((_PLAIN, PLAIN), (_PLANTED, PLANTED)):
        found = []
        for each in programs:
            row = rows.get(folder_of(each, output).name)
            begin = rf"\| {re.escape(each.name)} \| {re.escape(each.planted) or '[0-9]'}"
            found += [line_of(each, row)] if row else [old for old in written.splitlines() if re.match(begin, old)]
        parts.append("\n".join([header, f"|{'---|' * (header.count('|') - 1)}", *found]))
        lines.append(found)
    both = [line for found in lines for line in found]
    right = sum(line.endswith("| right |") for line in both)
    losses = [word for line in both for word in re.findall(r"\| (equal|differ) \|", line)]
    gains = ["| gain " not in line for line in lines[1] if re.search(r"[0-9]\) \|", line)]
    busy = [row.busy for row in rows.values()]
    parts.append(
        f"{right} of {len(both)} rows are right; losses are equal in {losses.count('equal')} of {len(losses)}; the "
        f"first advice, followed, brought a gain inside its range in {sum(gains)} of {len(gains)}."
        + (f" Other processes used {min(busy):.1f} to {max(busy):.1f} cores meanwhile." if busy else "")
    )
    return "\n\n".join(parts)


def repeated(program: Program, folder: Path, assets: Path, options: argparse.Namespace) -> Row:
    """The row of a program: run again where it is wrong and the machine was busy."""
    for number in range(1, options.tries + 1):
        shutil.rmtree(folder, ignore_errors=True)
        row = judge(program, folder, assets, options.turns)
        row.tries = number
        row.keep(folder)
        if not row.wrong or row.busy < BUSY:
            break
        sys.stderr.write(f"{program.name}, try {number} ({row.busy:.1f} cores busy): {'; '.join(row.wrong)}\n")
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="")
    parser.add_argument("--output", type=Path, default=None, help="keep the recordings here")
    parser.add_argument("--turns", type=int, default=8)
    parser.add_argument("--tries", type=int, default=3)
    parser.add_argument("--write", action="store_true", help="put the tables into docs/frameworks.md")
    options = parser.parse_args()
    output = (options.output or Path(tempfile.mkdtemp(prefix="codebases-"))).absolute()
    output.mkdir(parents=True, exist_ok=True)
    assets = output / "assets"
    if not assets.exists():
        written = Path(tempfile.mkdtemp(dir=output))
        subprocess.run([sys.executable, str(PROGRAMS / "assets.py"), str(written)], check=True)
        written.rename(assets)
    rows = {each.name: row for each in output.iterdir() if (row := kept(each)) is not None}
    chosen = [each for each in CATALOG if re.search(options.only, f"{each.name}, {each.planted}")]
    for program in chosen:
        folder = folder_of(program, output)
        rows[folder.name] = repeated(program, folder, assets, options)
        sys.stdout.write(line_of(program, rows[folder.name]) + "\n")
        sys.stdout.flush()
    document = DOCUMENT.read_text(encoding="utf-8")
    begin, end = document.index(BEGIN) + len(BEGIN), document.index(END)
    text = tables(rows, output, document[begin:end] if options.write else "")
    sys.stdout.write(f"\n{text}\n\nRecordings: {output}\n")
    if options.write:
        before, after = document[:begin], document[end:]
        DOCUMENT.write_text(f"{before}\n\n{text}\n\n{after}", encoding="utf-8")
    sys.exit(any(rows[folder_of(each, output).name].wrong for each in chosen))


if __name__ == "__main__":
    main()
