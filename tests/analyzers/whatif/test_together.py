"""Two changes that each make a job quicker are never slower together than one of them alone."""

from __future__ import annotations

from itertools import combinations
from pathlib import Path

import pytest

from perfscope.analyzers.whatif.change import CannotReplay, Context
from perfscope.analyzers.whatif.predict import predict
from perfscope.analyzers.whatif.whatif import context_of
from tests.emulator.changes import apply
from tests.emulator.draw import draw
from tests.emulator.emulate import emulate

pytestmark = pytest.mark.scale

QUICKER = (
    {"compute": "1.5x"}, {"network.bandwidth": "2x"}, {"network.latency": "0.25x"}, {"host.launch": "0"},
    {"host.sync": "0"}, {"fsdp.reshard_after_forward": "false"}, {"ddp.no_sync": "true"},
)  # fmt: skip
NOISE = 0.01
"""Of a prediction: what it may be slower."""


def _asked(context: Context, settings: dict[str, str]) -> float | None:
    try:
        return predict(context, settings).mid_ns
    except CannotReplay:
        return None


@pytest.mark.parametrize("seed", [1002, 1008, 1010, 1017, 1019, 1027, 1038, 1049])
def test_together_they_are_no_slower(seed: int, tmp_path: Path) -> None:
    job = draw(seed).job
    emulate(job).write(tmp_path)
    context = context_of(tmp_path, workers=1)
    predicted = [(one, _asked(context, one)) for one in QUICKER if apply(job, one) is not None]
    alone = [(one, ns) for one, ns in predicted if ns is not None]
    assert len(alone) > 2  # else nothing is compared
    for (first, first_ns), (second, second_ns) in combinations(alone, 2):
        both_ns = _asked(context, first | second)
        assert both_ns is None or both_ns <= min(first_ns, second_ns) * (1 + NOISE), (first, second)
