"""Job: every rank of one run, by path. Opening one reads metadata and names, no trace."""

from __future__ import annotations

from dataclasses import field, replace
from pathlib import Path
from typing import Any, Final

from perfscope.errors import UnusableInput
from perfscope.frozen import dataclass
from perfscope.recording import (
    dumps,
    execution_traces,
    inspector,
    kernel_annotations,
    metadata,
    paths,
    provenance,
    remote,
    snapshots,
)
from perfscope.recording.captures import (
    Capture,
    TraceSource,
    captures_of_files,
    captures_of_folders,
    last_full,
    natural,
    rank_in_name,
)
from perfscope.recording.metadata import WITHOUT_OPTIMIZER, LaunchMetadata, RunMetadata
from perfscope.redact import redact_value

TRACE_SUFFIXES: Final = (".json", ".json.gz", ".json.zip", ".zip", ".gz", ".zst")
NSYS_REPORT_SUFFIXES: Final = (".nsys-rep", ".qdrep", ".qdstrm")
NSYS_EXPORT_SUFFIX: Final = ".sqlite"
NSYS_PARQUET_MARK: Final = "StringIds.parquet"
"""In every Parquet export of Nsight Systems, which is a folder with a file a table."""

_ARCHIVES: Final = (".tar", ".tar.gz", ".tgz", ".tar.zst", ".tar.bz2", ".tar.xz")

_WITHOUT_TIMES: Final = (
    "{}: is an execution trace of PyTorch, which has operators but no times; analyze a folder in which the profiler's "
    "trace of the same steps (export_chrome_trace) lies beside it"
)

__all__ = ["Job", "Problem", "TraceSource", "open_job", "rank_in_name"]


@dataclass(frozen=True)
class Problem:
    """A file that cannot be used, and why; ``rank`` None when not known."""

    rank: int | None
    path: Path
    error: str


@dataclass(frozen=True)
class Job:
    """The files of one run."""

    path: Path
    sources: tuple[TraceSource, ...]
    runs: dict[int, RunMetadata] = field(default_factory=dict)
    """Rank -> what it wrote beside its trace; empty for traces of other tools."""
    launch: LaunchMetadata | None = None
    captures: tuple[int, ...] = ()
    """Captures found, by number; ``capture`` is the one whose files ``sources`` lists."""
    capture: int | None = None
    problems: tuple[Problem, ...] = ()
    samples: tuple[Path, ...] = ()
    """What the system sampler wrote, one file per host."""
    histories: dict[int, Path] = field(default_factory=dict)
    """Rank -> its step history. A recording may hold these alone; ``sources`` is then empty."""
    stuck: dumps.StuckFiles = field(default_factory=dumps.StuckFiles)
    """What ranks that stood still left. There may be nothing else."""
    snapshots: tuple[TraceSource, ...] = ()
    """Memory snapshots, those that were taken last. There may be nothing else."""
    inspector: tuple[Path, ...] = ()
    """Logs of NCCL Inspector, one of each process. There may be nothing else."""
    further: tuple[str, ...] = ()
    """Folders in this one that hold recordings of further trainings of the same command, by name."""
    compiled: dict[int, Path] = field(default_factory=dict)
    """Rank -> what it noted of the code that it compiled."""
    provenance: tuple[Path, ...] = ()
    """What inductor itself wrote of where its kernels come from."""
    annotations: dict[int, Path] = field(default_factory=dict)
    """Rank -> torch's annotations of its kernels in CUDA graphs, as the program pickled them."""
    choice: str = ""
    """Which of the traces of other tools were taken, where there was a choice: a sentence for the report."""
    role: str = ""
    """Which of the ``roles`` this is, by name; empty where there are none."""
    roles: tuple[RoleJob, ...] = ()
    """All jobs of a folder that holds several roles (``role_jobs``); this is one of them."""

    @property
    def shown_path(self) -> str:
        """Its path as results name it: without secrets."""
        return redact_value(str(self.path))


@dataclass(frozen=True)
class RoleJob:
    """One job of several that make up a recording: the ranks of one role, or of one instance of it."""

    name: str
    """Unique in the recording: the role; where it has several instances with the instance's number."""
    role: str
    job: Job


def open_job(path: Path, capture: int | None = None) -> Job:
    """Find the files of a run: a recording's folder, any folder of traces, or one trace file.

    ``capture`` chooses among captures, where there are several; the last one that most ranks wrote is the default.
    ``path`` may be remote (``perfscope.recording.remote.opened``).
    Raises UnusableInput, naming the path and the remedy, when there is nothing to read.
    """
    if not path.exists():
        raise UnusableInput(f"{path}: no such file or folder")
    if path.is_file() and execution_traces.process_of(path) is not None:
        raise UnusableInput(_WITHOUT_TIMES.format(path))
    return _with_execution_traces(_open(path, capture))


