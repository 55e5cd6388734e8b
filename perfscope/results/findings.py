"""A finding: what limits the job, the evidence, what to change and what that is worth."""

from __future__ import annotations

import enum
import re
from collections.abc import Callable, Mapping
from dataclasses import field
from typing import Annotated, Any, Final, NamedTuple

from perfscope.frozen import dataclass
from perfscope.results.display import Displayed
from perfscope.results.fields import Unit, Us, document_of
from perfscope.text import factor


class _Word(str, enum.Enum):
    """A value that is its word: in JSON, in tables and in text."""

    __str__ = str.__str__


class Severity(_Word):
    """How much of the step a finding is about: high from 20 %, medium from 5 %, low below; info costs nothing."""

    HIGH = "high"
    MEDIUM = "medium"
    LOW = "low"
    INFO = "info"

    @classmethod
    def of_share(cls, share: float) -> Severity:
        """Severity of a recoverable share (0..1) of the step."""
        if share >= 0.20:
            return cls.HIGH
        return cls.MEDIUM if share >= 0.05 else cls.LOW


class Confidence(_Word):
    """How sure a finding is: low below five steps or when a part of the job is missing from the recording."""

    LOW = "low"
    MEDIUM = "medium"
    HIGH = "high"


class Obtained(_Word):
    """How a gain was obtained."""

    MEASURED = "measured"
    REPLAYED = "replayed"
    BOUNDED = "bounded"


@dataclass(frozen=True)
class Evidence:
    """One number that a finding rests on."""

    what: Annotated[str, "What was measured."]
    value: Annotated[float, "The number."]
    unit: Annotated[
        str, "Of ``value``: ``us``, ``bytes``, ``share``, ``ratio``, ``GB/s``, ``TFLOP/s``; empty for a count."
    ] = ""
    ranks: tuple[int, ...] = ()


_WIDE: Final = 10.0
"""Times the middle of a prediction that its upper end is, from which its range is stated and not its middle."""

LANGUAGES: Final = ("python", "shell", "json", "yaml")
"""Of what is fenced: each can be pasted where the sentence before it says."""
_FENCED: Final = re.compile(rf"^```({'|'.join(LANGUAGES)})\n(.*?)\n```$", re.MULTILINE | re.DOTALL)


class Block(NamedTuple):
    """Sentences, or code of one of ``LANGUAGES``."""

    language: str
    """Empty for sentences."""
    text: str


def code(language: str, text: str) -> str:
    """Code as a part of ``Action.how``; on lines of its own."""
    return f"```{language}\n{text}\n```"


def blocks(how: str) -> tuple[Block, ...]:
    """The sentences and the code of ``Action.how``, in their order; none of them is empty."""
    # Of a pattern with two groups, split gives: sentences, language, code, sentences, language, code, sentences.
    first, *others = _FENCED.split(how)
    found = [Block("", first.strip())]
    for language, text, after in zip(others[::3], others[1::3], others[2::3], strict=True):
        found += [Block(language, text), Block("", after.strip())]
    return tuple(block for block in found if block.text)


def plain(how: str) -> str:
    """``Action.how`` without the fences, for what shows no Markdown."""
    return "\n".join(block.text for block in blocks(how))


@dataclass(frozen=True, kw_only=True)
class Action:
    """What to change, as the user would write it. In JSON ``old`` and ``new`` are ``from`` and ``to``."""

    setting: Annotated[str, "The setting to change."]
    old: Annotated[str | None, "Its value now; None where it is not known."]
    new: Annotated[str | None, "The advised value; None where there is none."]
    how: Annotated[
        str, "What to do: sentences, and what to type in fenced blocks of ``python``, ``shell``, ``json`` or ``yaml``."
    ]
    costs: Annotated[
        str | None, "What the change takes besides time: memory, precision, statistics; None where nothing."
    ] = None


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """Predicted step time in µs; low <= mid <= high."""

    low: Annotated[Us, "Predicted step time, lowest estimate."]
    mid: Annotated[Us, "Predicted step time, middle estimate."]
    high: Annotated[Us, "Predicted step time, highest estimate."]

    def __post_init__(self) -> None:
        if not self.low <= self.mid <= self.high:
            raise ValueError(f"a prediction needs low <= mid <= high, got {self.low}, {self.mid}, {self.high}")

    def speedup_of(self, step_us: float) -> str:
        """How many times as fast a step of ``step_us`` becomes: ``1.8x``. Of a wide range its ends: ``1.58x to 33x``,
        or where the step may become no faster, ``up to 33x``.
        """
        if not self.is_wide or self.mid <= 0:
            return factor(step_us / self.mid if self.mid else None)
        if self.low <= 0:
            return f"{factor(max(step_us / self.high, 1.0))} or more"
        most = factor(step_us / self.low)
        return f"up to {most}" if self.high >= step_us else f"{factor(step_us / self.high)} to {most}"

    @property
    def is_wide(self) -> bool:
        """Is the highest estimate so far from the middle one that this is none to go by?"""
        return self.high >= _WIDE * self.mid

    def times(self, longer: float) -> Prediction:
        """Of a step that takes ``longer`` times as long, changed in the same way."""
        return Prediction(low=self.low * longer, mid=self.mid * longer, high=self.high * longer)

    def plus(self, us: float) -> Prediction:
        """Of a step that takes so much longer."""
        return Prediction(low=self.low + us, mid=self.mid + us, high=self.high + us)


