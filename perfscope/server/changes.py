"""Tools about change: the step with settings changed, and two recordings side by side."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Final, Literal

from pydantic import Field

from perfscope.analyzers.compare.compare import compare
from perfscope.analyzers.whatif.predict import SETTINGS, WhatIfAnswer, predict
from perfscope.analyzers.whatif.whatif import sweep
from perfscope.errors import UnusableInput
from perfscope.results.accuracy import accuracy_in_words
from perfscope.results.comparison import (
    CategoryChange,
    CollectiveChange,
    Difference,
    FindingChange,
    MetricChange,
    PredictionCheck,
    RankChange,
    SettingChange,
    WorkChange,
)
from perfscope.server.answers import About, Answer, ComparisonHead, PredictedStep, SettingRow, WhatIfHead
from perfscope.server.opened import state_of
from perfscope.server.tool import Capture, RecordingName, Tools, tool

_MOST_VALUES: Final = 50
"""Of a sweep: each is a replay."""

Part = Literal[
    "categories", "findings", "settings", "metrics", "predictions", "kernels", "operators", "collectives", "ranks"
]


class ChangeTools(Tools):
    """What would change, and what did."""

    @tool("The step with settings changed", WhatIfHead, PredictedStep)
    def what_if(
        self,
        recording: RecordingName,
        settings: Annotated[
            dict[str, str],
            Field(
                description='Setting -> value, all changed together: {"network.bandwidth": "2x", "rank.3": "peers"}. '
                "what_if_settings lists them. Empty with sweep."
            ),
        ],
        sweep_setting: Annotated[
            str | None, Field(description="A setting to try several values of, besides settings.")
        ] = None,
        sweep_values: Annotated[list[str] | None, Field(description="The values to try, at most 50.")] = None,
        capture: Capture = None,
    ) -> Answer:
        """Predict the step time with settings changed, by replaying the recorded steps of all ranks: low, middle, high.

        Use it for "what would a faster network bring", "what if rank 3 were as fast as its peers" (rank.3=peers), "how
        many workers". Findings give the settings of their own change in whatif. The answer says what it rests on.
        """
        place = self.folder.find(recording)
        asked = _asked(settings, sweep_setting, sweep_values)
        context = self.analyses.context(place, capture)
        if sweep_setting is None:
            answers = [predict(context, settings)]
        else:
            answers = sweep(context, settings, sweep_setting, asked)
        first = answers[0]
        head = WhatIfHead(
            recording=place.name,
            measured_step_us=first.measured_ns / 1e3,
            replayed_step_us=first.replayed_ns / 1e3,
            profiled_step_us=None if first.profiled_ns is None else first.profiled_ns / 1e3,
            replay_error=first.error,
            assumed=tuple(dict.fromkeys(line for answer in answers for line in answer.assumed)),
            accuracy=accuracy_in_words(first.settings),
        )
        return Answer(fixed=head, rows=[_predicted(answer) for answer in answers], state=state_of(place))

    @tool("Settings of what_if", About, SettingRow)
    def what_if_settings(self) -> Answer:
        """List the settings that what_if can change, and how their values are written."""
        return Answer(
            fixed=About(),
            rows=[SettingRow(setting=each.name, value=each.value, meaning=each.help) for each in SETTINGS],
        )

    @tool(
        "Two recordings side by side",
        ComparisonHead,
        CategoryChange,
        FindingChange,
        SettingChange,
        MetricChange,
        PredictionCheck,
        WorkChange,
        CollectiveChange,
        RankChange,
    )
    def compare(
        self,
        baseline: Annotated[str, Field(description="Name of the recording to compare with.")],
        candidate: Annotated[str, Field(description="Name of the recording that is judged.")],
        part: Annotated[
            Part,
            Field(
                description="What to list: categories of the time breakdown, findings, settings that differ, metrics, "
                "predictions (what was predicted and what came), kernels, operators, collectives or ranks."
            ),
        ] = "categories",
    ) -> Answer:
        """Say whether one recording is faster or slower than another, whether that is more than noise, and what made
        the difference.

        Use it for "did the change help", "why is today's run slower". Deltas are candidate - baseline, in µs per step.
        """
        places = [self.folder.find(name) for name in (baseline, candidate)]
        summaries = [self.analyses.summary(place) for place in places]
        difference = compare(*summaries).differences[0]
        head = ComparisonHead(
            baseline=places[0].name,
            candidate=places[1].name,
            verdict=difference.step.verdict,
            step=difference.step,
            causes=difference.causes,
            causes_significant=difference.causes_significant,
            part=part,
            notes=difference.notes,
        )
        state = " ".join(state_of(place) for place in places)
        return Answer(fixed=head, rows=_part(difference, part), state=state)


def _asked(settings: Mapping[str, str], name: str | None, values: Sequence[str] | None) -> list[str]:
    """The values of a sweep; none without one. Raises UnusableInput where the question is not whole."""
    if (name is None) != (not values):
        raise UnusableInput("give sweep_setting and sweep_values together, or neither")
    if name is None and not settings:
        raise UnusableInput(
            'nothing to change: give settings such as {"network.bandwidth": "2x"}; what_if_settings lists them'
        )
    asked = list(values or ())
    if len(asked) > _MOST_VALUES:
        raise UnusableInput(f"{len(asked)} values; ask for at most {_MOST_VALUES} at once")
    return asked


def _predicted(answer: WhatIfAnswer) -> PredictedStep:
    return PredictedStep(
        settings=dict(answer.settings),
        predicted_step_us=answer.predicted_us,
        speedup=answer.measured_ns / answer.mid_ns if answer.mid_ns > 0 else 1.0,
        certain=answer.high_ns < answer.measured_ns or answer.low_ns > answer.measured_ns,
    )


def _part(difference: Difference, part: str) -> Sequence[Any]:
    """The rows of a part; of work, collectives and ranks the largest changes first."""
    rows: Sequence[Any] = getattr(difference, part)
    if part in ("kernels", "operators", "collectives", "ranks"):
        return sorted(rows, key=lambda row: -abs(row.delta_us))
    return rows
