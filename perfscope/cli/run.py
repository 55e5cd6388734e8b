"""``perfscope run``: profile a training command without changing its code."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import Final

import click

from perfscope.cli.completion import complete_files
from perfscope.cli.number import Number, Whole
from perfscope.collectors.config import (
    BESIDE,
    EXECUTION_TRACE,
    FOR_ANOTHER,
    HANG_TIMEOUT_S,
    INSPECTOR,
    SIGNALS,
    CollectorConfig,
)
from perfscope.collectors.inprocess.options import DEFAULT_OUTPUT, default_hang_timeout
from perfscope.collectors.launch.folder import package_root
from perfscope.collectors.launch.nsys import NsysNotFoundError, says_nsys
from perfscope.collectors.launch.recap import recap
from perfscope.collectors.launch.run import FolderTakenError, Launch, die_by, isolated_python
from perfscope.errors import UnusableInput

NOT_EXECUTABLE: Final = 126
NOT_FOUND: Final = 127
NSYS_RECORDS: Final = (
    "Nsight Systems records this run, with PerfScope's ranges. PerfScope's own profiler stays off: one profiler at a "
    "time can own the device"
)


@click.command(
    short_help="Profile a training command without changing its code.",
    context_settings={"allow_interspersed_args": False, "show_default": True, "max_content_width": 100},
)
@click.option(
    "--output", "-o", default=DEFAULT_OUTPUT, type=click.Path(file_okay=False, path_type=Path),
    help="Folder for the recording. With several nodes it must be on a file system that they share."
)  # fmt: skip
@click.option("--overwrite", is_flag=True, help="Replace a recording that the folder holds.")
@click.option(
    "--join", is_flag=True,
    help="The same command is started once per node: record into the folder that the first node created."
)  # fmt: skip
@click.option("--ranks", default="all", metavar="LIST", help="Ranks to record, such as 0,3-7.")
@click.option("--wait", type=Whole(), default=5, metavar="N", help="Steps to skip before each capture; at least 1.")
@click.option(
    "--warmup", type=Whole(), default=3, metavar="N", help="Steps under the profiler before the recorded ones."
)
@click.option("--active", type=Whole(), default=8, metavar="N", help="Steps to record in a capture.")
@click.option(
    "--repeat", type=Whole(), default=1, metavar="N", help="Number of captures; each has its own --wait and --warmup."
)
@click.option("--shapes/--no-shapes", default=True, help="Record the operators' input shapes.")
@click.option("--stacks/--no-stacks", default=False, help="Record Python stacks (slower, larger files).")
@click.option("--memory/--no-memory", default=False, help="Record allocations (larger files).")
@click.option("--nvtx/--no-nvtx", default=True, help="Also write the ranges as NVTX, for Nsight Systems.")
@click.option("--count-flops/--no-count-flops", default=False, help="Count the FLOPs of one warm-up step, for MFU.")
@click.option(
    "--steps-only", is_flag=True, help="Record no traces, only the time of each step and its stages, for the whole run."
)
@click.option(
    "--trigger", type=Number(), metavar="FACTOR", help="Record when a step takes FACTOR times the median, such as 1.5."
)
@click.option(
    "--cooldown", type=Whole(), default=100, metavar="N", help="With --trigger: steps to skip after a capture."
)
@click.option(
    "--max-captures", type=Whole(), default=5, metavar="N", help="With --trigger: most captures that slow steps start."
)
@click.option(
    "--budget",
    type=Number(),
    default=5.0,
    metavar="PERCENT",
    help="With --trigger: share of the run that captures may take.",
)
@click.option(
    "--signal", type=click.Choice(SIGNALS), default="USR2",
    help="With --trigger and --steps-only: signal that asks for a capture, as perfscope trigger does."
)  # fmt: skip
@click.option(
    "--with", "other", type=click.Choice((*FOR_ANOTHER, *BESIDE)),
    help="Let another profiler record, with PerfScope's ranges: nsys is started; with nvtx you start the profiler. "
    "With inspector, NCCL Inspector logs collectives beside the traces; with execution-trace, PyTorch writes its "
    "execution traces of the recorded steps."
)  # fmt: skip
@click.option(
    "--sample-every", type=Number(), default=0.5, metavar="SECONDS",
    help="Seconds between two samples of each host: devices, CPU, memory, disk, network."
)  # fmt: skip
@click.option(
    "--hang-timeout", type=Number(), metavar="SECONDS", show_default=f"{HANG_TIMEOUT_S:g} if always on, else 0",
    help="A rank that makes no step for so long writes its stacks and last collectives; 0: never."
)  # fmt: skip
@click.option("--quiet", "-q", is_flag=True, help="Do not say when recording starts and stops.")
@click.option("--no-sampler", is_flag=True, help="Do not sample the hosts.")
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED, shell_complete=complete_files)
def command(
    output: Path,
    overwrite: bool,
    join: bool,
    steps_only: bool,
    trigger: float | None,
    other: str | None,
    sample_every: float,
    hang_timeout: float | None,
    quiet: bool,
    no_sampler: bool,
    command: tuple[str, ...],
    **options: int | float | bool | str,
) -> None:
    """Run COMMAND as it is and record a few training steps of every rank.

    COMMAND is whatever starts the training; write it after --. Its arguments, input, output, signals and exit code are
    its own, and its code stays as it is. Steps are detected from the optimizer's steps.

    \b
    perfscope run -- python train.py --epochs 1
    perfscope run -- torchrun --nproc-per-node 8 train.py
    perfscope run -- python -m torch.distributed.run --nproc-per-node 8 train.py
    perfscope run -- accelerate launch --multi_gpu train.py
    perfscope run -- deepspeed train.py --deepspeed_config ds.json
    perfscope run -o /shared/rec -- srun --ntasks-per-node 8 python train.py
    perfscope run -o /shared/rec -- mpirun -x PYTHONPATH -np 16 python train.py
    perfscope run -o /shared/rec --join -- torchrun --nnodes 2 ... train.py    (on each node)

    By default steps 8 to 15 are recorded: 5 steps are skipped, 3 warm the profiler up, 8 are recorded. A job with fewer
    steps needs smaller numbers, such as --wait 1 --warmup 1 --active 3. If the steps of your loop are not detected, or
    detected wrongly, call perfscope.step() at the end of each.

    \b
    Afterwards:
    perfscope analyze perfscope-recording    read the recording and write report.html
    """
    if isinstance(problem := _not_runnable(command[0]), int):
        sys.exit(problem)
    mode = _mode(steps_only=steps_only, trigger=trigger, other=None if other in BESIDE else other)
    try:
        config = CollectorConfig(
            output=str(output.absolute()),
            package_root=package_root(),
            sample_every=0.0 if no_sampler else sample_every,
            mode=mode,
            hang_timeout=default_hang_timeout(hang_timeout, mode),
            announce=not quiet,
            inspector=other == INSPECTOR,
            execution_trace=other == EXECUTION_TRACE,
            trigger=CollectorConfig.trigger if trigger is None else trigger,
            **options,  # type: ignore[arg-type]  # click has checked them against the options above
        )
    except ValueError as error:
        raise click.UsageError(str(error)) from error
    try:
        launch = Launch(config, command)
    except NsysNotFoundError as error:
        raise UnusableInput(str(error)) from error
    try:
        launch.prepare(overwrite=overwrite, join=join)
    except FolderTakenError as error:
        raise UnusableInput(
            f"{error}; choose another folder with --output, replace it with --overwrite, or "
            "add to it with --join where this is another node of the same job"
        ) from error
    except OSError as error:
        raise UnusableInput(f"{output} cannot be written ({error}); choose another folder with --output") from error
    if option := isolated_python(command):
        _print(f"python {option} ignores PYTHONPATH, so nothing can be recorded in it; leave the option out")
    if config.mode == "nsys" or says_nsys(command):
        _print(NSYS_RECORDS)
    code = launch.run()
    _report(config, code)
    if code < 0:
        sys.stderr.flush()
        die_by(-code)
    sys.exit(code)


def _mode(*, steps_only: bool, trigger: float | None, other: str | None) -> str:
    """What the options ask to be recorded; only one of them may."""
    asked = {"steps": steps_only, "trigger": trigger is not None, other or "nvtx": other is not None}
    modes = [mode for mode, wanted in asked.items() if wanted]
    if len(modes) > 1:
        raise click.UsageError("give only one of --steps-only, --trigger and --with: each sets what is recorded")
    return modes[0] if modes else "captures"


def _not_runnable(program: str) -> int | None:
    """The shell's exit code for a program that cannot be run, after a message; None for one that can."""
    if shutil.which(program) is not None:
        return None
    if not Path(program).exists():
        _print(f"{program}: command not found")
        return NOT_FOUND
    hint = f"; did you mean python {program}?" if program.endswith(".py") else ""
    _print(f"{program}: cannot be executed{hint}")
    return NOT_EXECUTABLE


def _report(config: CollectorConfig, code: int) -> None:
    if sys.stderr.isatty():
        click.echo(err=True)  # a progress bar may have left the line unfinished
    for line in recap(config, code):
        _print(line)


def _print(line: str) -> None:
    click.echo(f"perfscope: {line}", err=True)
