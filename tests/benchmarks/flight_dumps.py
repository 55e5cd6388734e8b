"""Flight-recorder dumps: mutated ones are read or refused, and those of many ranks are judged in time.

``python -m tests.benchmarks.flight_dumps --mutations 20000 --ranks 1024 --entries 2000``
"""

from __future__ import annotations

import argparse
import pickle
import random
import resource
import tempfile
import time
from collections import Counter
from functools import cache
from pathlib import Path
from unittest import mock

from perfscope.analyzers.analyze import analyze
from perfscope.analyzers.hang.answer import find_hang
from perfscope.analyzers.readers import flight
from tests.analyzers.hang.dumps import Groups, document, op
from tests.analyzers.readers.flight_fuzz import mutations, strange


def main() -> None:
    """Do what the arguments say."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mutations", type=int, default=0)
    parser.add_argument("--folder", type=Path, help="dumps to mutate besides those made here")
    parser.add_argument("--ranks", type=int, default=0)
    parser.add_argument("--entries", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    if arguments.mutations:
        _fuzz(arguments.mutations, arguments.folder, random.Random(arguments.seed))
    if arguments.ranks:
        _scale(arguments.ranks, arguments.entries)


def _fuzz(count: int, folder: Path | None, rng: random.Random) -> None:
    groups, entries = _job(8, 12)
    seeds = [pickle.dumps(document(groups, entries[0]), protocol) for protocol in (2, 4, 5)]
    seeds += [path.read_bytes() for path in sorted(folder.iterdir()) if "dump" in path.name] if folder else []
    made = [document(groups, own, rank) for rank, own in entries.items()]
    outcomes: Counter[str] = Counter()
    whole = {rank: flight.parse(pickle.dumps(document(groups, own, rank), 2)) for rank, own in entries.items()}
    with (
        mock.patch("pickle.Unpickler", side_effect=AssertionError),
        mock.patch("pickle.loads", side_effect=AssertionError),
    ):
        for number in range(count):
            (mutated,) = mutations(rng.choice(seeds), rng, 1)
            if number % 2:  # whole pickles of strange values
                mutated = pickle.dumps(strange(made[number % 8], rng), 2)
            try:
                dump = flight.parse(mutated)
            except ValueError as error:
                outcomes[f"refused: {str(error).split('(')[0][:40]}"] += 1
            else:
                outcomes["read"] += 1
                find_hang({**whole, number % 8: dump}, {})
    print(*(f"{times:8,}  {outcome}" for outcome, times in outcomes.most_common()), sep="\n")
    print(f"{resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024:.0f} MiB at the peak")


def _scale(ranks: int, entries: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        groups, ops = _job(ranks, entries)
        for rank, own in ops.items():
            (Path(folder) / f"nccl_trace_rank_{rank}").write_bytes(pickle.dumps(document(groups, own, rank), 2))
        size = sum(path.stat().st_size for path in Path(folder).iterdir())
        start = time.monotonic()
        hang = analyze(folder).hang
        print(f"{ranks:,} ranks of {entries:,} entries ({size >> 20} MiB) in {time.monotonic() - start:.1f} s")
        print(hang and (hang.missing_ranks, hang.group_description, hang.sequence, hang.confidence))


def _job(ranks: int, entries: int) -> tuple[Groups, dict[int, list[dict[str, object]]]]:
    """Groups of 8 (tensor parallel) and across them (data parallel); rank 3 stops, in turn the others wait for it."""
    rows = [(f"{first + 10}", ("TP", range(first, first + 8))) for first in range(0, ranks, 8)]
    columns = [(f"{first + ranks + 20}", ("DP", range(first, ranks, 8))) for first in range(8)]
    groups: Groups = dict([*rows, *columns])
    ops = {}
    for rank in range(ranks):
        mine = [name for name, (_, members) in groups.items() if rank in members]
        own = [
            op(mine[number % 2], number // 2 + 1, at_ms=number, size=(number % 50 + 1,), frames=_frames(number % 9))
            for number in range(entries - 1)
        ]
        last = op(mine[(entries - 1) % 2], (entries - 1) // 2 + 1, at_ms=entries, state="started", retired=True)
        ops[rank] = own if rank == 3 else [*own, last]
    return groups, ops


@cache
def _frames(number: int) -> list[dict[str, object]]:
    return [{"name": f"call_{depth}", "filename": "/site/train.py", "line": number + depth} for depth in range(12)]


if __name__ == "__main__":
    main()
