"""Why a job stands still: which ranks did not join which collective, who waits there, and who in consequence."""

from __future__ import annotations

from typing import Annotated, Literal

from perfscope.frozen import dataclass
from perfscope.results.fields import Us

EpochUs = Annotated[Us, "µs since 1970, on the clock of the lowest rank."]


@dataclass(frozen=True, kw_only=True)
class HangVariant:
    """What some ranks issued where others issued something else."""

    ranks: tuple[int, ...]
    issued: Annotated[str, "Operator, number of elements and type."]


@dataclass(frozen=True, kw_only=True)
class HangMismatch:
    """A collective that its ranks did not issue alike: another operator, another size or another type."""

    group: str
    group_description: str
    sequence: int
    variants: Annotated[tuple[HangVariant, ...], "The one of most ranks first."]
    odd_ranks: Annotated[tuple[int, ...], "The fewer of the ranks; empty where neither side is the odd one."]


@dataclass(frozen=True, kw_only=True)
class HangVictim:
    """Ranks that wait in consequence: what they wait for would come if the missing ranks did."""

    ranks: tuple[int, ...]
    group: str
    group_description: str
    collective: Annotated[str, "The operation that it waits in."]
    sequence: int
    since_us: EpochUs | None
    waits_for: Annotated[tuple[int, ...], "Ranks that did not join it, or whose devices have not reached it."]


@dataclass(frozen=True, kw_only=True)
class HangCallSite:
    """Where in the code ranks stand, the user's own code before that of libraries."""

    ranks: tuple[int, ...]
    file: Annotated[str, "Source file."]
    line: Annotated[int, "Line in the file."]
    function: Annotated[str, "The function there."]
    source: Annotated[
        Literal["flight recorder", "stack"],
        "The stack in a flight-recorder dump, which is of the last operation that a rank issued, or that of its main "
        "thread as py-spy or faulthandler wrote it.",
    ]
    missing: Annotated[bool, "The ranks are missing ones; else they wait."]
    calls: Annotated[tuple[str, ...], "The calls below it, the innermost first."] = ()


@dataclass(frozen=True, kw_only=True)
class HangLastSeen:
    """The last that is known of a missing rank."""

    rank: int
    evidence: Annotated[
        Literal["did not join", "device stands still", "no dump", "no entries", "issued another operation", "stack"],
        "Why it is named.",
    ]
    group: str | None = None
    group_description: str | None = None
    collective: Annotated[str | None, "The last operation that it issued."] = None
    sequence: int | None = None
    at_us: EpochUs | None = None


@dataclass(frozen=True, kw_only=True)
class Hang:
    """The answer for a job that stands still."""

    missing_ranks: Annotated[
        tuple[int, ...],
        "Ranks that did not join, and wait for no other rank. Empty where the data cannot tell: no rank is named then.",
    ]
    group: Annotated[str | None, "Name of the process group of the collective that they did not join."]
    group_description: str | None
    collective: Annotated[str | None, "The operator: ``all_reduce``, ``send`` …"]
    sequence: Annotated[int | None, "Number of the collective in its group; of a send or recv, among those."]
    input_sizes: Annotated[tuple[tuple[int, ...], ...], "Shapes of the operation's inputs."] = ()
    output_sizes: Annotated[tuple[tuple[int, ...], ...], "Shapes of its outputs."] = ()
    dtype: str | None = None
    waiting_ranks: Annotated[tuple[int, ...], "Ranks that issued it and wait."]
    since_us: Annotated[EpochUs | None, "When the first of them issued it."]
    mismatches: tuple[HangMismatch, ...] = ()
    victims: tuple[HangVictim, ...] = ()
    call_sites: tuple[HangCallSite, ...] = ()
    last_seen: Annotated[tuple[HangLastSeen, ...], "Of each missing rank."] = ()
    ranks_without_dump: Annotated[tuple[int, ...], "Ranks that left neither a dump nor stacks."] = ()
    confidence: Literal["low", "medium", "high"]
    reason: Annotated[str, "Why the answer is as sure as that."]
