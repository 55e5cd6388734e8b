"""What tests of several verbs ask for."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import perfscope


@pytest.fixture(scope="session")
def summaries(samples: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The samples' summaries, as ``perfscope analyze --json`` writes them."""
    folder = tmp_path_factory.mktemp("summaries")
    paths = {name: folder / f"{name}.json" for name in ("healthy", "starved", "slow_rank")}
    for name, path in paths.items():
        path.write_text(json.dumps(perfscope.analyze(samples / name, workers=1).to_dict()), encoding="utf-8")
    return paths
