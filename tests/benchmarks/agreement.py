"""Do HTA's and TraceLens's totals agree with PerfScope's, where they define the same? Prints the table.

    python -m venv hta && hta/bin/pip install HolisticTraceAnalysis==0.5.0 'pandas<3'
    python -m tests.benchmarks.agreement ../shared/traces --hta-python hta/bin/python

PerfScope's numbers are its time breakdown (``perfscope.analyzers.rank.time_breakdown``) over the other tool's window:
from the first piece of device work to the end of the last. HTA runs as it comes and then with its defects and choices
taken out one after the other, so that each difference is traced to what it comes from. TraceLens runs where
``--tracelens-python`` names an interpreter that has it (AMD's source; PyPI's package of that name is another project);
otherwise its published definition is followed (``agreement_tracelens``). Ends with 1 where a difference above 1 % stays
unexplained.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from perfscope.analyzers import readers
from perfscope.analyzers.rank.collectives.communication import device_communication
from perfscope.analyzers.rank.host_activity import host_activity
from perfscope.analyzers.rank.launches import device_work
from perfscope.analyzers.rank.time_breakdown import time_breakdown
from perfscope.recording.job import TRACE_SUFFIXES
from perfscope.results.categories import TimeCategory
from perfscope.trace.trace import Category
from tests.benchmarks import agreement_tracelens

TOLERANCE = 0.01
SHOWN = 0.0005
"""A step of the explanation that changes the difference by less is not worth a word."""

AS_IT_COMES = "as it comes"
SAME_STEPS = "last step"
"""Variant in which the tool looks at all the steps that PerfScope looks at."""
HTA_REASONS = {
    "last step": "the last step is left out, by choice; taken out with include_last_profiler_step=True",
    "rounding": (
        "times are rounded to whole µs, starts up and ends down, short work to nothing or to less; taken out with "
        "HTA_DISABLE_NS_ROUNDING=1"
    ),
    "unlinked": (
        "work whose launch is not among the steps' rows is dropped, and its time counts as idle; taken out by not "
        "calling Trace._filter_irrelevant_gpu_kernels"
    ),
    "rows": (
        "every row that has a stream counts as a kernel: synchronisations, Triton's CPU operators; taken out by "
        "dropping the rows whose category is no device work"
    ),
    "truncation": "the breakdown by type cuts each stretch to whole µs; taken out by handing HTA its times in ns",
}
"""Variant in which something is taken out, on top of those before it -> what it is, and how."""

Numbers = Mapping[str, float]


@dataclass(frozen=True)
class Line:
    """One quantity of one trace, by both."""

    trace: str
    tool: str
    quantity: str
    theirs: float | None
    """None where the tool fails."""
    ours: float
    chain: tuple[tuple[str, float | None], ...]
    """(Variant, difference as a share of ours), as it comes first; None where the tool fails."""
    error: str = ""

    @property
    def difference(self) -> float | None:
        """As it comes."""
        return self.chain[0][1]

    @property
    def left(self) -> float | None:
        """With everything taken out that is known."""
        return self.chain[-1][1]

    @property
    def agrees(self) -> bool:
        """As it comes, to 1 %."""
        return small(self.difference)

    @property
    def explained(self) -> bool:
        """To 1 % once the known reasons are taken out."""
        return small(self.left)

    def reasons(self) -> Iterator[str]:
        """What makes up the difference, each with what taking it out does."""
        for (_, before), (name, after) in itertools.pairwise(self.chain):
            if before is None and after is not None:
                yield f"{name}: {self.error} → {percent(after)}"
            elif before is not None and after is not None and abs(after - before) >= SHOWN:
                yield f"{name}: {percent(before)} → {percent(after)}"


def ours(path: Path) -> tuple[dict[str, float], dict[str, float]] | None:
    """(Quantities by HTA's definition, by TraceLens's) in µs and counts; None for a trace without device work."""
    trace = readers.read(path)
    work = device_work(trace)
    if len(work) == 0:
        return None
    start, end = int(work.start_ns.min()), int(work.end_ns.max())
    timeline, collectives = time_breakdown(trace, work, host_activity(trace, work), start, end)
    rows = timeline.totals(np.array([start]), np.array([end]))[0]
    kernel = trace.category[work.row] == Category.KERNEL
    communication = device_communication(trace, work)
    copy, memset = trace.category[work.row] == Category.MEMCPY, trace.category[work.row] == Category.MEMSET
    compute = kernel & ~communication

    def us(ns: int) -> float:
        return int(ns) / 1e3

    total, communicated = us(end - start), us(collectives.measure())
    busy = us(
        rows[
            [
                TimeCategory.COMPUTE,
                TimeCategory.COMM_WAIT,
                TimeCategory.COMM_TRANSFER,
                TimeCategory.COPY,
            ]
        ].sum()
    )
    exposed = us(rows[[TimeCategory.COMM_WAIT, TimeCategory.COMM_TRANSFER]].sum())
    hta = {
        "total": total,
        "idle": total - busy,
        "compute": us(rows[TimeCategory.COMPUTE]),
        "not compute": us(rows[[TimeCategory.COMM_WAIT, TimeCategory.COMM_TRANSFER, TimeCategory.COPY]].sum()),
        "communication": communicated,
        "exposed communication": exposed,
        "hidden communication": communicated - exposed,
        "copies and memsets": us(work.time_of(copy | memset).measure()),
        "hidden share, %": 100 * (communicated - exposed) / communicated if communicated else 0.0,
        "compute kernels, number": int(compute.sum()),
        "compute kernels, sum": us((work.end_ns - work.start_ns)[compute].sum()),
        "communication kernels, number": int(communication.sum()),
        "communication kernels, sum": us((work.end_ns - work.start_ns)[communication].sum()),
        "copies and memsets, number": int((copy | memset).sum()),
    }
    computing = work.time_of(compute | memset)
    tracelens = {
        "total": total,
        "busy": busy,
        "idle": total - busy,
        "compute and memsets": us(computing.measure()),
        "communication": communicated,
        "exposed communication": us(collectives.subtract(computing).measure()),
        "copies": us(work.time_of(copy).measure()),
        "exposed copies": us(work.time_of(copy).subtract(computing).subtract(collectives).measure()),
    }
    return hta, tracelens


def compare(trace: str, tool: str, mine: Numbers, variants: Mapping[str, Mapping[str, Any]]) -> list[Line]:
    """A line for each quantity. ``variants`` is the tool's own, as it comes first: quantity -> number, or an error."""
    first = next(iter(variants.values()))
    return [
        Line(
            trace=trace,
            tool=tool,
            quantity=quantity,
            theirs=first.get(quantity),
            ours=value,
            chain=tuple((name, difference(numbers.get(quantity), value)) for name, numbers in variants.items()),
            error=first.get("error", ""),
        )
        for quantity, value in mine.items()
    ]


