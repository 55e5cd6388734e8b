"""What every test may ask for, and what none may leave behind."""

from __future__ import annotations

import gc
import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

# Busy machines are slow, which is no failure; and what CI reports on a change must not depend on luck.
settings.register_profile(
    "perfscope",
    deadline=None,
    derandomize=bool(os.environ.get("CI")),
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("perfscope")

# Neither the user's cache in the tests' way nor the tests' traces in the user's cache; tests of it have their own.
os.environ["PERFSCOPE_CACHE"] = "off"

# What users read a note about fails a test.
os.environ["PERFSCOPE_STRICT"] = "on"

# As ``perfscope analyze`` has it: simulators and analyses make millions of objects that stay, and next to no cycles.
gc.set_threshold(100_000, *gc.get_threshold()[1:])

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="session")
def root() -> Path:
    """The repository."""
    return ROOT


@pytest.fixture(scope="session")
def samples() -> Path:
    """The folder of real recordings made by this project."""
    return ROOT / "sample_traces"


@pytest.fixture(scope="session")
def chromium() -> str:
    """A browser's path; skips where there is none."""
    for name in ("chromium", "chromium-browser", "google-chrome"):
        if found := shutil.which(name):
            return found
    pytest.skip("no Chromium on this machine")


@pytest.fixture(autouse=True)
def nothing_left_behind() -> Iterator[None]:
    """Instrumentation is for the training process alone: a test that installs some here takes it out again."""
    before = _traces_of_instrumentation()
    yield
    assert _traces_of_instrumentation() == before, "the test left instrumentation in this process"


def _traces_of_instrumentation() -> dict[str, object]:
    return {
        "environment": {
            name: value for name, value in os.environ.items() if "PERFSCOPE" in name or name == "PYTHONPATH"
        },
        "import hooks": [finder for finder in sys.meta_path if type(finder).__module__.startswith("perfscope")],
    }
