"""What is missing from the recording or uncertain in it, in words."""

from __future__ import annotations

from perfscope.frozen import dataclass
from perfscope.reports import tables
from perfscope.reports.page.overview import perturbation
from perfscope.reports.tables import HtmlTable
from perfscope.results.notes import Note, ended, note
from perfscope.results.rows import Failure, JobInfo
from perfscope.results.summary import Summary
from perfscope.text import known, percent, plural, rank_list, ranks_in_words


@dataclass(frozen=True)
class Gap:
    """One statement about what is missing or uncertain."""

    about: str
    text: str


def gaps(summary: Summary) -> tuple[Gap, ...]:
    """Every statement: what is missing, how the job ended, profiler overhead, the replay, then the notes.

    What a note reports already, with its remedy, is not repeated.
    """
    job = summary.job
    noted = {each.about for each in summary.notes}
    statements = []
    if job.failures:
        statements.append(
            Gap(
                "failures",
                f"{plural(len(job.failures), 'file')} could not be analyzed; see the reasons in the table below.",
            )
        )
    if job.missing_ranks and "ranks" not in noted:
        statements.append(Gap("ranks", missing(job)))
    if job.exit_code and not {"exit_code", "killed"} & {each.kind for each in summary.notes}:
        statements.append(Gap("exit code", ended(job.exit_code).text))
    if summary.time_breakdown and "steps" not in noted and (not job.steps or job.few_steps):
        none = note("steps", "no_steps", steps_from=job.steps_from or "nothing marks them")
        few = note("steps", "few_steps", count=len(job.steps)) if job.steps else none
        statements.append(Gap("steps", few.text))
    if summary.time_breakdown:
        statements.append(_perturbation(summary))
    error = summary.replay.error
    if known(error):
        statements.append(
            Gap(
                "replay",
                f"Replayed without a change, the recorded step misses its measured time by {percent(abs(error))}. That "
                "is a condition of predictions (above 5% there are none), not their accuracy.",
            )
        )
    return (*statements, *(Gap(each.about, _with_ranks(each)) for each in summary.notes))


def failures_table(failures: tuple[Failure, ...]) -> HtmlTable | None:
    """The files that could not be analyzed, and why; None where there are none."""
    if not failures:
        return None
    columns = [
        tables.ranks("Rank", [failure.rank for failure in failures]),
        tables.words("File", [failure.path for failure in failures]),
        tables.words("Reason", [failure.reason for failure in failures]),
    ]
    return tables.table("failures", "Not analyzed", columns)


def missing(job: JobInfo) -> str:
    """Which ranks are not in the recording, as a sentence."""
    absent = job.missing_ranks
    of_all = f"{len(absent):,} of {plural(job.world_size, 'rank')}" if job.world_size else plural(len(absent), "rank")
    return f"Not recorded: {of_all} ({rank_list(absent)}). What they did shows only in the waits of the recorded ranks."


def _perturbation(summary: Summary) -> Gap:
    ratio = summary.job.perturbation
    if known(ratio):
        return Gap("profiler overhead", perturbation(summary, ratio))
    return Gap("profiler overhead", "The profiler overhead is not known: no unprofiled steps were recorded.")


def _with_ranks(note: Note) -> str:
    """The note, followed by its ranks unless it names them itself."""
    if not note.ranks or note.names_ranks:
        return note.text
    return f"{note.text.removesuffix('.')} ({ranks_in_words(note.ranks)})."