def difference(their: float | None, our: float) -> float | None:
    """Theirs over ours, minus 1; infinite where only they have any."""
    if their is None:
        return None
    if our == 0:
        return 0.0 if abs(their) < 1e-9 else math.inf
    return their / our - 1


def small(share: float | None) -> bool:
    """A difference of at most 1 %."""
    return share is not None and abs(share) <= TOLERANCE


def percent(share: float) -> str:
    """A difference, signed."""
    return "only theirs" if math.isinf(share) else f"{100 * share:+.2f} %"


def table(lines: Sequence[Line]) -> Iterator[str]:
    """The lines as Markdown."""
    yield "| trace | quantity | theirs | PerfScope | difference | which comes from | left |"
    yield "|---|---|---|---|---|---|---|"
    for line in lines:
        theirs = "fails" if line.theirs is None else f"{line.theirs:,.10g}"
        shown = "" if line.difference is None else percent(line.difference)
        left = "" if line.left is None else percent(line.left)
        reasons = "; ".join(line.reasons())
        yield f"| {line.trace} | {line.quantity} | {theirs} | {line.ours:,.10g} | {shown} | {reasons} | {left} |"


def digest(lines: Sequence[Line]) -> Iterator[str]:
    """A line for each trace: how many quantities agree, what the others come from, and what stays."""
    yield "| trace | tool | quantities | agree to 1 % | of the same steps | the others differ by | left |"
    yield "|---|---|---|---|---|---|---|"
    for key in dict.fromkeys((line.trace, line.tool) for line in lines):
        mine = [line for line in lines if (line.trace, line.tool) == key]
        names = dict.fromkeys(reason.partition(":")[0] for line in mine if not line.agrees for reason in line.reasons())
        failed = [f"fails with {line.error}" for line in mine[:1] if line.theirs is None]
        same = sum(small(dict(line.chain).get(SAME_STEPS, line.difference)) for line in mine)
        left = max((abs(line.left) for line in mine if line.left is not None), default=math.nan)
        agree, why = sum(line.agrees for line in mine), ", ".join([*failed, *names])
        yield f"| {key[0]} | {key[1]} | {len(mine)} | {agree} | {same} | {why} | {100 * left:.4f} % |"


