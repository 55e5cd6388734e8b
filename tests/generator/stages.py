"""The true times of a pipeline's stages: their own work and their bubbles."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

from tests.generator.engine import Host
from tests.generator.spec import JobSpec
from tests.generator.sweep import Window
from tests.generator.work import Part


@dataclass(frozen=True)
class Passes:
    """One rank's forward and backward passes in one step, on its device."""

    first_ns: int
    """Start of the first forward."""
    last_ns: int
    """End of the last backward."""
    forward_ns: float
    """Mean, from first start to last end, of one micro-batch's forward through one chunk."""
    backward_ns: float


@dataclass(frozen=True)
class StageTruth:
    """One pipeline stage: means over its ranks and the recorded steps, ns."""

    stage: int
    ranks: tuple[int, ...]
    step_ns: float
    busy_ns: float
    """All of the step but its bubbles."""
    bubble_start_ns: float
    """Waiting for other stages before the first forward of the step begins."""
    bubble_steady_ns: float
    """Between there and the end of the last backward."""
    bubble_drain_ns: float
    """After it."""
    forward_ns: float
    backward_ns: float
    flops_per_step: int
    """Of one of its ranks."""

    @property
    def bubble_ns(self) -> float:
        """All of it."""
        return self.bubble_start_ns + self.bubble_steady_ns + self.bubble_drain_ns


def passes(spec: JobSpec, host: Host) -> tuple[Passes, ...]:
    """A rank's passes in each recorded step."""
    spans: dict[int, dict[Part, tuple[int, int]]] = defaultdict(dict)
    for stream in host.streams.values():
        for work in stream.works:
            if work.part is not None and work.kind == "compute":
                start, end = spans[work.step].get(work.part, (work.started, work.ended))
                spans[work.step][work.part] = min(start, work.started), max(end, work.ended)
    return tuple(_of_step(spans[step]) for step in spec.recorded_steps) if spec.backend == "nccl" else ()


def _of_step(spans: Mapping[Part, tuple[int, int]]) -> Passes:
    forwards = [span for part, span in spans.items() if part.forward]
    backwards = [span for part, span in spans.items() if not part.forward]
    return Passes(
        first_ns=min(start for start, _ in forwards),
        last_ns=max(end for _, end in backwards),
        forward_ns=sum(end - start for start, end in forwards) / len(forwards),
        backward_ns=sum(end - start for start, end in backwards) / len(backwards),
    )


def stage_truth(
    spec: JobSpec,
    stage: int,
    windows: Mapping[int, tuple[Window, ...]],
    passes_of: Mapping[int, tuple[Passes, ...]],
) -> StageTruth:
    """The true times of one stage."""
    ranks = spec.ranks_of_stage(stage)
    both = [pair for rank in ranks for pair in zip(windows[rank], passes_of[rank], strict=True)]

    def mean(values: list[float]) -> float:
        return sum(values) / len(values)

    start = mean([_between(w, w.start_ns, p.first_ns) for w, p in both])
    steady = mean([_between(w, p.first_ns, p.last_ns) for w, p in both])
    drain = mean([_between(w, p.last_ns, max(p.last_ns, w.end_ns)) for w, p in both])
    step_ns = mean([window.duration_ns for window, _ in both])
    return StageTruth(
        stage=stage,
        ranks=ranks,
        step_ns=step_ns,
        busy_ns=step_ns - start - steady - drain,
        bubble_start_ns=start,
        bubble_steady_ns=steady,
        bubble_drain_ns=drain,
        forward_ns=mean([p.forward_ns for _, p in both]),
        backward_ns=mean([p.backward_ns for _, p in both]),
        flops_per_step=spec.model_flops(ranks[0]),
    )


def _between(window: Window, start: int, end: int) -> int:
    return sum(max(0, min(stop, end) - max(begin, start)) for begin, stop in window.bubbles)
