"""How accurate predictions have been so far, by kind of change.

``docs/whatif.md`` lists these predictions, and how the truth was obtained: from two simulators of training jobs with
the change made, and from real trainings measured with it. A test compares the two.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Final

from perfscope.frozen import dataclass

CLOSE: Final = 0.05
"""Relative error up to which a prediction counts as close."""


SEVERAL: Final = 3
"""Predictions from which their share that is close says anything. All of them count for the range."""


@dataclass(frozen=True)
class Accuracy:
    """Predictions of one kind of change that were compared with the truth: all of them, those within 5 % of it, those
    with the truth between low and high.
    """

    made: int
    close: int
    inside: int

    def __add__(self, other: Accuracy) -> Accuracy:
        return Accuracy(self.made + other.made, self.close + other.close, self.inside + other.inside)


NONE: Final = Accuracy(0, 0, 0)

SIMULATED: Final = {
    "activations.recompute": Accuracy(6, 6, 6),
    "batch.accumulation": Accuracy(6, 6, 6),
    "compute": Accuracy(12, 12, 12),
    "dataloader.num_workers": Accuracy(3, 3, 3),
    "ddp.bucket_cap_mb": Accuracy(9, 9, 9),
    "ddp.comm_dtype": Accuracy(3, 2, 3),
    "ddp.no_sync": Accuracy(3, 3, 3),
    "fsdp.no_sync": Accuracy(3, 3, 3),
    "fsdp.prefetch": Accuracy(3, 3, 3),
    "fsdp.reshard_after_forward": Accuracy(3, 3, 3),
    "host.launch": Accuracy(6, 6, 6),
    "host.sync": Accuracy(9, 9, 9),
    "layout.conversions": Accuracy(3, 3, 3),
    "network.bandwidth": Accuracy(22, 22, 22),
    "network.latency": Accuracy(19, 18, 19),
    "pipeline.microbatches": Accuracy(6, 6, 6),
    "rank.N": Accuracy(5, 4, 5),
    "ranks.work": Accuracy(3, 3, 3),
    "zero.overlap_comm": Accuracy(3, 3, 3),
    "zero.stage": Accuracy(18, 17, 18),
}
"""Against random simulated jobs."""

EMULATED: Final = {
    "batch.accumulation": Accuracy(6, 5, 6),
    "compute": Accuracy(55, 52, 54),
    "dataloader.num_workers": Accuracy(29, 29, 29),
    "ddp.bucket_cap_mb": Accuracy(16, 14, 16),
    "ddp.comm_dtype": Accuracy(3, 3, 3),
    "ddp.no_sync": Accuracy(1, 1, 1),
    "fsdp.prefetch": Accuracy(8, 7, 7),
    "fsdp.reshard_after_forward": Accuracy(4, 3, 3),
    "gradients.reduce": Accuracy(1, 1, 1),
    "host.gc": Accuracy(1, 1, 1),
    "host.launch": Accuracy(28, 25, 27),
    "host.sync": Accuracy(13, 11, 12),
    "network.bandwidth": Accuracy(46, 44, 45),
    "network.latency": Accuracy(32, 31, 31),
    "optimizer.loops": Accuracy(3, 2, 2),
    "pipeline.microbatches": Accuracy(4, 4, 4),
    "rank.N": Accuracy(6, 6, 6),
}
"""Against random jobs of the second simulator: what many steps take with the change on their mean."""

REAL: Final = {
    "activations.recompute": Accuracy(3, 2, 3),
    "dataloader.num_workers": Accuracy(5, 2, 5),
    "ddp.bucket_cap_mb": Accuracy(4, 3, 4),
    "ddp.comm_dtype": Accuracy(1, 0, 1),
    "ddp.no_sync": Accuracy(1, 0, 1),
    "env.OMP_NUM_THREADS": Accuracy(2, 0, 2),
    "gradients.reduce": Accuracy(4, 1, 4),
    "network.bandwidth": Accuracy(3, 2, 3),
    "rank.N": Accuracy(1, 0, 0),
    "zero.stage": Accuracy(5, 4, 5),
}
"""Against real trainings of two ranks on CPUs."""


def kind(setting: str) -> str:
    """The kind of change that a setting is: ``rank.3`` and ``rank.7`` are both ``rank.N``."""
    return re.sub(r"^rank\.\d+$", "rank.N", setting)


def accuracy_in_words(settings: Iterable[str]) -> str:
    """How accurate predictions of these changes have been; of several, of the kind that did worst."""
    kinds = sorted({kind(setting) for setting in settings})
    unknown = [name for name in kinds if not _all(name).made]
    if unknown:
        return f"No prediction of {unknown[0]} has been compared with a measured step yet."
    if not kinds:
        return ""
    worst = min(kinds, key=lambda name: _all(name).close / _all(name).made)
    made = ((_simulated(worst), "simulated jobs"), (REAL.get(worst, NONE), "real trainings"))
    most = max(one.made for one, _ in made)
    where = [f"{one.close} of {one.made} {what}" for one, what in made if one.made >= min(SEVERAL, most)]
    every = _all(worst)
    return (
        f"Predictions of {worst} so far: within {CLOSE:.0%} of the true step time in {' and '.join(where)}; "
        f"between low and high in {every.inside} of {every.made}."
    )


def _all(name: str) -> Accuracy:
    return _simulated(name) + REAL.get(name, NONE)


def _simulated(name: str) -> Accuracy:
    """By both simulators."""
    return SIMULATED.get(name, NONE) + EMULATED.get(name, NONE)
