"""Where a recording lies on disk: named templates, used by the writer and the readers alike.

A recording is one folder::

    recording/
      perfscope.json                       the launch: command, options, when (LaunchMetadata)
      rank-00003.run.json                  what no trace holds, one per rank (RunMetadata)
      rank-00003.capture-0.trace.json.gz   the Chrome trace of one capture of one rank
      rank-00003.capture-0.et.json.gz      PyTorch's execution trace of the same steps (--with execution-trace)
      rank-00003.compiled.json             where its compiled code comes from (perfscope.recording.compiled)
      rank-00003.steps.bin                 how long each of its steps took (perfscope.recording.history)
      host-node7.samples.jsonl             what the system sampler saw of one host (perfscope.recording.samples)
      rank-00003.stacks.txt                the stacks of a rank that made no step (faulthandler)
      rank-00003.flight.pickle             its last collectives, as torch's flight recorder writes them (or .json)
      job-1/                               a recording like this one, of a further training of the same command
      .bootstrap/                          what gets the collector into the ranks; not data
      report.html                          written by ``perfscope analyze``
      merged.pftrace                       written by ``perfscope merge``

A capture is written under a temporary name and renamed when whole, so a killed job leaves whole files or none; until it
is compressed it may stand there as ``.trace.json``.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

LAUNCH_FILE: Final = "perfscope.json"
BOOTSTRAP_FOLDER: Final = ".bootstrap"
REPORT_FILE: Final = "report.html"
MERGED_FILE: Final = "merged.pftrace"
MERGED_MARK: Final = b"perfscope merge"
"""In the first bytes of every file that ``perfscope merge`` writes: readers recognize the file by it."""
RUN_SUFFIX: Final = ".run.json"
PARTIAL_SUFFIX: Final = ".partial"
"""Ending of a file that is still being written; readers ignore it."""

# No job has a million ranks: longer numbers are no ranks.
_JOB = re.compile(r"^job-(\d{1,9})$")
_RUN = re.compile(r"^rank-(\d{1,6})\.run\.json$")
_SAMPLES = re.compile(r"^host-([\w.-]+)\.samples\.jsonl$")
_STEPS = re.compile(r"^rank-(\d{1,6})\.steps\.bin$")
_COMPILED = re.compile(r"^rank-(\d{1,6})\.compiled\.json$")
_STACKS = re.compile(r"^rank-(\d{1,6})\.stacks\.txt$")
_FLIGHT = re.compile(r"^rank-(\d{1,6})\.flight\.(?:pickle|json)$")
_TRACE = re.compile(r"^rank-(\d{1,6})\.capture-(\d{1,9})\.trace\.json(\.gz)?$")
_EXECUTION = re.compile(r"^rank-(\d{1,6})\.capture-(\d{1,9})\.et\.json(\.gz)?$")


def job_folder(folder: Path, number: int) -> Path:
    """Where the training that is ``number`` (counted from 0) of those that one command runs is recorded."""
    return folder / f"job-{number}" if number else folder


def further_jobs(folder: Path) -> list[Path]:
    """Folders of the command's further trainings, by number."""
    found = {int(match[1]): entry for entry in folder.iterdir() if (match := _JOB.match(entry.name)) and entry.is_dir()}
    return [found[number] for number in sorted(found)]


def run_file(folder: Path, rank: int) -> Path:
    """The run metadata of one rank."""
    return folder / f"rank-{rank:05d}{RUN_SUFFIX}"


def trace_file(folder: Path, rank: int, capture: int, *, compressed: bool = True) -> Path:
    """The Chrome trace of one capture (counted from 0) of one rank."""
    return folder / f"rank-{rank:05d}.capture-{capture}.trace.json{'.gz' if compressed else ''}"


def execution_trace_file(folder: Path, rank: int, capture: int, *, compressed: bool = True) -> Path:
    """PyTorch's execution trace of one capture of one rank."""
    return folder / f"rank-{rank:05d}.capture-{capture}.et.json{'.gz' if compressed else ''}"


def execution_trace_in_progress(folder: Path, rank: int, step: int | str) -> Path:
    """Where PyTorch writes an execution trace that begins around ``step``, until it is whole; ``*``: around any."""
    return partial(folder / f"rank-{rank:05d}.step-{step}.et.json")


def samples_file(folder: Path, host: str) -> Path:
    """What the system sampler saw of one host."""
    return folder / f"host-{host_in_name(host)}.samples.jsonl"


def host_in_name(host: str) -> str:
    """A host's name as it stands in file names: letters, digits, ``_``, ``.`` and ``-`` alone."""
    return re.sub(r"[^\w.-]", "_", host) or "_"


def steps_file(folder: Path, rank: int) -> Path:
    """The step history of one rank."""
    return folder / f"rank-{rank:05d}.steps.bin"


def compiled_file(folder: Path, rank: int) -> Path:
    """Where the compiled code of one rank comes from."""
    return folder / f"rank-{rank:05d}.compiled.json"


def stacks_file(folder: Path, rank: int) -> Path:
    """The stacks of all threads of a rank that made no step, as ``faulthandler`` writes them."""
    return folder / f"rank-{rank:05d}.stacks.txt"


def flight_file(folder: Path, rank: int, form: str = "pickle") -> Path:
    """The last collectives of a rank that made no step, in torch's own format: ``form`` is ``pickle`` or ``json``."""
    return folder / f"rank-{rank:05d}.flight.{form}"


def partial(path: Path) -> Path:
    """The temporary name under which ``path`` is written before it is renamed."""
    return path.with_name(path.name + PARTIAL_SUFFIX)


def rank_of_run_file(path: Path) -> int | None:
    """The rank in a run-metadata file's name, None if it is not one."""
    match = _RUN.match(path.name)
    return int(match[1]) if match else None


def is_samples_file(path: Path) -> bool:
    """Whether a file's name is that of a host's samples."""
    return _SAMPLES.match(path.name) is not None


def rank_and_capture_of_trace_file(path: Path) -> tuple[int, int] | None:
    """(rank, capture) in a trace file's name, None if this project did not name it."""
    match = _TRACE.match(path.name)
    return (int(match[1]), int(match[2])) if match else None


def rank_and_capture_of_execution_trace(path: Path) -> tuple[int, int] | None:
    """(rank, capture) in an execution trace's name, None if this project did not name it."""
    match = _EXECUTION.match(path.name)
    return (int(match[1]), int(match[2])) if match else None


def rank_of_steps_file(path: Path) -> int | None:
    """The rank in a step history's name, None if it is not one."""
    match = _STEPS.match(path.name)
    return int(match[1]) if match else None


def rank_of_compiled_file(path: Path) -> int | None:
    """The rank in the name of a file about compiled code, None if it is not one."""
    match = _COMPILED.match(path.name)
    return int(match[1]) if match else None


def rank_of_stacks_file(path: Path) -> int | None:
    """The rank in the name of a rank's stacks, None if it is not one."""
    match = _STACKS.match(path.name)
    return int(match[1]) if match else None


def rank_of_flight_file(path: Path) -> int | None:
    """The rank in the name of a flight-recorder dump that this project wrote, None if it is not one."""
    match = _FLIGHT.match(path.name)
    return int(match[1]) if match else None
