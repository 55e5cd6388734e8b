"""What is missing from the recording or uncertain in it, in words: the page never hides a gap."""

from __future__ import annotations

from dataclasses import dataclass

from perfscope.reports import tables
from perfscope.reports.format import known, plural, rank_list, ranks_named, share
from perfscope.reports.overview import perturbation
from perfscope.reports.tables import Table
from perfscope.summary import Failure, Job, Note, Summary


@dataclass(frozen=True)
class Gap:
    """One statement about what is missing or uncertain."""

    about: str
    text: str


def gaps(summary: Summary) -> tuple[Gap, ...]:
    """Every statement, the gravest first: what is missing, how the job ended, perturbation, replay, then the notes.

    What a note says already, with its remedy, is not said twice.
    """
    job = summary.job
    noted = {note.about for note in summary.notes}
    found = []
    if job.failures:
        found.append(
            Gap("failures", f"{plural(len(job.failures), 'file')} could not be analyzed: see the table below.")
        )
    if job.missing_ranks and "ranks" not in noted:
        found.append(Gap("ranks", missing(job)))
    if job.exit_code not in (None, 0) and not any("exit code" in note.text for note in summary.notes):
        found.append(Gap("exit code", ended(job.exit_code or 0)))
    if job.ranks and "steps" not in noted:
        found += _steps(job)
    if job.ranks:
        found.append(_perturbation(summary))
    error = summary.replay.error
    if known(error):
        found.append(
            Gap(
                "replay",
                f"Replaying the unchanged step is off by {share(abs(error))}; predictions are no better than that.",
            )
        )
    return (*found, *(Gap(note.about, _note(note)) for note in summary.notes))


def failures_table(failures: tuple[Failure, ...]) -> Table | None:
    """What could not be analyzed and why; None where everything could."""
    if not failures:
        return None
    columns = [
        tables.ranks("Rank", [failure.rank for failure in failures]),
        tables.words("File", [failure.path for failure in failures]),
        tables.words("What went wrong", [failure.reason for failure in failures]),
    ]
    return tables.table("failures", "Not analyzed", columns)


def missing(job: Job) -> str:
    """Which ranks are not in the recording, as a sentence."""
    absent = job.missing_ranks
    of_all = f" of {job.world_size:,}" if job.world_size else ""
    verb = "is" if len(absent) == 1 else "are"
    return (
        f"{plural(len(absent), 'rank')}{of_all} {verb} missing from the recording: {rank_list(absent)}. "
        "What they did can only be seen in how the others waited."
    )


def _steps(job: Job) -> list[Gap]:
    if not job.steps:
        source = f" ({job.steps_from})" if job.steps_from else ""
        return [Gap("steps", f"No steps were found{source}: the whole recording is treated as one window.")]
    if len(job.steps) < 5:
        text = f"Only {plural(len(job.steps), 'step')} recorded: below 5 no statement is better than low confidence."
        return [Gap("steps", text)]
    return []


def ended(code: int) -> str:
    """How the recorded command ended, as a sentence."""
    how = f"was ended by signal {-code}" if code < 0 else f"ended with exit code {code}"
    return f"The recorded command {how}; what it left behind was analyzed."


def _perturbation(summary: Summary) -> Gap:
    ratio = summary.job.perturbation
    if known(ratio):
        return Gap("perturbation", perturbation(ratio))
    return Gap("perturbation", "How much profiling slowed the steps is not known: no unprofiled steps were recorded.")


def _note(note: Note) -> str:
    """The note, followed by its ranks unless it speaks of ranks itself."""
    if not note.ranks or "rank" in note.text.lower():
        return note.text
    return f"{note.text.removesuffix('.')} ({ranks_named(note.ranks)})."
