"""When loader workers deliver the batches that a rank's steps wait for, and whether they set the pace of its steps.

Workers that are always busy deliver at their own pace, whatever the training does: W of them deliver W batches while
one batch loads. Were the training quicker, it would stall that much longer, and were it slower, that much less. Any
other stall (a slow sample now and then, the first batch of an epoch, the loader's own cost in every step) begins when
the training asks, and moves with it.

A worker that is asked for P batches ahead stays busy for the P batches after one that the training waited for. So
workers are always busy where the training waits once in every round of all workers. Traces alone do not show how many
workers there are. There, waits for nearly every batch, or for every k-th, are evidence; fewer of them leave it open,
unless the workers have told how long they take for a batch. Short ones are what taking a batch costs, unless they come
in turns, or most ranks take theirs much sooner.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Final

import numpy as np

from perfscope.analyzers.job.worker_turns import workers_in_turn
from perfscope.analyzers.rank.host_activity import LOADER_STARTING
from perfscope.analyzers.rank.partial import RankPartial
from perfscope.frozen import dataclass
from perfscope.results.categories import TimeCategory
from perfscope.trace.distinct import distinct
from perfscope.trace.trace import Bool, Int64

_STALL: Final = 0.05
"""Share of the mean time between batches from which a wait is a stall."""

_OWN_COST_NS: Final = 1_000_000
"""Taking a batch that is there costs less: unpickling, and the queue. A longer wait for every batch is for workers."""

_TAKEN_NS: Final = 250_000
_SOONER: Final = 4.0
"""Taking a batch may cost so many times as much as on most ranks, by chance; and as much more as a host is slower."""
_ALIKE: Final = 1.2
_SEVERAL: Final = 3
"""Where no batch took longer, nor so many times as long as another, taking costs that: workers are less even. So many
batches as even as that show it of any such cost, a slow host's too."""

_APART: Final = 2.0
"""Waits for workers are at least so many times as long as what taking a batch costs."""

_MOST_WORKERS: Final = 16
"""Stalls further apart than this many batches are not workers' turns."""

_NEARLY_ALL: Final = 0.8
"""Share of the rounds of all workers with a stall from which the workers are always busy."""

_NO_SLACK: Final = 0.9
"""Share of the steps that their batches take the workers, from which these are always busy."""

_SLACK: Final = 0.75
"""Share below which they are not; between both a few batches' time leaves it open, and waits decide."""

_SUSTAINED: Final = 1.1
"""Batches of workers that set the pace come no farther apart than this many times those of the recorded steps."""

_SOME: Final = 0.3
"""Share of them below which they are not."""

_MOST_WAITED_FOR: Final = 0.5
"""Share of the batches that the training waited for from which these show the workers' pace between pauses."""

_UNHELD: Final = 0.95
"""Share of the host's time that it works or waits for batches, from which nothing else holds it."""
_FURTHER: Final = 0.03
"""Share of the time in between by which a host gets ahead of its device at least, where that is the slower one."""

_PAUSED: Final = 1.5
"""From so many times the median step on without taking a batch the training has paused."""

_EVEN: Final = 0.4
"""Least time between two batches of a lone worker, as a share of their mean: several workers deliver unevenly."""


@dataclass(frozen=True, eq=False)
class Deliveries:
    """Deliveries that hold a rank up: parallel arrays, own clock, ascending.

    ``on_ns``: where the rank goes on; ``stall_ns``: the own time right before it that is a stall; ``not_before_ns``:
    before which it cannot go on, whatever the training does. ``sure``: the recording shows that the workers set the
    pace; else it only suggests that. ``batch_ns`` is the mean time between the batches that they deliver, or could,
    where they were asked; None where fewer than two are known.
    """

    on_ns: Int64
    stall_ns: Int64
    not_before_ns: Int64
    sure: bool
    batch_ns: float | None
    longest_ns: int
    """The longest of these waits on the host."""
    workers: int | None
    """How many they are: known, or shown by their turns; None where neither."""
    idle: bool = False
    """They may idle in a part of every step, and be too slow in another."""
    share: float = 0.0
    """Share of the batches for which the host waited."""
    slight: bool = False
    """No batch took longer than taking one may cost, but unequally long: few of them may be waits. There are none here,
    and what the rank spent on them is its own time."""
    timed: bool = False
    """Did the workers themselves time what a batch takes them?"""

    def __len__(self) -> int:
        return len(self.on_ns)

    @property
    def is_hidden(self) -> bool:
        """Did only a host wait that is ahead of its device, and not always?"""
        return len(self) > 0 and not (self.sure or self.idle or self.holds_device)

    @property
    def holds_device(self) -> bool:
        """Is it mostly the device that waits for them, not only a host that is ahead of it?"""
        return len(self) > 0 and not self.idle and 2 * np.count_nonzero(self.stall_ns) >= len(self)