Predict = Callable[[Mapping[str, str]], Prediction | None]
"""Settings of ``perfscope whatif`` -> predicted step time; None where they cannot be replayed."""


STRAGGLING_RANK: Final = "straggling-rank"
"""Rule of findings about stragglers."""
GRADIENTS_BY_HAND: Final = "gradients-by-hand"
"""Rule of findings about gradients that a loop reduces one by one."""


@dataclass(frozen=True, kw_only=True, repr=False)
class Finding(Displayed):
    """A limit of the job. Cannot exist without evidence."""

    _shown_by = "finding"

    rule: str
    title: Annotated[str, "The limit, in a sentence."]
    severity: Annotated[
        Severity, "How much of the step it is about: high from 20%, medium from 5%, low below; info costs nothing."
    ]
    evidence: tuple[Evidence, ...]
    action: Action
    predicted_step_us: Annotated[
        Prediction | None,
        "The step replayed with the change; None where the change could not be replayed. How accurate predictions of "
        "this kind have been is printed beside it. It is of ``job.unprofiled_step_us`` where that is known, else of "
        "``job.step_time_us``.",
    ] = None
    ceiling: Annotated[
        float | None,
        Unit("0.25 is 25 %"),
        "T/(T−R) − 1 for R recoverable out of a step T: 0.25 means at most 1.25x faster, no change of this kind can "
        "bring more. Ceilings of overlapping causes are never added.",
    ] = None
    obtained: Annotated[Obtained, "How the gain was obtained: ``measured``, ``replayed`` or ``bounded``."]
    confidence: Annotated[
        Confidence,
        "How certain the finding is: low below five steps, or when a part of the job is missing from the recording.",
    ]
    whatif: Annotated[
        dict[str, str], "The same change as settings of ``perfscope whatif``; empty where it cannot be replayed."
    ] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.evidence:
            raise ValueError(f"finding {self.rule!r} has no evidence")
        if self.ceiling is None and self.predicted_step_us is None and self.severity is not Severity.INFO:
            raise ValueError(f"finding {self.rule!r} states neither a ceiling nor a prediction")

    def __repr__(self) -> str:
        return f"<Finding {self.rule}, {self.severity} severity: {self.title[:300]}>"

    @property
    def straggling(self) -> tuple[int, ...]:
        """The ranks that a finding about a straggler is about; none of other findings."""
        return self.evidence[0].ranks if self.rule == STRAGGLING_RANK else ()

    def gain(self, step_time_us: float) -> float | None:
        """By how much more than 1x the change makes the step faster (0.25: 1.25x): predicted, else the ceiling."""
        predicted = self.predicted_step_us
        return step_time_us / predicted.mid - 1 if predicted is not None and predicted.mid else self.ceiling

    def to_dict(self) -> dict[str, Any]:
        """The JSON value: enums as their words, and the action's two keys that are Python keywords."""
        document = document_of(self)
        action = document["action"]
        document["action"] = {
            "setting": action.pop("setting"),
            "from": action.pop("old"),
            "to": action.pop("new"),
            **action,
        }
        return {name: value.value if isinstance(value, enum.Enum) else value for name, value in document.items()}


class Findings(Displayed, tuple[Finding, ...]):
    """A job's findings."""

    _shown_by = "findings"
