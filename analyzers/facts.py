"""JobFacts: what is known of a job once its ranks were compared; rules and the summary are made from it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from perfscope.metadata import RunMetadata
from perfscope.summary import AccountRow, CollectiveRow, CostRow, DataLoaderRow, StragglerRow


@dataclass(frozen=True, kw_only=True)
class JobFacts:
    """Results that rules look at. Times are µs, as in the summary."""

    step_time_us: float
    steps: int
    """Used steps; 0 when nothing marks steps."""
    ranks: tuple[int, ...]
    missing_ranks: tuple[int, ...]
    accounting: tuple[AccountRow, ...]
    dataloader: tuple[DataLoaderRow, ...]
    collectives: tuple[CollectiveRow, ...]
    cost_model: tuple[CostRow, ...]
    stragglers: tuple[StragglerRow, ...]
    strategies: tuple[str, ...]
    perturbation: float | None
    """Profiled over unprofiled step time; None when not known."""
    runs: Mapping[int, RunMetadata]
    """What the ranks wrote beside their traces; empty for traces of other tools."""

    @property
    def few_steps(self) -> bool:
        """Too few steps for evidence: confidence is low."""
        return self.steps < 5
