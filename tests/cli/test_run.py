"""``perfscope run`` around commands that are no training: all that is theirs passes through."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from perfscope.recording.metadata import load_launch
from perfscope.recording.paths import BOOTSTRAP_FOLDER, LAUNCH_FILE
from tests.collectors.harness import PERFSCOPE, record
from tests.waiting import PATIENCE_S, until


def test_input_output_arguments_and_exit_code_are_the_commands_own(tmp_path: Path) -> None:
    code = "import sys; print(sys.argv[1:]); print(sys.stdin.read(), file=sys.stderr); sys.exit(7)"
    arguments = ("--output", "mine", "--", "-h", "two words", "", "--token=hunter2")
    recording = record(tmp_path / "r", sys.executable, "-c", code, *arguments, stdin="to stderr")
    assert recording.exit_code == 7
    assert recording.out == f"{list(arguments)}\n"
    assert recording.err.splitlines()[0] == "to stderr"
    assert all(line.startswith("perfscope: ") for line in recording.err.splitlines()[1:])
    assert recording.launch.exit_code == 7
    assert "--token=[redacted]" in recording.launch.command
    assert "hunter2" not in (recording.folder / LAUNCH_FILE).read_text()


def test_the_dashes_before_the_command_are_optional(tmp_path: Path) -> None:
    done = subprocess.run(
        [*PERFSCOPE, "run", "-o", str(tmp_path / "r"), "echo", "--wait", "x"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == "--wait x\n"


def test_file_descriptors_are_inherited(tmp_path: Path) -> None:
    reading, writing = os.pipe()
    try:
        code = f"import os; os.write({writing}, b'through')"
        subprocess.run(
            [*PERFSCOPE, "run", "-o", str(tmp_path / "r"), "--", sys.executable, "-c", code],
            pass_fds=[writing], check=True, capture_output=True,
        )  # fmt: skip
        assert os.read(reading, 100) == b"through"
    finally:
        os.close(reading)
        os.close(writing)


def test_death_by_a_signal_is_passed_on(tmp_path: Path) -> None:
    recording = record(tmp_path / "r", "sh", "-c", "kill -KILL $$")
    assert recording.exit_code == -signal.SIGKILL
    assert recording.launch.exit_code == -signal.SIGKILL


def start(folder: Path, *command: str) -> subprocess.Popen[str]:
    """Start ``perfscope run`` away from any terminal; returns when the command has printed that it is ready."""
    process = subprocess.Popen(
        [*PERFSCOPE, "run", "-o", str(folder), "--", *command],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGINT])
def test_signals_reach_the_command(tmp_path: Path, number: signal.Signals) -> None:
    if signal.getsignal(number) is signal.SIG_IGN:
        pytest.skip(f"{number.name} is ignored here (nohup), and a shell cannot trap what it inherits as ignored")
    name = number.name.removeprefix("SIG")
    script = f"trap 'echo got; exit 9' {name}; echo ready; while :; do sleep 0.05; done"
    process = start(tmp_path / "r", "sh", "-c", script)
    process.send_signal(number)
    out, _ = process.communicate(timeout=PATIENCE_S)
    assert (out, process.returncode) == ("got\n", 9)


def test_a_terminals_interrupt_reaches_the_command_once_and_perfscope_outlives_it(tmp_path: Path) -> None:
    """In a terminal of its own, whose foreground is ``perfscope run`` and the command.

    The command waits for the first interrupt, and a second longer for another.
    """
    import pty

    script = (
        "n=0; trap 'n=$((n+1))' INT; echo ready; while [ $n -eq 0 ]; do sleep 0.05; done;"
        "i=0; while [ $i -lt 20 ]; do sleep 0.05; i=$((i+1)); done; exit $n"
    )
    child, terminal = pty.fork()
    if child == 0:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # a suite started by nohup ignores it
        os.execv(PERFSCOPE[0], [*PERFSCOPE, "run", "-o", str(tmp_path / "r"), "--", "sh", "-c", script])
    try:
        output = b""
        while b"ready" not in output:
            output += os.read(terminal, 1000)
        os.write(terminal, b"\x03")
        while b"nothing was recorded" not in output:
            output += os.read(terminal, 1000)
        _, status = os.waitpid(child, 0)
    finally:
        os.close(terminal)
    assert os.waitstatus_to_exitcode(status) == 1


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP])
def test_an_ignored_signal_reaches_a_command_that_takes_it_all_the_same(tmp_path: Path, number: signal.Signals) -> None:
    """As torchrun takes SIGINT and SIGHUP, whatever it inherits."""
    begin = f"import signal, sys; signal.signal({int(number)}, signal.SIG_IGN)"
    launch = f"{begin}; from perfscope.cli.main import main; main(['run', '-o', *sys.argv[1:]])"
    job = (
        f"import signal, sys, time; print(signal.getsignal({int(number)}) == signal.SIG_IGN, flush=True);"
        f"signal.signal({int(number)}, lambda *_: sys.exit(9)); print('ready', flush=True); time.sleep({PATIENCE_S})"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", launch, str(tmp_path / "r"), "--", sys.executable, "-c", job],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert [process.stdout.readline() for _ in range(2)] == ["True\n", "ready\n"]
    process.send_signal(number)
    process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 9


def test_an_ignored_hangup_stays_ignored(tmp_path: Path) -> None:
    code = (
        "import signal, sys; from perfscope.cli.main import main; signal.signal(signal.SIGHUP, signal.SIG_IGN);"
        "main(['run', '-o', sys.argv[1], '--', 'sh', '-c', 'kill -HUP $PPID; kill -HUP $$; exit 4'])"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path / "r")], capture_output=True, check=False)
    assert done.returncode == 4


def test_no_such_command(tmp_path: Path) -> None:
    recording = record(tmp_path / "r", "no-such-command-anywhere")
    assert recording.exit_code == 127
    assert recording.messages == "perfscope: no-such-command-anywhere: command not found"
    assert not recording.folder.exists()


def test_a_script_that_is_no_program_gets_a_hint(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("")
    recording = record(tmp_path / "r", "./train.py")
    assert recording.exit_code == 126
    assert "did you mean python ./train.py?" in recording.messages


def test_a_recording_is_not_overwritten_unasked(tmp_path: Path) -> None:
    folder = tmp_path / "r"
    assert record(folder, "true").exit_code == 0
    for name in ("rank-00000.capture-0.trace.json.gz", "rank-00000.steps.bin", "nsys-3f2a91bc.nsys-rep"):
        (folder / name).touch()
    for name in ("claim-00000.json", "plan-0"):
        (folder / BOOTSTRAP_FOLDER / name).touch()
    (folder / "notes.txt").write_text("mine")
    refused = record(folder, "true")
    assert refused.exit_code == 2
    assert "--overwrite" in refused.messages
    assert record(folder, "true", options=("--overwrite",)).exit_code == 0
    assert {path.name for path in folder.iterdir()} == {BOOTSTRAP_FOLDER, LAUNCH_FILE, "notes.txt"}
    assert {path.name for path in (folder / BOOTSTRAP_FOLDER).iterdir()} == {
        "sitecustomize.py", "config.json", "plans", "requests",
    }  # fmt: skip


def test_a_folder_that_holds_no_recording_is_used(tmp_path: Path) -> None:
    (tmp_path / "r").mkdir()
    (tmp_path / "r" / "notes.txt").touch()
    assert record(tmp_path / "r", "true").exit_code == 0


def test_another_node_joins_a_recording_under_way_but_not_a_finished_one(tmp_path: Path) -> None:
    folder = tmp_path / "r"
    process = start(folder, "sh", "-c", "echo ready; while :; do sleep 0.05; done")
    first = load_launch(folder / LAUNCH_FILE)
    assert first.exit_code is None
    assert record(folder, "sh", "-c", "exit 5", options=("--join",)).exit_code == 5
    assert load_launch(folder / LAUNCH_FILE) == first
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=PATIENCE_S)
    assert record(folder, "true", options=("--join",)).exit_code == 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--ranks", "2-1"), "ends before it begins"),
        (("--wait", "0"), "--wait must be at least 1"),
        (("--count-flops", "--warmup", "0"), "--count-flops"),
        (("--trigger", "1"), "--trigger must be above 1"),
        (("--trigger", "2", "--budget", "0"), "--budget must be above 0"),
        (("--signal", "TERM"), "--signal"),
        (("--no-such-option",), "--no-such-option"),
    ],
)
def test_impossible_options_are_refused_before_anything_starts(
    tmp_path: Path, options: tuple[str, ...], message: str
) -> None:
    recording = record(tmp_path / "r", "echo", "started", options=options)
    assert recording.exit_code == 2
    assert message in recording.err
    assert recording.out == ""


def test_a_folder_that_cannot_be_made_is_named() -> None:
    command = [*PERFSCOPE, "run", "-o", "/proc/nowhere/r", "--", "echo", "started"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert "/proc/nowhere/r cannot be written" in done.stderr
    assert "--output" in done.stderr


def test_an_isolated_python_is_announced(tmp_path: Path) -> None:
    recording = record(tmp_path / "r", sys.executable, "-I", "-c", "pass")
    assert recording.exit_code == 0
    assert "python -I ignores PYTHONPATH" in recording.messages
    assert "no Python process of the command loaded the collector" in recording.messages


def test_a_python_without_torch_says_so(tmp_path: Path) -> None:
    recording = record(tmp_path / "r", sys.executable, "-c", "pass")
    assert "the command never imported torch" in recording.messages


def test_the_configuration_travels_in_a_file(tmp_path: Path) -> None:
    recording = record(tmp_path / "r", "true", options=("--ranks", "0,3-7", "--stacks", "--active", "2"))
    config = json.loads((recording.folder / BOOTSTRAP_FOLDER / "config.json").read_text())
    assert (config["ranks"], config["stacks"], config["active"], config["shapes"]) == ("0,3-7", True, 2, True)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ((), {"mode": "captures", "signal": "USR2"}),
        (("--steps-only", "--signal", "none"), {"mode": "steps", "signal": "none"}),
        (
            ("--trigger", "2.5", "--cooldown", "7", "--max-captures", "2", "--budget", "1.5"),
            {"mode": "trigger", "trigger": 2.5, "cooldown": 7, "max_captures": 2, "budget": 1.5},
        ),
        (("--with", "nvtx"), {"mode": "nvtx", "inspector": False}),
        (("--with", "inspector"), {"mode": "captures", "inspector": True, "execution_trace": False}),
        (("--with", "execution-trace"), {"mode": "captures", "inspector": False, "execution_trace": True}),
    ],
)
def test_modes_travel_to_the_ranks_and_into_the_launch(
    tmp_path: Path, options: tuple[str, ...], expected: dict[str, object]
) -> None:
    recording = record(tmp_path / "r", "true", options=options)
    config = json.loads((recording.folder / BOOTSTRAP_FOLDER / "config.json").read_text())
    for found in (config, recording.launch.options):
        assert {name: found[name] for name in expected} == expected


def test_a_signal_that_asks_for_captures_goes_no_further(tmp_path: Path) -> None:
    """With planned captures it is the command's; a mode that listens to it keeps it: a launcher would die of it."""
    if signal.getsignal(signal.SIGUSR2) is signal.SIG_IGN:
        pytest.skip("SIGUSR2 is ignored here")
    script = "trap 'echo got; exit 9' USR2; echo ready; read line; sleep 0.5; sleep 0.5; exit 3"
    folder = tmp_path / "r"
    process = subprocess.Popen(
        [*PERFSCOPE, "run", "-o", str(folder), "--steps-only", "--", "sh", "-c", script],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGUSR2)
    requests = folder / BOOTSTRAP_FOLDER / "requests"
    until(lambda: requests.stat().st_size, "the request is written", process)
    out, _ = process.communicate("end\n", timeout=PATIENCE_S)
    assert (out, process.returncode) == ("", 3)
    assert json.loads(requests.read_text()) == {"active": None, "seconds": None}


def test_help_teaches(tmp_path: Path) -> None:
    done = subprocess.run([*PERFSCOPE, "run", "--help"], capture_output=True, text=True, check=True)
    for word in ("torchrun", "torch.distributed.run", "accelerate", "deepspeed", "srun", "mpirun", "perfscope.step()"):
        assert word in done.stdout