def _open(path: Path, capture: int | None) -> Job:
    if path.is_file() and path.name.lower().endswith(_ARCHIVES):
        raise UnusableInput(f"{path}: is an archive; unpack it (tar xf {path.name}) and name the folder")
    if path.is_file() and (log := inspector.find([path])):
        return Job(path, (), inspector=log)
    if path.is_file() and (taken := snapshots.find([path])):
        return _with_snapshots(Job(path, ()), taken)
    if path.is_file() and (stuck := dumps.find([path])):
        return _with_stuck(Job(path, ()), stuck)
    if path.is_file() or _is_parquet_export(path):
        return Job(path, (TraceSource(path, rank_in_name(path)),))
    names = files_in(path)
    taken, logs = snapshots.find(names), (*inspector.find(names), *inspector.beside(path))
    about_kernels, annotations = provenance.find(names), kernel_annotations.beside(path, names)
    names = [entry for entry in names if entry not in (*taken, *logs, *about_kernels, *annotations.values())]
    beside: dict[str, Any] = {"inspector": logs, "provenance": about_kernels, "annotations": annotations}
    stuck = dumps.find(entry for entry in names if not is_recording_file(entry))
    names = stuck.others(names)
    if any(is_recording_file(entry) for entry in names):
        job = _open_recording(path, names, capture, without_traces=bool(stuck or taken or logs))
        return replace(_with_snapshots(_with_stuck(job, stuck), taken), **beside)
    traces = traces_in(path, names)
    if traces or stuck or taken or logs:
        job = _choose(path, captures_of_files(traces), capture) if traces else Job(path, ())
        return replace(_with_snapshots(_with_stuck(job, stuck), taken), **beside)
    if executions := execution_traces.find(names):
        raise UnusableInput(_WITHOUT_TIMES.format(next(iter(executions))))
    return _open_folders_below(path, capture)


def _with_execution_traces(job: Job) -> Job:
    """The job whose traces know the execution traces in the same folders."""
    folders = dict.fromkeys(
        source.path.parent for source in job.sources if source.path.name.lower().endswith(TRACE_SUFFIXES)
    )
    if job.path.is_file():
        return job
    found = {path: pid for folder in folders for path, pid in execution_traces.find(files_in(folder)).items()}
    if not found:
        return job
    sources, nameless = execution_traces.beside(job.sources, found, job.capture)
    problems = (
        Problem(None, path, "is an execution trace, and nothing shows of which rank: name it et_rank<N>.json")
        for path in nameless
    )
    return replace(job, sources=sources, problems=(*job.problems, *problems))


def _with_stuck(job: Job, stuck: dumps.StuckFiles) -> Job:
    nameless = tuple(
        Problem(None, path, "its name does not say which rank it is of: name it rank<N>") for path in stuck.unnamed
    )
    return replace(job, stuck=stuck, problems=(*job.problems, *nameless))


def _with_snapshots(job: Job, taken: list[Path]) -> Job:
    """The job with its memory snapshots; of several that its ranks took the last."""
    if not taken:
        return job
    chosen = last_full(captures_of_files(taken)).sources
    only = next(iter(job.runs)) if len(job.runs) == len(chosen) == 1 else None
    named = (replace(source, named_rank=only) if source.named_rank is None else source for source in chosen)
    return replace(job, snapshots=tuple(named))


def _is_own_result(entry: Path) -> bool:
    """A result that ``perfscope analyze --json`` wrote among the traces."""
    if not entry.name.lower().endswith(".json") or (remote.is_remote(entry) and rank_in_name(entry) is not None):
        return False  # a rank's: not worth a request to the store each
    return b'"perfscope.summary/' in remote.read_head(entry, 64)


def is_recording_file(entry: Path) -> bool:
    """Is a file of that name one of a recording that ``perfscope run`` writes?"""
    return (
        entry.name == paths.LAUNCH_FILE
        or paths.rank_of_run_file(entry) is not None
        or paths.rank_and_capture_of_trace_file(entry) is not None
        or paths.rank_of_steps_file(entry) is not None
        or paths.rank_of_compiled_file(entry) is not None
    )


