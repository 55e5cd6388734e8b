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
from pathlib import Path
from unittest import mock

from perfscope.analyzers.analyze import analyze
from perfscope.analyzers.hang.answer import find_hang
from perfscope.analyzers.readers import flight, plain_pickle
from tests.analyzers.hang.dumps import Groups, document, op
from tests.analyzers.readers.flight_fuzz import mutations, strange
from tests.stuck.faults import ODD
from tests.stuck.large import write_large


def main() -> None:
    """Do what the arguments say."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mutations", type=int, default=0)
    parser.add_argument("--folder", type=Path, help="dumps to mutate besides those made here")
    parser.add_argument("--ranks", type=int, default=0)
    parser.add_argument("--entries", type=int, default=2000)
    parser.add_argument("--fault", choices=("sleep", *ODD), default="sleep", help="of one of the ranks")
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    if arguments.mutations:
        _fuzz(arguments.mutations, arguments.folder, random.Random(arguments.seed))
    if arguments.ranks:
        _scale(arguments.ranks, arguments.entries, arguments.fault)


def _fuzz(count: int, folder: Path | None, rng: random.Random) -> None:
    groups, entries = _job()
    seeds = [pickle.dumps(document(groups, entries[0]), protocol) for protocol in (2, 4, 5)]
    seeds += [path.read_bytes() for path in sorted(folder.iterdir()) if "dump" in path.name] if folder else []
    made = [document(groups, own, rank) for rank, own in entries.items()]
    outcomes: Counter[str] = Counter()
    whole = {rank: flight.parse(pickle.dumps(document(groups, own, rank), 2)) for rank, own in entries.items()}
    with mock.patch.object(plain_pickle._Unpickler, "find_class", side_effect=AssertionError):
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


def _scale(ranks: int, entries: int, kind: str) -> None:
    """The dumps are made first: their time does not count."""
    with tempfile.TemporaryDirectory() as folder:
        guilty = write_large(Path(folder), ranks, entries, kind)
        size = sum(path.stat().st_size for path in Path(folder).iterdir())
        start, used_before_s = time.monotonic(), _used_s()
        hang = analyze(folder).hang
        took_s, used_s = time.monotonic() - start, _used_s() - used_before_s
        print(f"{ranks:,} ranks of {entries:,} entries ({size >> 20} MiB): {kind} on rank {guilty}")
        print(f"judged in {took_s:.1f} s ({used_s:.1f} s of CPU)")
        print(hang and (hang.missing_ranks, hang.group_description, hang.sequence, hang.confidence))


def _used_s() -> float:
    """CPU time of this process and its workers so far."""
    both = (resource.getrusage(whose) for whose in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(each.ru_utime + each.ru_stime for each in both)


def _job() -> tuple[Groups, dict[int, list[dict[str, object]]]]:
    """Eight ranks with two groups of all; rank 3 stops, in turn the others wait for it."""
    groups: Groups = {"10": ("TP", range(8)), "28": ("DP", range(8))}
    frames = [{"name": f"call_{depth}", "filename": "/site/train.py", "line": depth} for depth in range(12)]
    own = [op(("10", "28")[n % 2], n // 2 + 1, at_ms=n, size=(n + 1,), frames=frames) for n in range(11)]
    last = op("28", 6, at_ms=12, state="started", retired=True)
    return groups, {rank: own if rank == 3 else [*own, last] for rank in range(8)}


if __name__ == "__main__":
    main()
