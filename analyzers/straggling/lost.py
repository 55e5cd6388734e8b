"""What the step would take without a straggler."""

from __future__ import annotations

from perfscope.findings import Prediction
from perfscope.summary import StragglerRow


def without(step_time_us: float, row: StragglerRow) -> Prediction:
    """The step (ns) without the time lost to a straggler, which was found by replay, so that this is a prediction.

    A cured rank may have something in common with the next slowest, so that less is saved.
    """
    mid = (step_time_us - row.lost_us) * 1e3
    lost = row.lost_us * 1e3
    return Prediction(low=mid - 0.05 * lost, mid=mid, high=mid + 0.15 * lost)
