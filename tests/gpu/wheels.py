"""Fetches what ``make gpu`` installs, for a machine without a network: a folder of wheels to take there.

    python -m tests.gpu.wheels [--python 3.12] [FOLDER]

With the folder in the checkout there, ``make gpu WHEELS=FOLDER`` installs from it and asks no index. torch is not in
it: the one that is installed there is the one to accept. For Linux on x86-64, or ``--machine aarch64``.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path
from typing import Final

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT: Final = Path(__file__).resolve().parents[2]
BESIDE: Final = ("nvtx>=0.2.10",)
"""What the training environment would bring, and make gpu installs."""
GLIBC: Final = ("manylinux_2_34", "manylinux_2_28", "manylinux_2_17", "manylinux2014")
"""Platforms of wheels, from a machine of 2022 on. pip takes each for itself alone."""


def needed() -> list[str]:
    """Requirements of the build, the package and its sampler, and what stands beside them."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    project = settings["project"]
    found = [*settings["build-system"]["requires"], *project["dependencies"]]
    return [*found, *project["optional-dependencies"]["sampler"], *BESIDE]


def command(folder: Path, python: str, machine: str) -> list[str]:
    """The call of pip that downloads them."""
    platforms = [f"--platform={name}_{machine}" for name in GLIBC]
    options = ["--only-binary=:all:", f"--python-version={python}", "--implementation=cp", *platforms]
    limits = f"--constraint={ROOT / 'constraints.txt'}"
    return [sys.executable, "-m", "pip", "download", "--quiet", f"--dest={folder}", limits, *options, *needed()]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, nargs="?", default=Path("wheels"))
    here = f"{sys.version_info.major}.{sys.version_info.minor}"
    parser.add_argument("--python", default=here, help="version of the Python there")
    parser.add_argument("--machine", default="x86_64", choices=("x86_64", "aarch64"))
    options = parser.parse_args()
    return subprocess.run(command(options.folder, options.python, options.machine), check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