def _open_recording(folder: Path, names: list[Path], capture: int | None, *, without_traces: bool) -> Job:
    """``without_traces``: there is something else to analyze where no trace was recorded."""
    problems: list[Problem] = []
    launch = _launch(folder, problems)
    runs: dict[int, RunMetadata] = {}
    for entry in names:
        rank = paths.rank_of_run_file(entry)
        if rank is not None:
            try:
                runs[rank] = _of_rank(metadata.load_run(entry), rank, entry)
            except ValueError as error:
                problems.append(Problem(rank, entry, str(error)))
    captures: dict[int, dict[int, Path]] = {}
    for entry in names:
        found = paths.rank_and_capture_of_trace_file(entry)
        if found is not None:
            # The compressed file replaces the plain one; where a kill left both, they hold the same.
            captures.setdefault(found[1], {}).setdefault(found[0], entry)
    samples = tuple(entry for entry in names if paths.is_samples_file(entry))
    histories = {rank: entry for entry in names if (rank := paths.rank_of_steps_file(entry)) is not None}
    compiled = {rank: entry for entry in names if (rank := paths.rank_of_compiled_file(entry)) is not None}
    reports = () if captures else tuple(TraceSource(entry, rank_in_name(entry)) for entry in _reports(folder, names))
    if not captures and not reports and not ((histories or without_traces) and capture is None):
        further = [str(each) for each in paths.further_jobs(folder)]
        others = f" Of other trainings of the command there is something in {', '.join(further)}." if further else ""
        raise UnusableInput(_nothing_recorded(folder, launch, runs) + others)
    chosen = _choose_capture(folder, captures, capture) if captures else None
    traces = captures[chosen] if chosen is not None else {}
    sources = tuple(TraceSource(entry, rank) for rank, entry in sorted(traces.items())) or reports
    return Job(
        folder, sources, runs, launch, tuple(sorted(captures)), chosen, tuple(problems), samples, histories,
        further=tuple(each.name for each in paths.further_jobs(folder)), compiled=compiled,
    )  # fmt: skip


def _of_rank(run: RunMetadata, rank: int, path: Path) -> RunMetadata:
    """What a file named after ``rank`` holds, in which names go before numbers: no two files have one name."""
    if run.rank == rank and rank < run.world_size:
        return run
    said = f"{path.name}: says rank {run.rank} of {run.world_size}, its name rank {rank}: the name is used."
    return replace(run, rank=rank, world_size=max(run.world_size, rank + 1), problems=(*run.problems, said))


def _launch(folder: Path, problems: list[Problem]) -> LaunchMetadata | None:
    path = folder / paths.LAUNCH_FILE
    if not path.exists():
        return None
    try:
        launch = metadata.load_launch(path)
    except ValueError as error:
        problems.append(Problem(None, path, str(error)))
        return None
    problems += [Problem(None, path, sentence) for sentence in launch.problems]
    return launch


def _choose_capture(folder: Path, captures: dict[int, dict[int, Path]], wanted: int | None) -> int:
    if wanted is None:
        return max(captures, key=lambda index: (len(captures[index]), index))
    if wanted not in captures:
        there = ", ".join(str(index) for index in sorted(captures))
        raise UnusableInput(f"{folder}: no capture {wanted}; choose from {there}")
    return wanted


def _nothing_recorded(folder: Path, launch: LaunchMetadata | None, runs: dict[int, RunMetadata]) -> str:
    """Why a recording holds no trace, from what its ranks wrote, and what to do."""
    running = all(run.outcome == "running" for run in runs.values())
    if launch is not None and not launch.has_ended and running:
        return (
            f"{folder}: nothing is recorded yet, and the command has not ended: analyze again later. Where it was "
            "killed, record again, with an earlier capture (--wait, --warmup)"
        )
    if not runs:
        ended = f" (the command ended with {launch.exit_code})" if launch and launch.exit_code else ""
        return (
            f"{folder}: no rank recorded anything{ended}: no process took an optimizer step under perfscope run. "
            f"{WITHOUT_OPTIMIZER}"
        )
    steps = max(run.steps.seen for run in runs.values())
    problems = sorted({problem for run in runs.values() for problem in run.problems})
    reported = f" The ranks reported: {' '.join(problems)}" if problems else ""
    if steps == 0:
        return f"{folder}: no rank took an optimizer step. {WITHOUT_OPTIMIZER}.{reported}"
    killed = any(run.outcome == "running" for run in runs.values())  # its metadata is older
    ended = f"was killed after {steps} steps or more" if killed else f"ended after {steps} steps"
    return (
        f"{folder}: the job {ended}, before a step was recorded; record earlier: "
        f"perfscope run --wait 1 --warmup 0 --active {max(steps - 1, 1)} …{reported}"
    )


def files_in(folder: Path) -> list[Path]:
    """The files of a folder by name, without those still being written and results of PerfScope's own."""
    found = (entry for entry in folder.iterdir() if entry.is_file() and not entry.name.endswith(paths.PARTIAL_SUFFIX))
    return sorted((entry for entry in found if not _is_own_result(entry)), key=lambda entry: entry.name)


