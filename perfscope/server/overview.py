"""Tools to begin with: which recordings there are, what limits a job, what to change, and what a term means."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

from pydantic import Field

from perfscope.analyzers.whatif.predict import SETTINGS
from perfscope.errors import UnusableInput, did_you_mean
from perfscope.recording.job import NSYS_EXPORT_SUFFIX, NSYS_REPORT_SUFFIXES, Job
from perfscope.recording.role_jobs import open_main
from perfscope.results.categories import TimeCategory
from perfscope.results.fields import classes_of, fields_of
from perfscope.results.frames import TABLES
from perfscope.results.summary import Summary
from perfscope.results.time_breakdown import shares
from perfscope.server.answers import (
    About,
    AboutRecording,
    Answer,
    Definition,
    FindingLine,
    FindingRow,
    Overview,
    RecordingRow,
    StragglerLine,
)
from perfscope.server.folder import Recording, files_of
from perfscope.server.opened import state_of
from perfscope.server.tool import Capture, RecordingName, Tools, tool

_LINES = 8
"""Findings and stragglers that the overview lists."""
_NOTES = 12


class OverviewTools(Tools):
    """Where one begins."""

    @tool("Recordings in the folder", About, RecordingRow)
    def list_recordings(
        self,
        contains: Annotated[str | None, Field(description="Only recordings whose name contains this text.")] = None,
    ) -> Answer:
        """List the recordings of training jobs that can be asked about, with what their files say.

        Call this first: every other tool takes the name of a recording from here. Nothing is analyzed, so it is quick.
        """
        recordings = [each for each in self.folder.recordings() if contains is None or contains in each.name]
        notes = () if recordings else ("No recording here: perfscope run -- COMMAND makes one.",)
        return Answer(
            fixed=About(notes=notes),
            rows=[self._row(each) for each in recordings],
            state=",".join(each.name for each in recordings),
        )

    @tool("What limits a training job", Overview)
    def summary(self, recording: RecordingName, capture: Capture = None) -> Answer:
        """Say in one answer what limits a training job: the verdict, the step time, where the time went, the findings
        and the stragglers in a line each.

        Begin with this for any question about a recording. Details are in findings, time_breakdown, stragglers, steps,
        kernels and the other tools. The first call reads all traces, which can take minutes for large jobs; later
        calls are quick.
        """
        place, found = self.opened(recording, capture)
        return Answer(fixed=_overview(place, found))

    @tool("What to change, with evidence", AboutRecording, FindingRow)
    def findings(
        self,
        recording: RecordingName,
        rule: Annotated[
            str | None, Field(description="Only findings of this rule, such as dataloader-workers.")
        ] = None,
        severity: Annotated[
            str | None, Field(description="Only findings of this severity: high, medium, low or info.")
        ] = None,
        capture: Capture = None,
    ) -> Answer:
        """List what limits the job and what to change: evidence, the setting with its old and new value, what to type,
        and the predicted step time. The finding that is worth most comes first.

        Use it to advise a change, or to check on which numbers an advice rests. Savings of several findings overlap
        and must not be added: what_if predicts them together.
        """
        place, found = self.opened(recording, capture)
        rows = [FindingRow.of(number, each, found.job.step_us) for number, each in enumerate(found.findings)]
        notes: tuple[str, ...] = () if rows else (found.verdict.headline,)
        if rule is not None and rule not in (known := [row.rule for row in rows]):
            notes = (f"No finding of {rule}{did_you_mean(rule, known)}; there are: {', '.join(known) or 'none'}.",)
        rows = [row for row in rows if rule in (None, row.rule) and severity in (None, row.severity)]
        return Answer(fixed=AboutRecording(recording=place.name, notes=notes), rows=rows, state=state_of(place))

    @tool("What a term means", About, Definition)
    def define(
        self,
        term: Annotated[
            str, Field(description="A metric, column, category or setting: busbw_gbps, idle_sync, MFU, straggler.")
        ],
    ) -> Answer:
        """Define a number or a term: how it is computed, and its unit.

        Use it before explaining a number to a user, or where a column's meaning decides the answer.
        """
        known = list(_definitions())
        rows = [row for row in known if row.term.lower() == term.lower()]
        rows = rows or [row for row in known if term.lower() in row.term.lower()]
        rows = rows or [row for row in known if term.lower() in row.meaning.lower()]
        if not rows:
            similar = did_you_mean(term, {row.term for row in known})
            raise UnusableInput(f"{term}: no such term{similar}; list_tables names the columns of every table")
        return Answer(fixed=About(), rows=rows)

    def _row(self, recording: Recording) -> RecordingRow:
        if recording.is_summary:
            job, kind = Job(recording.path, ()), "result"
        else:
            job = open_main(recording.path)
            kind = _kind(job)
        runs = list(job.runs.values())
        launch = job.launch
        return RecordingRow(
            recording=recording.name,
            kind=kind,
            traces=len(job.sources),
            world_size=max((run.world_size for run in runs), default=None),
            captures=job.captures if len(job.captures) > 1 else (),
            steps_seen=max((run.steps.seen for run in runs), default=None),
            has_history=bool(job.histories),
            has_hang_files=bool(job.stuck),
            bytes=sum(_size(path) for path in files_of(recording.path)),
            started_at=launch.started_at if launch else None,
            exit_code=launch.exit_code if launch else None,
            command=" ".join(launch.command) if launch and not self.folder.anonymize else "",
        )


def _kind(job: Job) -> str:
    if job.launch is not None or job.runs or job.histories:
        return "perfscope run"
    if not job.sources:
        return "hang"
    is_report = job.sources[0].path.name.endswith((*NSYS_REPORT_SUFFIXES, NSYS_EXPORT_SUFFIX))
    return "nsys" if is_report or job.sources[0].path.is_dir() else "traces"


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _overview(recording: Recording, found: Summary) -> Overview:
    job, step_us = found.job, found.job.step_us
    gains = [(finding, finding.gain(step_us)) for finding in found.findings]
    notes = [note.text for note in found.notes[:_NOTES]]
    if len(found.notes) > _NOTES:
        notes.append(f"{len(found.notes) - _NOTES} more notes: table notes.")
    return Overview(
        recording=recording.name,
        notes=tuple(notes),
        headline=found.verdict.headline,
        first_action=found.verdict.first_action,
        healthy=found.verdict.healthy,
        hung=found.hang is not None,
        step_time_us=job.step_time_us,
        unprofiled_step_us=job.unprofiled_step_us,
        steps=job.steps,
        world_size=job.world_size,
        ranks=job.ranks,
        missing_ranks=job.missing_ranks,
        hosts=len(job.hosts),
        strategy=job.strategies,
        backend=job.backend,
        devices=job.devices,
        mfu=found.utilisation.mfu,
        time_shares=shares(found.time_breakdown),
        findings=tuple(
            FindingLine(
                rule=finding.rule,
                severity=finding.severity.value,
                title=finding.title,
                speedup=None if gain is None else 1 + gain,
            )
            for finding, gain in gains[:_LINES]
        ),
        stragglers=tuple(
            StragglerLine(
                rank=row.rank,
                cause=row.cause,
                lost_us=row.lost_us,
                share_of_step=row.lost_us / job.step_time_us if job.step_time_us > 0 else 0.0,
            )
            for row in found.stragglers[:_LINES]
        ),
        capture=found.capture,
    )


def _definitions() -> Iterator[Definition]:
    """Every term: categories, columns of tables, fields of results, settings of what-ifs."""
    for category in TimeCategory:
        yield Definition(term=category.id, where="time breakdown", unit="µs", meaning=category.definition)
    for name, table in TABLES.items():
        yield Definition(term=name, where="tables", unit="", meaning=str(table.__doc__))
        for column in table.columns:
            if column.meaning:
                yield Definition(term=column.name, where=name, unit=column.unit, meaning=column.meaning)
    in_tables = {column.name for table in TABLES.values() for column in table.columns}
    for kind in sorted(classes_of(Summary), key=lambda each: each.__name__):
        for field in fields_of(kind).values():
            if field.meaning and field.name not in in_tables:
                yield Definition(term=field.name, where=kind.__name__, unit=field.unit, meaning=field.meaning)
    for setting in SETTINGS:
        yield Definition(term=setting.name, where="what_if", unit=setting.value, meaning=setting.help)
