"""What a step of a rank without a device is made of, part by part: its operators, and the time between them.

Stages of a pipeline are unlike: the first one has the embedding, the last one the loss. But what runs as often on two
of them, on data of the same sizes, is the same work on both. So steps are compared by their parts, each operator by its
name, and what Python takes between operators by the phase of the loop.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

import numpy as np

from perfscope.analyzers.job.aligned import AlignedJob
from perfscope.analyzers.rank.loop_phases import INSIDE
from perfscope.analyzers.replay.stragglers.work_pace import flops_of_calls, same
from perfscope.frozen import dataclass
from perfscope.trace.trace import Float64, Int64

_COMMUNICATES: Final = re.compile(r"(c10d|gloo|_c10d_functional|record_param_comms)\b")
"""Operators that communicate: they hold waits for other ranks."""


class Part(NamedTuple):
    """One part, in each step."""

    often: Float64
    """How often the operator runs; how many operators the phase has."""
    ns: Float64


class PartsExcess(NamedTuple):
    """What a rank takes longer than another one, ns in each step; what it takes less is negative."""

    operators: Float64
    """In operators that do the same work on both."""
    between: Float64
    """Between as many operators."""
    unlike: Float64
    """Between operators where one of the two has more of them, beyond what that explains."""

    @property
    def alike(self) -> Float64:
        """In what is the same work on both."""
        return self.operators + self.between

    @property
    def total(self) -> Float64:
        """In all."""
        return self.alike + self.unlike


@dataclass(frozen=True, eq=False)
class StepParts:
    """The parts of one rank's steps, or the means of several ranks', by name."""

    operators: Mapping[str, Part]
    gaps: Mapping[str, Part]
    """Time between operators, by the phase of the loop."""
    flops: Mapping[str, float]
    """FLOPs of one call of an operator, where they are known."""
    steps: int

    @classmethod
    def of(cls, result: AlignedJob, rank: int, steps: Int64) -> StepParts:
        """Those of a rank's steps with these numbers."""
        partial = result.partials[rank]
        chosen = partial.steps.indices_of(steps)
        table, gaps = partial.tables.operators, partial.tables.gaps
        operators = {
            name: Part(table.count[line, chosen].astype(float), table.host_ns[line, chosen].astype(float))
            for line, name in enumerate(table.names)
            if not _COMMUNICATES.match(name) and table.count[line, chosen].any()
        }
        between = {
            name: Part(gaps.count[line, chosen].astype(float), gaps.host_ns[line, chosen].astype(float))
            for line, name in enumerate(gaps.names)
        }
        return cls(operators, between, flops_of_calls(table, chosen), len(steps))

    @classmethod
    def mean(cls, ranks: Sequence[StepParts]) -> StepParts:
        """That of ranks that do the same."""
        steps = ranks[0].steps
        operators = _means([each.operators for each in ranks], steps)
        return cls(operators, _means([each.gaps for each in ranks], steps), ranks[0].flops, steps)

    def longest(self, least_ns: float) -> dict[str, Int64]:
        """Operators, and phases for the time between their operators, that take so long in some step: ns of each."""
        named = [*self.operators.items(), *((name, part) for name, part in self.gaps.items() if name in INSIDE)]
        return {name: part.ns.astype(np.int64) for name, part in named if part.ns.max(initial=0) >= least_ns}

    def computes_like(self, other: StepParts) -> bool:
        """Have those operators that multiply on both as much to multiply in each call?"""
        common = self.flops.keys() & other.flops
        return bool(common) and all(same(self.flops[name], other.flops[name]) for name in common)

    def excess(self, other: StepParts) -> PartsExcess:
        """What this one takes longer than ``other``. An operator that only one of them has, or that runs more often
        there, is other work.
        """
        operators, between, unlike = np.zeros((3, self.steps))
        for name in (self.operators.keys() & other.operators.keys()) if self.computes_like(other) else ():
            mine, theirs = self.operators[name], other.operators[name]
            if same(float(mine.often.mean()), float(theirs.often.mean())):
                operators += mine.ns - theirs.ns
        nothing = Part(np.zeros(self.steps), np.zeros(self.steps))
        for name in self.gaps.keys() | other.gaps.keys():
            mine, theirs = self.gaps.get(name, nothing), other.gaps.get(name, nothing)
            counts = float(mine.often.mean()), float(theirs.often.mean())
            if name in INSIDE and (same(*counts) or not any(counts)):
                between += mine.ns - theirs.ns
            else:
                # There may be as much to do between more operators, or as much more as there are more.
                scaled = theirs.ns * (counts[0] / counts[1] if counts[1] else 1.0)
                unlike += mine.ns - np.clip(mine.ns, np.minimum(theirs.ns, scaled), np.maximum(theirs.ns, scaled))
        return PartsExcess(operators, between, unlike)


def _means(ranks: Sequence[Mapping[str, Part]], steps: int) -> dict[str, Part]:
    nothing = Part(np.zeros(steps), np.zeros(steps))
    found = {}
    for name in dict.fromkeys(name for parts in ranks for name in parts):
        each = [parts.get(name, nothing) for parts in ranks]
        often, ns = (np.asarray(np.mean(column, axis=0), dtype=np.float64) for column in zip(*each, strict=True))
        found[name] = Part(often, ns)
    return found