def traces_in(folder: Path, names: list[Path]) -> list[Path]:
    """The traces among a folder's files (and folders: an export may be one), each recording once."""
    traces = [entry for entry in names if entry.name.lower().endswith(TRACE_SUFFIXES)]
    executions = execution_traces.find(traces)
    return [entry for entry in traces if entry not in executions] + _reports(folder, names)


def _reports(folder: Path, names: list[Path]) -> list[Path]:
    """Reports of Nsight Systems and their exports, each recording once."""
    return _without_duplicates(
        [entry for entry in names if entry.name.endswith((*NSYS_REPORT_SUFFIXES, NSYS_EXPORT_SUFFIX))],
        sorted((entry for entry in folder.iterdir() if _is_parquet_export(entry)), key=lambda entry: entry.name),
    )


def _is_parquet_export(path: Path) -> bool:
    return path.is_dir() and (path / NSYS_PARQUET_MARK).is_file()


def _without_duplicates(files: list[Path], folders: list[Path]) -> list[Path]:
    """Each report of Nsight Systems once: its export rather than itself, and a SQLite export rather than a Parquet one.

    An export older than its report is of an earlier one of the same name, and gives way to it.
    """
    reports = {entry.stem: entry for entry in files if entry.name.endswith(NSYS_REPORT_SUFFIXES)}
    chosen: dict[str, Path] = {}
    for stem, entry in [(entry.stem, entry) for entry in files if entry not in reports.values()] + [
        (folder.name.removesuffix("_pqtdir"), folder) for folder in folders
    ]:
        report = reports.get(stem)
        if report is None or entry.stat().st_mtime >= report.stat().st_mtime:
            chosen.setdefault(stem, entry)
    return sorted({**reports, **chosen}.values(), key=lambda entry: entry.name)


def _open_folders_below(folder: Path, capture: int | None) -> Job:
    """Frameworks write a folder for each capture, node or rank; one alone may be nested deeper."""
    folders = sorted((entry for entry in folder.iterdir() if entry.is_dir()), key=lambda entry: natural(entry.name))
    files = {entry: files_in(entry) for entry in folders if not entry.name.startswith(".")}
    recordings = [entry.name for entry, names in files.items() if any(is_recording_file(name) for name in names)]
    found = {
        entry.name: traces
        for entry, names in files.items()
        if (traces := traces_in(entry, dumps.find(names).others(names)))
    }
    captures = captures_of_folders(found) if found and not recordings else None
    if captures:
        return replace(_choose(folder, captures, capture), annotations=kernel_annotations.find(files_in(folder)))
    # Each node wrote its ranks' dumps into a folder of its own.
    if not found and (stuck := dumps.find(name for names in files.values() for name in names)):
        return _with_stuck(Job(folder, ()), stuck)
    # A folder of snapshots for each of several steps, as torchtitan writes them, or for each node.
    taken = {entry.name: these for entry, names in files.items() if (these := snapshots.find(names))}
    if not found and (captures := captures_of_folders(taken) if taken else None):
        return _with_snapshots(Job(folder, ()), [source.path for source in last_full(captures).sources])
    if not found and len(folders) == 1:
        return open_job(folders[0], capture)
    suffixes = (*TRACE_SUFFIXES, *NSYS_REPORT_SUFFIXES, NSYS_EXPORT_SUFFIX)
    below = [str(folder / name) for name in found] or [str(folder / name) for name in recordings]
    hint = "record one with perfscope run -- COMMAND"
    if below:
        hint = f"there are traces in {', '.join(below[:5])}: name one of these"
    raise UnusableInput(f"{folder}: no trace in this folder (looked for {', '.join(suffixes)}); {hint}")


def _choose(folder: Path, captures: list[Capture], wanted: int | None) -> Job:
    """The job of one of several captures: the last that most ranks wrote, unless another is wanted."""
    if len(captures) == 1 and not wanted:
        return Job(folder, captures[0].sources)
    if wanted is not None and wanted >= len(captures):
        there = ", ".join(
            f"{index} ({capture.label})" if capture.label else "0" for index, capture in enumerate(captures)
        )
        raise UnusableInput(f"{folder}: no capture {wanted}; choose from {there}")
    chosen = captures.index(last_full(captures)) if wanted is None else wanted
    why = "as asked" if wanted is not None else "the last that most ranks wrote"
    choice = (
        f"The folder holds {len(captures)} captures; number {chosen}, {captures[chosen].label} "
        f"({len(captures[chosen].sources)} traces), is analyzed: {why}."
    )
    numbers = tuple(range(len(captures)))
    return Job(folder, captures[chosen].sources, captures=numbers, capture=chosen, choice=choice)