_EMPTY: Final = np.empty(0, dtype=np.int64)
_NONE: Final = Deliveries(_EMPTY, _EMPTY, _EMPTY, sure=True, batch_ns=None, longest_ns=0, workers=None)


def taking_at_most_ns(partials: Mapping[int, RankPartial]) -> dict[int, float]:
    """Rank -> what taking a batch that is there may cost it, by what most ranks take."""
    taking = [ns for partial in partials.values() if (ns := taking_ns(partial)) is not None]
    if len(taking) < 2 and _common_wait_ns(partials) is None:  # nobody to be compared with
        return dict.fromkeys(partials, _OWN_COST_NS)
    common_ns = _common_wait_ns(partials)
    if common_ns is not None:
        return dict.fromkeys(partials, common_ns)
    usual_ns = float(np.quantile(taking, 0.5, method="lower"))
    busy = {rank: float(partial.progress.host_busy_ns.mean()) for rank, partial in partials.items()}
    usually_busy = max(float(np.quantile(list(busy.values()), 0.5, method="lower")), 1.0)
    return {rank: min(_SOONER * usual_ns * max(ns / usually_busy, 1.0), _OWN_COST_NS) for rank, ns in busy.items()}


def _common_wait_ns(partials: Mapping[int, RankPartial]) -> float | None:
    """What most ranks wait for each of their batches, all as long, while a few wait much longer for theirs; else None.

    Then the loaders of these few set the job's pace, and those of the others have time to have a batch ready: what they
    wait all the same is what taking one costs. Workers of one pace on all ranks would not be as late on most of them.
    """
    waits = [end - begin for begin, end in (_in_steps(partial) for partial in partials.values())]
    if len(waits) < _SEVERAL or min(len(each) for each in waits) < _SEVERAL:
        return None
    usual = np.array([np.median(each) for each in waits])
    least = float(usual.min())
    alike = [each for each in waits if each.min() >= least / _ALIKE and each.max() <= _ALIKE * least]
    longer = int(np.count_nonzero(usual >= _APART * _ALIKE * least))
    if not 0 < longer < len(alike) or longer + len(alike) < len(waits):
        return None
    return _ALIKE * float(max(each.max() for each in alike))


