"""Tools about the whole run: every step of it, captured or not, and why it stands still."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from perfscope.errors import UnusableInput
from perfscope.results.history import History
from perfscope.server.answers import Answer, HangHead, HistoryHead
from perfscope.server.tool import Capture, RecordingName, Tools, table_answer, tool

_HISTORY = {"ranks": "history_ranks", "bins": "history", "outliers": "outlier_steps", "slow_ranks": "slow_ranks"}
_HANG = {
    "last_seen": "hang_missing",
    "call_sites": "hang_call_sites",
    "victims": "hang_victims",
    "mismatches": "hang_mismatches",
}


class RunTools(Tools):
    """The run as a whole."""

    @tool("Every step of the run", HistoryHead, *_HISTORY.values())
    def history(
        self,
        recording: RecordingName,
        part: Annotated[
            Literal["ranks", "bins", "outliers", "slow_ranks"],
            Field(
                description="What to list: ranks (statistics of each rank's steps), bins (the run in segments of "
                "steps), outliers (steps that took far longer), slow_ranks (ranks slower than their peers in a stage)."
            ),
        ] = "outliers",
    ) -> Answer:
        """Describe every step of the run, also those that were not recorded in a trace: medians, percentiles, trend,
        outlier steps and slow ranks.

        Use it for "does the job get slower", "which steps were outliers", "how long are steps without the profiler".
        perfscope run writes step histories; traces of other tools have none.
        """
        place, found = self.opened(recording)
        if found.history is None:
            raise UnusableInput(
                f"{place.name}: holds no step history; perfscope run -- COMMAND writes one. steps lists the recorded "
                "steps"
            )
        return table_answer(_history(place.name, found.history, part), place, found, _HISTORY[part])

    @tool("Why a job stands still", HangHead, *_HANG.values())
    def hang(
        self,
        recording: RecordingName,
        part: Annotated[
            Literal["last_seen", "call_sites", "victims", "mismatches"],
            Field(
                description="What to list: last_seen (the last that is known of each missing rank), call_sites (where "
                "in the code ranks stand), victims (who waits in consequence), mismatches (collectives not issued "
                "alike)."
            ),
        ] = "last_seen",
        capture: Capture = None,
    ) -> Answer:
        """Explain a job that hangs: which ranks did not join which collective, who waits for them, and where in the
        code they stand. It reads flight-recorder dumps and stacks.

        Use it for "the job hangs", "NCCL timeout".
        """
        place, found = self.opened(recording, capture)
        hang = found.hang
        head = HangHead(
            recording=place.name,
            hung=hang is not None,
            notes=() if hang is not None else ("No hang: the recording shows no rank that others wait for in vain.",),
            headline=found.verdict.headline,
            missing_ranks=hang.missing_ranks if hang else (),
            waiting_ranks=hang.waiting_ranks if hang else (),
            collective=hang.collective if hang else None,
            group=hang.group if hang else None,
            sequence=hang.sequence if hang else None,
            confidence=hang.confidence if hang else None,
            reason=hang.reason if hang else None,
            part=part,
        )
        return table_answer(head, place, found, _HANG[part])


def _history(name: str, history: History, part: str) -> HistoryHead:
    slowest = max(history.ranks, key=lambda rank: rank.median_us)
    return HistoryHead(
        recording=name,
        first_step=min(rank.first_step for rank in history.ranks),
        last_step=max(rank.last_step for rank in history.ranks),
        median_us=slowest.median_us,
        p99_us=slowest.p99_us,
        max_us=max(rank.max_us for rank in history.ranks),
        outlier_steps=len(history.outliers),
        trend=slowest.trend,
        part=part,
    )
