"""Runs Python with a compiled part that was built with gcc's address and undefined-behaviour sanitizers.

``python -m tests.benchmarks.sanitized``: the tests of the compiled clock. A fault ends them.
"""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from perfscope.collectors.phases import compiled

CLOCK: Final = "perfscope.collectors.phases._clock"

_IMPORTS: Final = """
import importlib.machinery, importlib.util, sys

class Sanitized:
    def find_spec(self, name, path=None, target=None):
        if name != {module!r}:
            return None
        loader = importlib.machinery.ExtensionFileLoader(name, __file__.replace("sitecustomize.py", "sanitized.so"))
        return importlib.util.spec_from_loader(name, loader)

sys.meta_path.insert(0, Sanitized())
"""
"""Every process that is started imports the module from beside this file."""


def run(module: str, source: Path, arguments: Sequence[str], environment: dict[str, str] | None = None) -> int:
    """Run ``python *arguments`` with this module, built from ``source``; the exit status."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        (folder / "sitecustomize.py").write_text(_IMPORTS.format(module=module))
        subprocess.run(
            ["gcc", "-shared", "-fPIC", "-g", "-O1", "-Wall", "-Wextra", "-Werror", "-fsanitize=address,undefined",
             "-fno-sanitize-recover=all", "-DPy_LIMITED_API=0x030A0000", f"-I{sysconfig.get_path('include')}", source,
             "-o", folder / "sanitized.so"],
            check=True,
        )  # fmt: skip
        library = subprocess.run(["gcc", "-print-file-name=libasan.so"], capture_output=True, text=True, check=True)
        path = os.pathsep.join((str(folder), os.environ.get("PYTHONPATH", "")))
        # Python's own memory is never given back.
        settings = {"LD_PRELOAD": library.stdout.strip(), "ASAN_OPTIONS": "detect_leaks=0", "PYTHONPATH": path}
        command = [sys.executable, *arguments]
        return subprocess.run(command, env={**os.environ, **settings, **(environment or {})}, check=False).returncode


def main() -> int:
    """Test the clock. Objects come from malloc, so that one that is used after its end is noticed."""
    source = Path(compiled.__file__).with_name("_clock.c")
    tests = ["-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/collectors/phases/test_compiled.py"]
    return run(CLOCK, source, tests, {"PYTHONMALLOC": "malloc"})


if __name__ == "__main__":
    sys.exit(main())