def deliveries(
    partial: RankPartial,
    workers: int | None = None,
    fetched_ns: float | None = None,
    taking_at_most_ns: float = _OWN_COST_NS,
    in_turn: int | None = None,
) -> Deliveries:
    """Those of one rank; none where workers do not set its pace. ``workers``: their number, where it is known;
    ``fetched_ns``: what a batch takes one of them, where they were asked; ``taking_at_most_ns``: what taking a batch
    that is there may cost; ``in_turn``: how many workers the batches show that all ranks waited for.
    """
    loading = partial.loading
    start, end = _in_steps(partial)
    # A recording of perfscope run has the number of workers, and ranges whose names do not show whether there are any.
    loads_itself = loading.single_process is not False if workers is None else workers == 0
    pace_ns = fetched_ns / workers if fetched_ns is not None and workers else None
    # Workers that do not set the pace would where the training were quicker than they are.
    unseen = replace(_NONE, batch_ns=pace_ns)
    if loads_itself or len(start) == 0:
        return unseen
    waited, started = end - start, first_of_workers(partial, start)
    # Share of the recorded time that its batches take the workers, where they timed them.
    taken = None if pace_ns is None else pace_ns * int(loading.batches.sum()) / _recorded_ns(partial)
    if taken is not None and taken >= _NO_SLACK:
        taking_at_most_ns = 0.0  # whatever taking one costs, workers that are always busy are what is waited for
    stalled = _stalled(partial, taking_at_most_ns)
    turns = _turns(stalled, waited, end, in_turn)
    busy = sure = _busy(stalled, waited, started, workers, turns, taking_at_most_ns)
    if taken is not None and not sure and stalled.any():
        # A host that is ahead of its device, or has just come back from a pause, may wait for workers that idle else.
        sure = True if taken >= _NO_SLACK else None if taken < _SLACK else sure
    if sure is None:
        return unseen
    hit = np.flatnonzero(stalled)
    sure = sure or (pace_ns is None and _hold_the_host(partial, waited, end[hit]))
    if not sure and pace_ns is None and waited.max() <= taking_at_most_ns:
        # The training thread takes a batch under Python's lock, for which the thread that pins memory competes. Workers
        # that set the pace would have to be as quick as the training, by chance, to be waited for so little.
        return replace(unseen, sure=False, longest_ns=int(waited.max()), share=float(stalled.mean()), slight=True)
    # Few of them do not show the workers' pace but with the pauses.
    paused = _after_pauses(partial, end, stalled) & (stalled.mean() >= _MOST_WAITED_FOR)
    batch_ns = _between_batches_ns(end, stalled, started, workers or turns or 1, paused)
    if pace_ns is not None:
        # Delivering takes time, too; and a recording may begin with batches that were ready before.
        batch_ns = max(pace_ns, batch_ns or 0.0) if busy else pace_ns
    idle = pace_ns is None and batch_ns is not None and _same_place(hit, loading.batches)
    if idle and batch_ns is not None:
        sure, batch_ns = False, _quickest_ns(hit, end[hit], batch_ns)
    seen, on_ns, stall_ns = _seen(partial, start[hit], end[hit])
    recorded_ns = _recorded_ns(partial) / len(end)
    if sure and pace_ns is None and not seen.any() and (batch_ns or 0.0) > _SUSTAINED * recorded_ns:
        # Were they so slow, devices would wait for them, too, and not only hosts that were ahead as this began.
        sure, turns = False, None
    if not sure and pace_ns is None and batch_ns is not None:
        batch_ns = min(batch_ns, _ready_by_ns(end, stalled, started))
    begun, launched = _under_work(partial, end[hit[~seen]])
    order = np.argsort(np.concatenate((on_ns, begun)), kind="stable")
    return Deliveries(
        on_ns=np.concatenate((on_ns, begun))[order],
        stall_ns=np.concatenate((stall_ns, np.zeros_like(begun)))[order],
        not_before_ns=np.concatenate((on_ns, launched))[order],
        sure=sure,
        batch_ns=batch_ns,
        longest_ns=int(waited[hit].max()),
        workers=workers or turns,
        idle=idle,
        share=float(stalled.mean()),
        timed=pace_ns is not None,
    )


def shown_in_turn(partials: Mapping[int, RankPartial], taking_at_most_ns: Mapping[int, float]) -> int | None:
    """How many workers each rank has, as the batches of all ranks show that wait for nearly every one of theirs."""
    delivered = []
    for rank, partial in partials.items():
        _, end = _in_steps(partial)
        if partial.loading.single_process is not False or len(end) < _SEVERAL:
            continue
        stalled = _stalled(partial, taking_at_most_ns[rank])
        if stalled.mean() >= _NEARLY_ALL:
            delivered.append(max(np.split(end, np.flatnonzero(~stalled) + 1), key=len))
    return workers_in_turn(delivered)


