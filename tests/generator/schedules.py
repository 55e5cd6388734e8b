"""Orders in which pipeline stages work on micro-batches.

A schedule is what each stage does in turn: forward or backward of a micro-batch, or an exchange with its neighbours.
Non-interleaved ones are Megatron-LM's ``forward_backward_pipelining_without_interleaving`` (1F1B) and all forwards
before all backwards (GPipe). With 2 stages and 2 micro-batches, 1F1B is::

    stage 0   F0 send | F1 send+recv | B0 | recv B1
    stage 1   recv F0 send+recv | B0 ... F1 B1 send
"""

from __future__ import annotations

from dataclasses import dataclass

from tests.generator.work import Part


@dataclass(frozen=True)
class P2POp:
    """A send or a recv of a stage: ``stage`` is the other end."""

    send: bool
    stage: int
    forward: bool
    """Activations; else gradients."""


@dataclass(frozen=True)
class Exchange:
    """Sends and receives that are issued together."""

    ops: tuple[P2POp, ...]


Action = Part | Exchange


def actions(schedule: str, stages: int, stage: int, microbatches: int, chunks: int) -> list[Action]:
    """What a stage does in a step."""
    if schedule == "interleaved":
        return _interleaved(stages, stage, microbatches, chunks)
    found = (_one_forward_one_backward if schedule == "1f1b" else _all_forward_all_backward)(
        _Neighbours(stages, stage), stages, stage, microbatches
    )
    return [action for action in found if action != Exchange(())]


@dataclass(frozen=True)
class _Neighbours:
    """The exchanges of one stage; empty where there is no neighbour on that side."""

    stages: int
    stage: int

    def _op(self, *, send: bool, forward: bool) -> tuple[P2POp, ...]:
        other = self.stage + (1 if send == forward else -1)
        return (P2POp(send, other, forward),) if 0 <= other < self.stages else ()

    def receive_forward(self) -> Exchange:
        return Exchange(self._op(send=False, forward=True))

    def send_forward(self) -> Exchange:
        return Exchange(self._op(send=True, forward=True))

    def receive_backward(self) -> Exchange:
        return Exchange(self._op(send=False, forward=False))

    def send_backward(self) -> Exchange:
        return Exchange(self._op(send=True, forward=False))

    # Activations first at both ends of every pair, so that no two stages wait for each other's other half.
    def send_forward_receive_backward(self) -> Exchange:
        return Exchange(self._op(send=True, forward=True) + self._op(send=False, forward=False))

    def send_backward_receive_forward(self) -> Exchange:
        return Exchange(self._op(send=False, forward=True) + self._op(send=True, forward=False))


def _one_forward_one_backward(to: _Neighbours, stages: int, stage: int, microbatches: int) -> list[Action]:
    ahead = min(stages - stage - 1, microbatches)
    steady = microbatches - ahead
    found: list[Action] = []
    for index in range(ahead):
        found += [to.receive_forward(), Part(True, index), to.send_forward()]
    if steady:
        found.append(to.receive_forward())
    for index in range(steady):
        found += [Part(True, ahead + index), to.send_forward_receive_backward(), Part(False, index)]
        found.append(to.send_backward() if index == steady - 1 else to.send_backward_receive_forward())
    for index in range(steady, microbatches):
        found += [to.receive_backward(), Part(False, index), to.send_backward()]
    return found


def _all_forward_all_backward(to: _Neighbours, stages: int, stage: int, microbatches: int) -> list[Action]:
    found: list[Action] = []
    for index in range(microbatches):
        found += [to.receive_forward(), Part(True, index), to.send_forward()]
    for index in range(microbatches):
        found += [to.receive_backward(), Part(False, index), to.send_backward()]
    return found


def interleaved_turns(stages: int, stage: int, microbatches: int, chunks: int) -> list[tuple[Part, ...]]:
    """What a stage computes between one exchange and the next, in Megatron-LM's order: groups of as many micro-batches
    as there are stages go through chunk after chunk; (stages - stage - 1) x 2 + (chunks - 1) x stages forwards come
    first, then a forward and a backward at a time (Narayanan et al., SC'21)."""
    total = microbatches * chunks
    ahead = min((stages - stage - 1) * 2 + (chunks - 1) * stages, total)

    def part(index: int, *, forward: bool) -> Part:
        group, within = divmod(index, stages * chunks)
        chunk = within // stages
        return Part(forward, group * stages + within % stages, chunk if forward else chunks - 1 - chunk)

    first = [(part(index, forward=True),) for index in range(ahead)]
    pairs = [(part(ahead + index, forward=True), part(index, forward=False)) for index in range(total - ahead)]
    return [*first, *pairs, *((part(index, forward=False),) for index in range(total - ahead, total))]


def interleaved_slots(stages: int, microbatches: int, chunks: int) -> list[dict[int, tuple[Part, ...]]]:
    """Which stages have which turn in which slot: each as early as what it needs was computed in an earlier slot.
    After each slot neighbours exchange what it brought.

    Where all turns of a slot take as long, a step takes (microbatches x chunks + stages - 1) forwards and backwards.
    """
    turns = [interleaved_turns(stages, stage, microbatches, chunks) for stage in range(stages)]
    done: set[tuple[int, Part] | None] = {None}
    at = [0] * stages
    slots: list[dict[int, tuple[Part, ...]]] = []
    while any(at[stage] < len(turns[stage]) for stage in range(stages)):
        slot = {
            stage: turns[stage][at[stage]]
            for stage in range(stages)
            if at[stage] < len(turns[stage])
            and all(_source(stages, stage, part, chunks) in done for part in turns[stage][at[stage]])
        }
        if not slot:
            raise ValueError(f"{stages} stages, {microbatches} micro-batches and {chunks} chunks wait for each other")
        for stage, turn in slot.items():
            at[stage] += 1
            done.update((stage, part) for part in turn)
        slots.append(slot)
    return slots


def _source(stages: int, stage: int, part: Part, chunks: int) -> tuple[int, Part] | None:
    """Where a part's input comes from: (stage, part), None at the ends of the model."""
    virtual = part.chunk * stages + stage + (-1 if part.forward else 1)
    if not 0 <= virtual < stages * chunks:
        return None
    return virtual % stages, Part(part.forward, part.microbatch, virtual // stages)


def _interleaved(stages: int, stage: int, microbatches: int, chunks: int) -> list[Action]:
    found: list[Action] = []
    for slot in interleaved_slots(stages, microbatches, chunks):
        found += slot.get(stage, ())
        ops = []
        for other, turn in sorted(slot.items()):
            for part in turn:
                virtual = part.chunk * stages + other + (1 if part.forward else -1)
                if not 0 <= virtual < stages * chunks:
                    continue
                if other == stage:
                    ops.append(P2POp(True, virtual % stages, part.forward))
                elif virtual % stages == stage:
                    ops.append(P2POp(False, other, part.forward))
        if ops:
            found.append(Exchange(tuple(ops)))
    return found