def traces_in(places: Sequence[Path]) -> list[Path]:
    """Chrome traces named, or in the folders named."""
    found = [
        path
        for place in places
        for path in (sorted(place.rglob("*")) if place.is_dir() else [place])
        if path.name.endswith(TRACE_SUFFIXES)
    ]
    return [path.resolve() for path in found]


def run_theirs(python: Path, script: str, paths: Sequence[Path]) -> dict[str, Any]:
    """What a script in another interpreter measures in the traces."""
    file = Path(__file__).with_name(script)
    done = subprocess.run([python, str(file), *map(str, paths)], stdout=subprocess.PIPE, check=True)
    measured: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return measured


def lines_of(paths: Sequence[Path], hta_python: Path | None, tracelens_python: Path | None) -> Iterator[Line]:
    """Every comparison."""
    names = {path: f"{path.parent.name}/{path.name.split('.')[0]}" for path in paths}
    mine = {path: numbers for path in paths if (numbers := ours(path)) is not None}
    by_hta = run_theirs(hta_python, "agreement_hta.py", list(mine)) if hta_python else {}
    by_tracelens = run_theirs(tracelens_python, "agreement_tracelens.py", list(mine)) if tracelens_python else {}
    called = "TraceLens" if tracelens_python else "TraceLens's definition"
    for path, (hta, tracelens) in mine.items():
        if str(path) in by_hta:
            yield from compare(names[path], "HTA", hta, by_hta[str(path)])
        theirs = by_tracelens.get(str(path)) or agreement_tracelens.by_definition(agreement_tracelens.read(path))
        yield from compare(names[path], called, tracelens, {AS_IT_COMES: theirs})


def main() -> int:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("traces", type=Path, nargs="+", help="Chrome traces, or folders of them")
    parser.add_argument(
        "--hta-python", type=Path, help="interpreter of an environment with HolisticTraceAnalysis 0.5.0"
    )
    parser.add_argument("--tracelens-python", type=Path, help="interpreter of an environment with AMD's TraceLens")
    parser.add_argument("--all", action="store_true", help="also list what agrees as it comes")
    options = parser.parse_args()
    lines = list(lines_of(traces_in(options.traces), options.hta_python, options.tracelens_python))
    print("\n".join(digest(lines)))
    print("\n" + "\n".join(f"- {name}: {what}" for name, what in HTA_REASONS.items()) + "\n")
    print("\n".join(table([line for line in lines if options.all or not line.agrees])))
    unexplained = [line for line in lines if not line.agrees and not line.explained]
    agree = sum(line.agrees for line in lines)
    explained = len(lines) - agree - len(unexplained)
    print(f"\n{len(lines)} quantities: {agree} agree to 1 % as they come, {explained} differ for the reasons shown,")
    print(f"{len(unexplained)} differ for no reason known")
    return 1 if unexplained else 0


if __name__ == "__main__":
    sys.exit(main())