def _stalled(partial: RankPartial, taking_at_most_ns: float) -> Bool:
    """Which of a rank's batches it waited for, and not because workers began with them."""
    start, end = _in_steps(partial)
    every_ns = (end[-1] - end[0]) / (len(end) - 1) if len(end) > 1 else float(_recorded_ns(partial))
    waited = end - start
    long = (waited >= _STALL * every_ns) & (waited > _own_cost_ns(waited, taking_at_most_ns))
    return np.asarray(long & ~first_of_workers(partial, start), dtype=np.bool_)


def of_used_steps(found: Deliveries, partial: RankPartial, used: Int64) -> Deliveries:
    """``found`` of one rank, without waits that only suggest that workers set the pace where none of them is in the
    steps ``used``: a slow batch in a step that is left out, as with an evaluation, says nothing of the others.
    """
    if found.sure or len(found) == 0:
        return found
    steps = partial.steps.of_device_time(found.on_ns - 1)
    elsewhere = (steps >= 0) & ~np.isin(partial.steps.number[steps], used)
    return replace(_NONE, batch_ns=found.batch_ns if found.timed else None) if elsewhere.all() else found


def first_of_workers(partial: RankPartial, start_ns: Int64) -> Bool:
    """Which of the batches asked for at ``start_ns`` come first after loaders started, or stopped, their workers. The
    training waits for such a batch however quick they are: they begin as it asks.
    """
    first = np.zeros(len(start_ns) + 1, dtype=np.bool_)
    starting = partial.named_host.get(LOADER_STARTING)
    if starting is not None:
        first[np.searchsorted(start_ns, starting.start_ns)] = True
    return first[:-1]


def _after_pauses(partial: RankPartial, end_ns: Int64, stalled: Bool) -> Bool:
    """Batches that were there when the training took them after it had paused, in which workers idle: what they hold
    ready is all that they may.
    """
    step_ns = float(np.median(partial.steps.host_end_ns - partial.steps.host_start_ns))
    return np.concatenate(([False], np.diff(end_ns) > _PAUSED * step_ns)) & ~stalled


def _between_batches_ns(end_ns: Int64, stalled: Bool, started: Bool, workers: int, paused: Bool) -> float | None:
    """Mean time between batches of workers that are always busy: from the first to the last one that the training
    waited for, the times left out in which workers were started, and those around a pause of the training. None where
    that is no time.

    Several workers may deliver unevenly: where the training waited for batches that are whole rounds of ``workers``
    apart, only those that are farthest apart count.
    """
    took_ns, batches = 0.0, 0
    for run in np.split(np.arange(len(end_ns)), np.flatnonzero(started | paused)):
        waits = run[(stalled | started)[run]]
        if len(waits) > 1:
            first, last = _farthest(waits, workers)
            took_ns += float((end_ns[last] - end_ns[first]).mean())
            batches += int(last[0] - first[0])
    return took_ns / batches if batches else None


def _ready_by_ns(end_ns: Int64, stalled: Bool, started: Bool) -> float:
    """In what time workers delivered a batch at most: the last batches were there when they were taken, whether or not
    the training waited for them; of the longest stretch from one that it waited for to where workers start again.
    """
    longest, at_most_ns = 0, np.inf
    for run in np.split(np.arange(len(end_ns)), np.flatnonzero(started)):
        waits = run[(stalled | started)[run]]
        if len(waits) and run[-1] - waits[0] > longest:
            longest = int(run[-1] - waits[0])
            at_most_ns = float(end_ns[run[-1]] - end_ns[waits[0]]) / longest
    return at_most_ns


def _farthest(waits: Int64, workers: int) -> tuple[Int64, Int64]:
    """(the earlier, the later) of all pairs of these batches that are as many whole rounds of workers apart as any;
    the first and the last one where none are.
    """
    whole = int(waits[-1] - waits[0]) // workers * workers
    while whole:
        first = waits[np.isin(waits + whole, waits)]
        if len(first):
            return first, first + whole
        whole -= workers
    return waits[:1], waits[-1:]


def taking_ns(partial: RankPartial, at_most_ns: float = _OWN_COST_NS) -> float | None:
    """What taking a batch that is there costs a rank whose batches workers load: the median of the short times, of
    which none costs more than ``at_most_ns``. None where all may be waits.
    """
    begin, end = _in_steps(partial)
    waited = end - begin
    short = waited[waited <= _own_cost_ns(waited, at_most_ns)] if len(waited) else waited
    return float(np.median(short)) if len(short) else None


