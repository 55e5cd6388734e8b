"""Changes: what a setting does to the script of the recorded steps.

A change is registered under the name that the user types (``network.bandwidth``); it is given the setting's value as
typed and edits the script in place, or raises ``CannotReplay`` with the reason. Changes are applied in the order of
``ORDER``, whatever the order in which they were asked for: who before what is sent, what is sent before how fast.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Final

from perfscope.analyzers.collectives.cost_model import CostModel
from perfscope.analyzers.comparison import Comparison
from perfscope.analyzers.replay.engine import Played, Programs, play
from perfscope.analyzers.replay.pace import Peers, at_peers_pace, find_peers
from perfscope.analyzers.replay.programs import Recorded
from perfscope.analyzers.whatif.latency import Latencies, Latency
from perfscope.analyzers.whatif.script import Script
from perfscope.errors import UnusableInput
from perfscope.metadata import RunMetadata


class CannotReplay(UnusableInput):
    """The change cannot be played from this recording; the message says why and what would help."""


@dataclass(frozen=True, eq=False)
class Context:
    """What changes may look at. ``runs`` is empty for traces of other tools; ``cured`` are the ranks that take their
    peers' pace in the prediction at hand, which is therefore not theirs. ``leaning`` is 0, or -1 or 1 where latencies
    that are not sure are to be the least or the most that they may be; ``unsure`` takes down those that were needed.
    """

    result: Comparison
    recorded: Recorded
    models: tuple[CostModel, ...]
    runs: Mapping[int, RunMetadata]
    cured: tuple[int, ...] = ()
    leaning: int = 0
    unsure: dict[tuple[int, str], Latency] = field(default_factory=dict)

    @functools.cached_property
    def unchanged(self) -> Played:
        """The recorded steps, played as they are."""
        return play(self.recorded.programs)

    @functools.cached_property
    def peers(self) -> Mapping[int, Peers]:
        """Rank -> the ranks that do the same work, itself among them; only those that have their like."""
        return {rank: group for group in find_peers(self.result, self.recorded) for rank in group.ranks}

    def asked(self, cured: tuple[int, ...], leaning: int = 0) -> Context:
        """The same for another question; who is whose peer, and what latencies are known, is found once."""
        other = replace(self, cured=cured, leaning=leaning, unsure={})
        other.__dict__["peers"] = self.peers if cured else {}
        other.__dict__["unchanged"] = self.unchanged
        other.__dict__["latencies"] = self.latencies
        return other

    @functools.cached_property
    def paced(self) -> Programs:
        """The recorded steps with all ``cured`` ranks at their peers' pace."""
        return at_peers_pace(self.recorded, self.peers, [rank for rank in self.cured if rank in self.peers])

    def model_of(self, group: int, kind: str) -> CostModel | None:
        """The fitted cost of a kind of collective in a group (index in ``Instances``); None where none was fitted."""
        kinds = self.result.matched_before.instances.kinds
        for model in self.models:
            if model.group == group and kinds[model.kind] == kind:
                return model
        return None

    @functools.cached_property
    def latencies(self) -> Latencies:
        """Of groups and kinds for which no cost was fitted."""
        return Latencies(self.result)

    def latency_ns(self, group: int, kind: str, transfer_ns: float) -> float:
        """The latency in a transfer of a group and kind for which no cost was fitted: known otherwise, or assumed."""
        found = self.latencies.of(group, kind)
        if found.factor > 1:
            self.unsure[group, kind] = found
        return found.of(transfer_ns, self.leaning)

    def assumptions(self) -> tuple[str, ...]:
        """In words, what was assumed so far."""
        by_latency: dict[int, set[str]] = {}
        for (_, kind), latency in self.unsure.items():
            if not latency.known:
                by_latency.setdefault(round(latency.ns / 1e3), set()).add(kind)
        return tuple(
            f"one size of {' and '.join(sorted(kinds))} is recorded, which does not tell latency from bandwidth: "
            f"{latency} µs of latency are assumed; low and high hold a fifth and five times that"
            for latency, kinds in sorted(by_latency.items())
        )


@dataclass(frozen=True)
class Uncertainty:
    """By which share the saving of a change may be smaller or larger than predicted: what its model leaves out.

    ``either_ns`` is what the model may miss of a step, ns, however little is saved: where a change makes one thing
    shorter and another longer, the difference says nothing of that. By ``slower_ns`` the step may take longer, and by
    ``faster_ns`` less, whatever is saved.
    """

    less: float
    more: float
    either_ns: float = 0.0
    slower_ns: float = 0.0
    faster_ns: float = 0.0


Apply = Callable[[Script, Context, str, str], Uncertainty]
"""(script, context, name as typed, value as typed) -> how sure. Edits the script; raises CannotReplay, or BadSetting
where the value makes no sense."""


class BadSetting(UnusableInput):
    """The setting or its value is not understood; the message names it and says what is."""


@dataclass(frozen=True)
class Setting:
    """A setting that can be changed. ``name`` may end in ``.*`` or hold one ``*`` (``rank.*``)."""

    name: str
    value: str
    """How a value is written, for help: ``MB``, ``FACTORx``, ``true|false``."""
    help: str
    apply: Apply
    order: int
    """Lower is applied earlier: -1 who, 0 the work itself, 1 what is sent, 2 how fast."""


def factor(name: str, text: str) -> float:
    """The number in ``2x`` or ``0.5x``. Raises BadSetting."""
    try:
        number = float(text.removesuffix("x"))
    except ValueError:
        number = -1.0
    if number <= 0:
        raise BadSetting(f"{name}={text}: write a factor above 0, such as 2x or 0.5x")
    return number


def flag(name: str, text: str) -> bool:
    """``true`` or ``false``. Raises BadSetting."""
    if text.lower() not in ("true", "false"):
        raise BadSetting(f"{name}={text}: write true or false")
    return text.lower() == "true"


FULL: Final = Uncertainty(0.0, 0.0)
"""Nothing is left out that the replay knows of."""
