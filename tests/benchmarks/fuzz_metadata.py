"""Analyzes recordings whose metadata and samples are changed at random (``tests.recording.mutations``).

    python -m tests.benchmarks.fuzz_metadata --inputs 10000 [--seed 0] [--first 0]

Prints how many analyses ended otherwise than with a result or an error that names the folder, and each kind of those.
A failure can be repeated: ``--seed S --first N --inputs 1``.
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path

import click

from tests.recording import mutations


@click.command(help=__doc__)
@click.option("--inputs", default=1000, show_default=True)
@click.option("--seed", default=0, show_default=True)
@click.option("--first", default=0, show_default=True, help="Number of the first input.")
def main(inputs: int, seed: int, first: int) -> None:
    """Run the inputs asked for, in turn over the recordings; exit 1 if any failed."""
    began = time.monotonic()
    failed: list[tuple[int, str, str]] = []
    with tempfile.TemporaryDirectory() as folder:
        bases = mutations.recordings(Path(folder, "bases"))
        for place, base in enumerate(bases):
            numbers = range(first + place, first + inputs, len(bases))
            failed += mutations.run(base, Path(folder, base.name), seed, numbers)
    click.echo(f"{inputs} inputs in {time.monotonic() - began:.0f} s, {len(failed)} failures")
    for number, what, fault in failed[:20]:
        click.echo(f"{number}: {what}\n{fault}")
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
