"""A 1F1B or GPipe pipeline on CPUs over gloo, a stage on each rank, as perfscope run records it.

A simulator of its own, of a few lines: every stage goes through its passes in the schedule's order, and a pass begins
when the stage is free and its input has come. The first stage computes no gradient of its input, the last one has the
loss.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

DIMS = {"aten::addmm": [[16], [8, 16], [16, 16]], "aten::mm": [[16, 8], [8, 16]]}
Extra = Callable[[int, int], float]
"""(rank, step) -> µs that a pass, or the optimizer, takes longer."""


def none(_rank: int, _step: int) -> float:
    """Nothing does."""
    return 0.0


@dataclass
class CpuPipeline:
    """Times in µs; ``noise`` is the standard deviation of each piece of work, as a share."""

    stages: int = 3
    batches: int = 4
    steps: int = 12
    product: float = 1000.0
    python: float = 400.0
    noise: float = 0.03
    operator: Extra = none
    """In an operator of each forward, split evenly over the micro-batches."""
    host: Extra = none
    """Between operators, before the optimizer."""
    forward: float = 1.0
    """What the operators of a forward take, as a share of the same of a backward."""
    all_forwards_first: bool = False
    sends_last: bool = False
    """Does a stage wait for its sends at the end of the step, when their ranges are closed, as torch's schedules do?"""
    ranges: bool = True
    """Are the passes named?"""
    head: float = 1.0
    """The last stage's products are so many times as large."""
    seed: int = 0
    took: float = 0.0
    """All steps, after :meth:`write`."""
    events: dict[int, list[dict[str, Any]]] = field(default_factory=dict)

    def write(self, folder: Path) -> None:
        """A trace of each rank."""
        rng = random.Random(self.seed)
        clock = [0.0] * self.stages
        sent: dict[tuple[int, int], int] = {}
        self.events = {rank: [] for rank in range(self.stages)}
        for step in range(self.steps):
            clock = self._step(step, clock, sent, rng)
        self.took = max(clock)
        folder.mkdir(parents=True, exist_ok=True)
        for rank, events in self.events.items():
            group = {"pg_name": "0", "pg_desc": "default_pg", "pg_size": self.stages, "ranks": [*range(self.stages)]}
            about = {"backend": "gloo", "rank": rank, "world_size": self.stages, "pg_config": [group]}
            trace = {"record_shapes": 1, "distributedInfo": about, "traceEvents": events}
            (folder / f"rank{rank}.json").write_text(json.dumps(trace))

    def _orders(self, stage: int) -> Iterator[tuple[str, int]]:
        ahead = self.batches if self.all_forwards_first else min(self.stages - stage, self.batches)
        yield from (("forward", batch) for batch in range(ahead))
        for batch in range(self.batches):
            yield "backward", batch
            if ahead + batch < self.batches:
                yield "forward", ahead + batch

    def _step(self, step: int, clock: list[float], sent: dict[tuple[int, int], int], rng: random.Random) -> list[float]:
        began, clock = [*clock], [*clock]
        orders = [list(self._orders(stage)) for stage in range(self.stages)]
        done: dict[tuple[str, int, int], float] = {}
        numbers: dict[tuple[str, int, int], int] = {}
        place = [0] * self.stages
        while any(at < len(order) for at, order in zip(place, orders, strict=True)):
            for stage, order in enumerate(orders):
                if place[stage] == len(order):
                    continue
                phase, batch = order[place[stage]]
                giver = stage + (-1 if phase == "forward" else 1)
                if 0 <= giver < self.stages and (phase, giver, batch) not in done:
                    continue
                if 0 <= giver < self.stages:
                    number = numbers[phase, giver, batch]
                    clock[stage] = self._message("recv", stage, giver, number, clock[stage], done[phase, giver, batch])
                clock[stage] = self._pass(phase, stage, batch, step, clock[stage], rng)
                taker = stage + (1 if phase == "forward" else -1)
                if 0 <= taker < self.stages:
                    number = sent[stage, taker] = sent.get((stage, taker), -1) + 1
                    numbers[phase, stage, batch] = number
                    clock[stage] = self._message("send", stage, taker, number, clock[stage], 0.0)
                done[phase, stage, batch] = clock[stage]
                place[stage] += 1
        for stage in range(self.stages):
            if self.sends_last:
                clock[stage] = self._wait_for_sends(stage, began[stage], clock[stage])
            clock[stage] += self.host(stage, step)
            clock[stage] = self._operator(stage, "aten::add_", clock[stage], self.product / 2, rng)
            self._event(stage, "user_annotation", f"ProfilerStep#{step}", began[stage], clock[stage])
            clock[stage] += 1
        return clock

    def _wait_for_sends(self, rank: int, began: float, now: float) -> float:
        """One after another; the first wait takes as long as the last send does."""
        now += 290
        for event in self.events[rank]:
            if event["name"] == "gloo:send" and event["ts"] >= began:
                now += 10
                event["dur"] = max(event["dur"], now - event["ts"])
        return now

    def _pass(self, phase: str, stage: int, batch: int, step: int, now: float, rng: random.Random) -> float:
        began, size = now, self.head if stage == self.stages - 1 else 1.0
        now += self.python * (1 + rng.gauss(0, self.noise))
        if phase == "forward":
            product = self.product * self.forward
            now = self._operator(stage, "aten::addmm", now, product * size, rng, size)
            now = self._operator(stage, "Work", now, product + self.operator(stage, step) / self.batches, rng)
        for _ in range(0 if phase == "forward" else 1 + (stage > 0)):
            now = self._operator(stage, "aten::mm", now, self.product * size, rng, size)
        if self.ranges:
            self._event(stage, "user_annotation", f"perfscope::pipeline#{phase}|{stage}|{batch}", began, now)
        return now

    def _operator(self, rank: int, name: str, now: float, takes: float, rng: random.Random, size: float = 1.0) -> float:
        end = now + takes * (1 + rng.gauss(0, self.noise))
        dims = [[int(size * rows), *rest] for rows, *rest in DIMS.get(name, [[8, 16]])]
        self._event(rank, "cpu_op", name, now, end, **{"Input Dims": dims, "Input type": ["float"] * len(dims)})
        return end + 5

    def _message(self, kind: str, rank: int, peer: int, number: int, now: float, comes: float) -> float:
        """Issued within 60 µs; a recv has ended when the message has come."""
        self._event(rank, "cpu_op", "c10d::recv_" if kind == "recv" else "c10d::send", now, now + 60)
        described = f"perfscope::collective#{kind}|0|{self.stages}|{number}|{peer}|float32|512"
        self._event(rank, "user_annotation", described, now + 20, now + 50)
        end = max(now + 60, comes + 30)
        self._event(rank, "user_annotation", f"gloo:{kind}", now + 40, end)
        if kind == "recv":  # a send goes on beside the work until it has been received
            sends = (event for event in reversed(self.events[peer]) if event["name"] == "gloo:send")
            send = next(event for event in sends if event["args"] == {"to": rank, "number": number})
            send["dur"] = end - send["ts"]
        else:
            self.events[rank][-1]["args"] = {"to": peer, "number": number}
        return end

    def _event(self, rank: int, category: str, name: str, start: float, end: float, **arguments: Any) -> None:
        self.events[rank].append(
            {"ph": "X", "cat": category, "name": name, "pid": rank + 1, "tid": rank + 1, "ts": start,
             "dur": end - start, "args": arguments}
        )  # fmt: skip