def _in_steps(partial: RankPartial) -> tuple[Int64, Int64]:
    """(begin, end) of ``__next__`` in the recorded steps."""
    loading, steps = partial.loading, partial.steps
    inside = (loading.start_ns >= steps.host_start_ns[0]) & (loading.start_ns < steps.host_end_ns[-1])
    return loading.start_ns[inside], loading.end_ns[inside]


def _recorded_ns(partial: RankPartial) -> int:
    return int(partial.steps.end_ns[-1] - partial.steps.start_ns[0])


def _busy(
    stalled: Bool,
    waited_ns: Int64,
    started: Bool,
    workers: int | None,
    turns: int | None,
    taking_at_most_ns: float = _OWN_COST_NS,
) -> bool | None:
    """Are the workers always busy? False: the batches for which the training waited only suggest it; None: no."""
    hit = np.flatnonzero(stalled)
    if len(hit) == 0:
        return None
    if workers is not None:
        return _share_of_rounds(stalled, started, workers)
    if turns is not None and turns > 1:
        return True
    if len(stalled) >= _SEVERAL and stalled.mean() >= _NEARLY_ALL:
        return bool(np.median(waited_ns[hit]) >= taking_at_most_ns)
    return None if np.diff(hit, prepend=-1, append=len(stalled)).max() > _MOST_WORKERS else False


def _hold_the_host(partial: RankPartial, waited_ns: Int64, end_ns: Int64) -> bool:
    """Are batches, for some of which a rank waits until ``end_ns``, all that keeps its host from running ahead further?

    Such a host waits for its device in no call, and no place in the device's queue, and still gets no further ahead of
    it than a step: at its own pace it would. Where it does get ahead, it takes batches sooner than the device needs
    them, and waits for workers that are quick enough.
    """
    steps, progress = partial.steps, partial.progress
    hit = distinct(steps.of_host_time(end_ns - 1))
    hit = hit[hit >= 0]
    if not partial.has_device_work or len(hit) < 2:
        return False
    host_ns = steps.host_end_ns - steps.host_start_ns
    if progress.host_busy_ns.sum() + waited_ns.sum() < _UNHELD * host_ns.sum():
        return False
    ahead = progress.behind_ns[hit]
    return bool(ahead.max() < host_ns.mean() and ahead[-1] - ahead[0] < _FURTHER * host_ns[hit[0] : hit[-1]].sum())


def _turns(stalled: Bool, waited_ns: Int64, end_ns: Int64, in_turn: int | None = None) -> int | None:
    """Every how many batches the training waits: workers that begin together deliver together, one batch each. None
    where it does not wait so regularly. Where batches take unequally long, only the long waits are regular. ``end_ns``
    are when the waits end: a lone worker delivers one batch after the other, not several at about the same time.
    Where it waits for nearly all of them, these are ``in_turn``, if that is known.
    """
    if len(stalled) < _SEVERAL:
        return None
    # Of a few long waits among others three may be regular by chance.
    for hit, least in ((np.flatnonzero(stalled), 3), (np.flatnonzero(waited_ns >= waited_ns.max() / 2), 4)):
        apart = np.diff(hit, prepend=-1, append=len(stalled))
        regular = len(hit) >= least and (apart[1:-1] == apart[1]).all() and apart[0] <= apart[1] >= apart[-1]
        if regular and 1 < apart[1] <= _MOST_WORKERS:
            return int(apart[1])
    if stalled.mean() < _NEARLY_ALL:
        return None
    delivered = np.diff(end_ns[stalled])
    return in_turn or (1 if delivered.min() >= _EVEN * delivered.mean() else None)


def _same_place(hit: Int64, batches: Int64) -> bool:
    """Does the training wait for the same batches of every step, and not for the others? Then a worker may idle while
    the rest of the step takes longer than its batches, and be too slow for those that follow one another.
    """
    per_step = int(batches.max())
    if per_step == 0:  # taken before the first step and after the last one only
        return False
    places, steps = np.unique(hit % per_step, return_counts=True)
    return 1 < per_step > len(places) and bool((steps >= len(batches) - 1).all())


