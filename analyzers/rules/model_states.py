"""Memory of parameters, gradients and optimizer states, by ZeRO stage.

Per parameter, mixed precision with Adam takes 2 + 2 + 12 bytes: parameter and gradient in 16 bits; a copy, momentum and
variance in 32. Stage 1 shards the 12 over the ranks, stage 2 the gradients as well, stage 3 everything (Rajbhandari et
al., "ZeRO", SC'20, section 3 and figure 1).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from perfscope.analyzers.facts import JobFacts
from perfscope.analyzers.rules.frameworks import settings_of

_SHARDING: Final = ("fsdp", "zero3")
_SINGLE: Final = (4.0, 4.0, 8.0)
"""Bytes of parameter, gradient, Adam's states where parameters are 32 bits, autocast or not."""
_MIXED: Final = (2.0, 2.0, 12.0)
_HALF: Final = (2.0, 2.0, 4.0)
"""Everything in 16 bits."""


@dataclass(frozen=True)
class ModelStates:
    """``parameters`` elements of the whole model, and bytes of each, its gradient and its optimizer states."""

    parameters: int
    each: tuple[float, float, float]

    def bytes_at(self, stage: int, ranks: int) -> float:
        """On each of ``ranks`` that share the model, at a ZeRO stage (0 to 3)."""
        parameter, gradient, states = self.each
        first_sharded = {0: 3, 1: 2, 2: 1, 3: 0}[stage]
        whole = sum((parameter, gradient, states)[:first_sharded])
        return self.parameters * (whole + (sum(self.each) - whole) / ranks)


def model_states(facts: JobFacts) -> ModelStates | None:
    """None where the run did not record its model, or only a part of its ranks did."""
    models = [run.model for run in facts.runs.values() if run.model is not None]
    if not models or len(models) != len(facts.ranks):
        return None
    sharded = any(name in facts.strategies for name in _SHARDING)
    # Where parameters are sharded each rank tells its part; replicas of shards tell it again.
    replicas = settings_of(facts, "fsdp").get("replicate_degree")
    copies = replicas if isinstance(replicas, int) and replicas > 0 else 1
    elements = sum(model.parameters for model in models) // copies if sharded else max(m.parameters for m in models)
    dtypes = {dtype.rpartition(".")[2] for model in models for dtype in model.dtypes}
    if "float32" in dtypes:
        return ModelStates(elements, _SINGLE)
    engine = bool(settings_of(facts, "deepspeed") or settings_of(facts, "megatron"))
    return ModelStates(elements, _MIXED if engine else _HALF)
