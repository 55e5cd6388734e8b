"""Are ranks that delay a run found where ranks are real? ``python -m tests.benchmarks.real_delays --ranks 3``.

DDP, FSDP2, ZeRO-1 and a 1F1B pipeline over gloo, on this machine's CPU. Ranks sleep instead of computing, and one of
them sleeps longer, in one stage, steadily, now and then or in turn (``real_delays_job.py``). All cases train in one
launch, each in a recording of its own. A case is right where the delayed ranks, their stage and nothing else are
reported from step histories. ``--traces`` records each case a second time, in full; the last
columns say what those traces report, and whether that is the same: the same ranks, or a rotation, and the loader or
something else. Best on a machine with nothing else to do.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from perfscope import analyze
from perfscope.analyzers.history.job_history import job_history
from perfscope.recording.job import open_job
from perfscope.results.history import HistoryStraggler
from perfscope.results.rows import StragglerRow
from tests.benchmarks.real_delays_job import PLANTED

STRATEGIES: Final = ("ddp", "fsdp", "zero", "pipeline")
STAGES: Final = ("dataloader", "forward", "backward", "optimizer")
PATTERNS: Final = ("steady", "intermittent", "rotating")
LOSS: Final = 0.05
"""Share of the median step from which a planted delay counts."""

TRACED: Final = {"wait": 5, "warmup": 3, "active": 24, "count_flops": False}


@dataclass(frozen=True)
class RealCase:
    """One training."""

    strategy: str
    stage: str = "none"
    pattern: str = "steady"
    rank: int = 0

    def in_words(self) -> str:
        """Such as "fsdp, backward, rotating"."""
        who = "" if self.pattern == "rotating" else f", rank {self.rank}"
        if self.stage == "none":
            return f"{self.strategy}, healthy"
        return f"{self.strategy}, {self.stage}, {self.pattern}{who}"

    def is_right(self, rows: Sequence[HistoryStraggler]) -> bool:
        """Is what was planted reported, and nothing else?"""
        if self.stage == "none":
            return not rows
        if not rows or any(row.stage != self.stage for row in rows):
            return False
        if self.pattern == "rotating":
            return [row.pattern for row in rows] == ["rotating"]
        return [row.ranks for row in rows] == [(self.rank,)]


def cases(ranks: int) -> Iterator[RealCase]:
    """Every strategy healthy, and with each stage delayed in each way, on ranks in turn."""
    for strategy in STRATEGIES:
        yield RealCase(strategy)
        for number, (stage, pattern) in enumerate((stage, pattern) for stage in STAGES for pattern in PATTERNS):
            if strategy == "pipeline" and stage == "dataloader":
                continue  # only its first stage uses what it loads
            yield RealCase(strategy, stage, pattern, number % ranks)


def launch(plans: list[dict[str, Any]], ranks: int, scratch: Path) -> None:
    """Train all of them."""
    scratch.mkdir(parents=True, exist_ok=True)
    listed = scratch / "cases.json"
    listed.write_text(json.dumps(plans))
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    subprocess.run(
        [*launcher, "-m", "tests.benchmarks.real_delays_job", str(listed)],
        check=True, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip


@dataclass(frozen=True)
class Named:
    """What is reported of one recording, as both kinds of analysis can say it."""

    ranks: tuple[int, ...]
    """None where the delay rotates."""
    loads: bool
    """Is it the loader? Traces tell no forward from a backward or an optimizer, but their operators from Python."""


def from_histories(rows: Sequence[HistoryStraggler]) -> set[Named]:
    """What step histories report."""
    return {Named(() if row.pattern == "rotating" else row.ranks, row.stage == "dataloader") for row in rows}


def from_traces(rows: Sequence[StragglerRow]) -> set[Named]:
    """What full traces report."""
    return {
        Named(() if row.pattern == "rotating" else row.ranks or (row.rank,), row.cause == "dataloader") for row in rows
    }


def also_from_traces(folder: Path, rows: Sequence[HistoryStraggler]) -> tuple[str, bool]:
    """What the traces of a recording report, in words, and whether that is the same as ``rows``."""
    found = analyze(folder).stragglers
    words = ", ".join(f"{row.ranks or (row.rank,)} {row.cause} {row.pattern}" for row in found) or "none"
    return words, from_traces(found) == from_histories(rows)


def main(arguments: Sequence[str] | None = None) -> None:
    """Train, analyze, print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=3)
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--extra-ms", type=float, default=6.0)
    parser.add_argument("--share", type=float, default=0.08, help="of a step of that case, if that is more")
    parser.add_argument("--only", default="", help="cases whose description contains this")
    parser.add_argument("--keep", type=Path, help="folder for the recordings")
    parser.add_argument("--traces", action="store_true", help="record each case a second time, in full")
    options = parser.parse_args(arguments)
    chosen = [case for case in cases(options.ranks) if options.only in case.in_words()]
    right = counted = same = 0
    with tempfile.TemporaryDirectory() as temporary:
        scratch = str((options.keep or Path(temporary)).absolute())
        plans = []
        for number, case in enumerate(chosen):
            common = {**vars(case), "steps": options.steps, "extra_ms": options.extra_ms, "share": options.share}
            plans.append({**common, "folder": f"{scratch}/{number}", "record": {"steps_only": True}})
            if options.traces:
                plans.append({**common, "folder": f"{scratch}/{number}-full", "record": TRACED})
        launch(plans, options.ranks, Path(scratch))
        print(
            "| case | right | reported from step histories |"
            + (" from full traces | the same |" if options.traces else "")
        )
        print("|---|---|---|" + ("---|---|" if options.traces else ""))
        for number, case in enumerate(chosen):
            history, failures = job_history(open_job(Path(scratch, str(number))))
            assert history is not None
            assert not failures, failures
            extra_ms = json.loads(Path(scratch, str(number), PLANTED).read_text())
            share = extra_ms * 1000 / min(row.median_us for row in history.ranks)
            counts = case.stage == "none" or share >= LOSS
            good = case.is_right(history.stragglers)
            counted += counts
            right += good and counts
            verdict = ("yes" if good else "**no**") if counts else f"not counted ({share:.1%} of a step)"
            found = "; ".join(row.in_words() for row in history.stragglers) or "none"
            traces = ""
            if options.traces:
                words, alike = also_from_traces(Path(scratch, f"{number}-full"), history.stragglers)
                same += alike
                traces = f" {words} | {'yes' if alike else '**no**'} |"
            print(f"| {case.in_words()} | {verdict} | {found} |{traces}")
    planted = f"{options.extra_ms:g} ms, or {options.share:.0%} of a step if that is more"
    print(f"\n{right} of {counted} right, {options.ranks} ranks, planted: {planted}")
    if options.traces:
        print(f"{same} of {len(chosen)} recordings with the same verdict from histories and traces")


if __name__ == "__main__":
    main()
