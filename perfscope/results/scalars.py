"""Scalars over a training's steps, one curve for each tag, for TensorBoard."""

from __future__ import annotations

from perfscope.frozen import dataclass


@dataclass(frozen=True)
class Point:
    """The values of a step, by tag. ``time_s`` is its start in seconds since the epoch."""

    step: int
    time_s: float
    values: dict[str, float]


@dataclass(frozen=True)
class Curves:
    """The curves of one rank, or of the job, from one source; ``points`` ascend by step.

    ``run`` is TensorBoard's name of it (``job``, ``rank-3``), ``source`` distinguishes the sources of one run
    (``capture-0``, ``history``).
    """

    run: str
    source: str
    points: tuple[Point, ...]