def _quickest_ns(hit: Int64, end_ns: Int64, mean_ns: float) -> float:
    """Time between batches where the workers were quickest, so surely busy; the mean where that makes no sense because
    several workers deliver at once.
    """
    quickest = float(np.quantile(np.diff(end_ns) / np.diff(hit), 0.25))
    return quickest if quickest >= mean_ns / 2 else mean_ns


def _own_cost_ns(waited_ns: Int64, at_most_ns: float = _OWN_COST_NS) -> int:
    """What taking a batch costs that is there: the longest of the short times in ``__next__``, where those are clearly
    apart from the long ones, or all there are; 0 where they are not.
    """
    ascending = np.sort(waited_ns)
    if len(ascending) == 1:
        return int(ascending[0]) if ascending[0] <= min(_TAKEN_NS, at_most_ns) else 0
    times = ascending[1:] / np.maximum(ascending[:-1], 1)
    widest = int(times.argmax())
    apart = times[widest] >= _APART and ascending[widest] <= at_most_ns
    longest = at_most_ns if len(ascending) >= _SEVERAL else min(_TAKEN_NS, at_most_ns)
    if not apart and longest >= ascending[-1] <= _ALIKE * ascending[0]:
        return int(ascending[-1])
    return int(ascending[widest]) if apart else 0


def _share_of_rounds(stalled: Bool, started: Bool, workers: int) -> bool | None:
    rounds = len(stalled) // workers
    waits, starts = (np.any(each[: rounds * workers].reshape(rounds, workers), axis=1) for each in (stalled, started))
    # A round in which the workers start, and only their first batch is waited for, shows nothing of their pace.
    shown = waits[waits | ~starts]
    if len(shown) == 0:
        return None if starts.any() else False
    with_stall = shown.mean()
    return None if with_stall < _SOME else bool(with_stall >= _NEARLY_ALL and len(shown) > 1)


def _seen(partial: RankPartial, start_ns: Int64, end_ns: Int64) -> tuple[Bool, Int64, Int64]:
    """(which of these waits the rank's own progress shows as stalls, where those end, how long they are). A device that
    was behind its host notices the end of a wait only; as little as that, the batch came too late for it.
    """
    stalls = partial.progress.own.where(TimeCategory.DATALOADER)
    last = np.searchsorted(stalls.start_ns, end_ns, side="left") - 1
    some = (last >= 0) & (stalls.end_ns[last] > start_ns) if len(stalls) else np.zeros(len(end_ns), dtype=np.bool_)
    length = np.zeros(len(end_ns), dtype=np.int64)
    length[some] = (stalls.end_ns - stalls.start_ns)[last[some]]
    return some, stalls.end_ns[last[some]] if len(stalls) else length[:0], length[some]


def _under_work(partial: RankPartial, end_ns: Int64) -> tuple[Int64, Int64]:
    """Waits that end at ``end_ns`` and that the device does not notice, because the host runs ahead of it and the
    device still has work: (when the device begins their steps, when the host could launch them).

    A quicker device would catch up with the host there and wait. Example: a batch every 6 ms, steps of 7 ms on the
    device, so that the host launches step k at 6 k ms and the device begins it at 7 k: at its best it takes 6 ms.
    """
    steps, progress = partial.steps, partial.progress
    index = steps.of_host_time(end_ns - 1)
    index = distinct(index[index >= 0])
    launched = (steps.host_start_ns + progress.lead_ns)[index]
    begun, blocked = steps.start_ns[index], progress.blocked
    if len(blocked):  # what begins the step is then communication, and the rank's own work follows it
        within = np.maximum(np.searchsorted(blocked.start_ns, begun, side="right") - 1, 0)
        begun = np.where(blocked.covers(begun), blocked.end_ns[within], begun)
    hidden = (launched <= begun) & partial.has_device_work
    return begun[hidden], launched[hidden]
