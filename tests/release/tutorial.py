"""Runs the tutorial as a reader would: its files are saved, its commands run one after the other in a folder.

    python tests/release/tutorial.py [FOLDER OF perfscope AND torchrun]

Standard library only: it also runs where nothing but the wheel is installed.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

TUTORIAL = Path(__file__).parents[2] / "docs" / "tutorial.md"
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", flags=re.MULTILINE | re.DOTALL)
FILES = {"python": "train.py", "toml": "perfscope-budget.toml"}


def commands_and_files(text: str) -> tuple[list[str], dict[str, str]]:
    """The commands in order, without the installation, and the files to be saved."""
    blocks = BLOCK.findall(text)
    files = {FILES[language]: body for language, body in blocks if language in FILES}
    lines = [line for language, body in blocks if language == "shell" for line in body.splitlines()]
    return [line for line in lines if not line.startswith("pip install")], files


def run_tutorial(folder: Path, environment: dict[str, str]) -> dict[str, str]:
    """Run all commands in ``folder``; command -> its standard output. Raises AssertionError at the first that fails."""
    commands, files = commands_and_files(TUTORIAL.read_text(encoding="utf-8"))
    for name, body in files.items():
        (folder / name).write_text(body, encoding="utf-8")
    outputs = {}
    for command in commands:
        done = subprocess.run(
            command, shell=True, cwd=folder, env=environment, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
        outputs[command] = done.stdout
    _judge(outputs)
    return outputs


def _judge(outputs: dict[str, str]) -> None:
    """The bottleneck is found, and gone at the end."""
    (analysis,) = (text for command, text in outputs.items() if command.startswith("perfscope analyze"))
    assert re.search(r"^Data loading blocks \d\d% of the step", analysis, flags=re.MULTILINE), analysis
    assert re.search(r"^Do first: Set DataLoader\(num_workers=\d\)", analysis, flags=re.MULTILINE), analysis
    (comparison,) = (text for command, text in outputs.items() if command.startswith("perfscope compare"))
    assert re.match(r"with-workers is \d+(\.\d+)?x faster", comparison), comparison


def main() -> None:
    """Run it with the programs of the folder given."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PERFSCOPE_CACHE": "off"}
    if len(sys.argv) > 1:
        environment["PATH"] = f"{Path(sys.argv[1]).resolve()}{os.pathsep}{environment['PATH']}"
    with tempfile.TemporaryDirectory() as folder:
        outputs = run_tutorial(Path(folder), environment)
    sys.stdout.write("\n".join(f"$ {command}\n{text}" for command, text in outputs.items()))


if __name__ == "__main__":
    main()
