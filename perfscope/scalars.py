"""Scalars over a training's steps, one curve a tag: what TensorBoard shows of a job."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Point:
    """The values of a step. ``time_s`` is when it began, seconds since the epoch; ``values`` are by tag."""

    step: int
    time_s: float
    values: dict[str, float]


@dataclass(frozen=True)
class Curves:
    """What is known of one rank, or of the job, from one source; ``points`` ascend by step.

    ``run`` is where TensorBoard lists it (``job``, ``rank-3``), ``source`` tells sources of one run apart
    (``capture-0``, ``history``).
    """

    run: str
    source: str
    points: tuple[Point, ...]
