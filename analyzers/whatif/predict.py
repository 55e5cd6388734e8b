"""Replays the recorded steps with settings changed: what a step would take, and how surely."""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import field, replace
from typing import Final
from weakref import WeakKeyDictionary

from perfscope.analyzers.job.cores import SharedCores, shared_cores
from perfscope.analyzers.job.unprofiled import LongStepShare
from perfscope.analyzers.replay.engine import replay
from perfscope.analyzers.replay.job_replay import JobReplay
from perfscope.analyzers.replay.step_time import TRUSTED, replay_error
from perfscope.analyzers.whatif import (
    by_hand,
    ddp,
    extra_work,
    fsdp,
    loader,
    microbatches,
    sharding,
    speed,
    threads,
)
from perfscope.analyzers.whatif.change import BadSetting, CannotReplay, Context, Setting, Uncertainty
from perfscope.analyzers.whatif.ranges import (
    ChangedStep,
    RankWork,
    by_cores,
    by_hosts,
    computed_ns,
    freed_ns,
    least_computed_ns,
    least_of_devices_ns,
    least_run_ns,
    on_shared_cores_ns,
    quicker_alone_ns,
    range_around,
    removed_ns,
    transfers_ns,
    unsure_shares,
    work_of_ranks,
)
from perfscope.analyzers.whatif.schedules.editable import EditableSchedules
from perfscope.analyzers.whatif.schedules.recorded import editable_schedules, waits_for_absent
from perfscope.analyzers.whatif.speed import WORK_OF_RANKS
from perfscope.errors import did_you_mean
from perfscope.frozen import dataclass
from perfscope.results.display import Displayed
from perfscope.results.findings import Prediction
from perfscope.trace.trace import Int64

SETTINGS: Final[tuple[Setting, ...]] = (
    *ddp.SETTINGS,
    *by_hand.SETTINGS,
    *extra_work.SETTINGS,
    *loader.SETTINGS,
    *microbatches.SETTINGS,
    *speed.SETTINGS,
    *sharding.SETTINGS,
    *fsdp.SETTINGS,
    *threads.SETTINGS,
)
"""Everything that can be changed."""

_UNDECIDED: Final = 0.10
"""Share of a prediction that an assumed latency may make of it, either way; above, there is none."""

_WORTH_SAYING: Final = 0.05
"""Share of a prediction that what the waits for loader workers leave open makes of it, from which that is said."""

_FEW_WAITS: Final = (
    "the recorded waits for loader workers do not show how fast these are: low and high hold that they set the pace, "
    "and that they do not; perfscope run records what a batch takes them"
)

_SENDING: Final = 1
"""Order of the settings of what is sent; those after it are of how fast."""

_FOR_NOTHING: Final = 1.03
"""What a step takes, at most, with a change that saves nothing: casts of gradients, copies into other buckets."""

_ROUNDED: Final = 1 + 1e-6
"""What saves just enough may be rounded either way."""

OPAQUE: Final = 0.5
"""Share of the devices' time in CUDA graphs without recorded kernels, from which a replay does not know the step."""
_OUTSIDE_GRAPHS: Final = ("dataloader.", "host.")
"""What settings of what hosts do beside their graphs begin with."""

_OF_RANK: Final = "rank."
"""What settings of one rank begin with."""
_OF_RANKS: Final = (_OF_RANK, WORK_OF_RANKS)
"""The same of those of some ranks beside others."""
_OF_LOADING: Final = ("dataloader.", _OF_RANK)
"""What those begin with that may end waits for batches."""
_OF_PAUSES: Final = ("host.pauses", "host.gc")
_WAITED_NS: Final[WeakKeyDictionary[Context, float]] = WeakKeyDictionary()
"""``_waits_in_any_case_ns``: every question about a job takes them."""


@dataclass(frozen=True, repr=False)
class WhatIfAnswer(Displayed):
    """Step times in ns: measured, replayed unchanged, predicted with the settings changed (low, mid, high). They are of
    steps without the profiler where the recording has timed some, and ``profiled_ns`` is then the recorded step; else
    they are of the recorded steps.

    ``error`` is the unchanged replay's, relative. Low and high allow for it, for what the models of the changes leave
    out, and for how far the mean of so few steps may be from that of all: twice its standard error. Where ranks that
    are not in the recording were waited for, they come as long after the others as they did, times what a change
    leaves of the work of all; for ``low`` never late.
    ``assumed`` lists what the recording does not hold and the prediction rests on; low and high allow for that too.
    """

    _shown_by = "whatif"

    settings: Mapping[str, str] = field(hash=False)
    measured_ns: float
    replayed_ns: float
    low_ns: float
    mid_ns: float
    high_ns: float
    error: float
    assumed: tuple[str, ...] = ()
    profiled_ns: float | None = None

    def __repr__(self) -> str:
        settings = " ".join(f"{name}={value}" for name, value in self.settings.items())[:200]
        predicted = f"{self.mid_ns / 1e6:.6g} ms ({self.low_ns / 1e6:.6g} to {self.high_ns / 1e6:.6g})"
        return f"<WhatIfAnswer {settings}: {predicted} instead of {self.measured_ns / 1e6:.6g} ms>"

    @property
    def predicted_us(self) -> Prediction:
        """The step time with the changes, in µs as in all results."""
        return Prediction(low=self.low_ns / 1e3, mid=self.mid_ns / 1e3, high=self.high_ns / 1e3)

    @property
    def saved(self) -> float:
        """Share of the measured step that ``mid_ns`` saves."""
        return 1 - self.mid_ns / self.measured_ns

    def where_step_takes(self, step_ns: float) -> tuple[float, float, float]:
        """Low, mid and high where the unchanged step, without the profiler, takes ``step_ns``.

        Predictions of unprofiled steps change in proportion. In the others the profiler has lengthened operators, but
        not sleeping and sending. So what a change saves is between what was predicted of the profiled step (none of it
        was lengthened) and the same share of the unprofiled one (all of it was). ``mid`` is half way, the range holds
        both.

        Example: 300 ms recorded, 180 predicted, 250 unprofiled: between 250 - 120 = 130 and 250 * 180 / 300 = 150.
        """
        predicted = (self.low_ns, self.mid_ns, self.high_ns)
        share = [ns * step_ns / self.measured_ns for ns in predicted]
        if self.profiled_ns is not None:
            return share[0], share[1], share[2]
        whole = [max(step_ns - (self.measured_ns - ns), 0.0) for ns in predicted]
        return min(share[0], whole[0]), (share[1] + whole[1]) / 2, max(share[2], whole[2])


def predict(context: Context, settings: Mapping[str, str], middle: ChangedStep | None = None) -> WhatIfAnswer:
    """One replay with all ``settings`` changed; several where it is not known what the profiler has slowed down, or how
    long something takes. ``middle`` is the first of them, where it was made before.

    Raises BadSetting for a name or value that is not understood, CannotReplay where the recording does not allow it.
    """
    beside = _for_settings(context, settings)
    _refuse_opaque(context, settings)
    context = beside
    answer = _predict(context, settings, middle)
    others = [_predict(each, settings) for each in context.with_other_costs]
    if not others:
        return answer
    every = [answer, *others]
    low, high = min(each.low_ns for each in every), max(each.high_ns for each in every)
    return replace(answer, low_ns=low, high_ns=high)


def _refuse_opaque(context: Context, settings: Mapping[str, str]) -> None:
    """Raise CannotReplay where a setting changes what happens in CUDA graphs that are recorded as one kernel each."""
    inside = [name for name in settings if name == "host.launch" or not name.startswith(_OUTSIDE_GRAPHS)]
    if inside and context.opaque_share > OPAQUE:
        raise CannotReplay(
            f"{inside[0]}: CUDA graphs take {context.opaque_share:.0%} of the devices' time, and what happens in them "
            "is not recorded; record with nsys profile --cuda-graph-trace=node"
        )


def _for_settings(context: Context, settings: Mapping[str, str]) -> Context:
    """With hosts beside their devices, where all settings allow that."""
    return context.beside_hosts if all(setting_named(name).with_hosts for name in settings) else context


def _predict(context: Context, settings: Mapping[str, str], middle: ChangedStep | None = None) -> WhatIfAnswer:
    """With one cost of the profiler. Raises as ``predict`` does."""
    measured = context.result.step_ns
    if not context.unchanged.complete:
        raise CannotReplay("the recorded steps cannot be replayed: collectives of different ranks do not fit together")
    steps = context.recorded.steps_ns(context.unchanged)
    replayed = float(steps.mean())
    error = replay_error(context.recorded, context.unchanged, measured)
    if error > TRUSTED:
        raise CannotReplay(
            f"the unchanged replay misses the measured step by {error:.0%}, so no prediction can be trusted; "
            "record all ranks, and more steps"
        )
    profiled = None
    if context.profiler is not None:
        profiled, measured = measured, context.unprofiled_ns or context.profiler.step_ns
        steps = context.recorded.steps_ns(context.replayed_unchanged)
        replayed *= measured / profiled
        if context.profiler.whole:
            replayed = float(steps.mean())
            error = max(error, abs(replayed / context.profiler.step_ns - 1))
    changed = middle or _replay_changed(context, settings, 0)
    changed = replace(changed, step_ns=changed.step_ns + _waits_in_any_case_ns(context, settings))
    of_ranks = any(name.startswith(_OF_RANK) for name in settings)
    needed, contended = (min(ns, measured) for ns in by_cores(context, settings, _paced(settings)))
    replayed_mid = max(changed.step_ns * context.correction, needed)
    mid = max(replayed_mid, on_shared_cores_ns(context, measured, changed))
    (fall, share), least_ns = unsure_shares(context, changed, steps, error, of_ranks=of_ranks)
    low, high = range_around(measured, mid, (fall, share), changed.sure)
    low -= mid - replayed_mid  # other programs may leave the job more of the cores
    of_host_work = any(setting_named(name).of_host_work for name in settings)
    least, most = by_hosts(context, measured, mid, of_host_work=of_host_work)
    low, high = min(low, least * (1 - fall)), max(high, most) + context.result.longest_step_ns - context.result.step_ns
    assumed = changed.assumed
    if changed.unsure:
        ends = [_replay_changed(context, settings, leaning).step_ns * context.correction for leaning in (-1, 1)]
        if changed.of_loading and max(abs(end - mid) for end in ends) > _WORTH_SAYING * mid:
            assumed += (_FEW_WAITS,)
        low, high = min(low, max(low - max(mid - min(ends), 0.0), least_ns)), high + max(max(ends) - mid, 0.0)
        _refuse_undecided(changed, mid, ends, (low, high))
    high = max(high, changed.longest_pace_ns * context.correction, contended)
    if _may_be_waiting(context, settings):
        high = max(high, measured * _FOR_NOTHING)
    freed = min(changed.freed_ns * context.correction, mid)
    low, mid = low - freed - changed.alone_ns * context.correction, mid - freed / 2
    unsure = fall if context.on_devices else error  # on CPUs it allows for how unlike the recorded steps are
    busy_ns = max(changed.busy_ns * context.correction * (1 - unsure), needed * (1 - fall))
    low = max(low, min(busy_ns, mid), 0.0)
    if profiled is not None and context.long_step_share is not None:
        times, measured = _as_often(context.long_step_share, changed.steps_ns, mid), _whole(context.long_step_share)
        low, mid, high = times * low, times * mid, times * high
    return WhatIfAnswer(settings, measured, replayed, low, mid, high, error, assumed, profiled)


def _may_be_waiting(context: Context, settings: Mapping[str, str]) -> bool:
    """Are these settings about what is sent, where what seems transfer may be waiting for ranks that are not recorded?
    Then they may save nothing.
    """
    about_transfers = all(setting_named(name).order >= _SENDING for name in settings)
    return about_transfers and waits_for_absent(context.result, context.recorded)


def _may_end_waits(context: Context, name: str) -> bool:
    """May this setting end waits for loader workers? Without pauses, in which these idle, they wait no longer, unless
    it is for workers that start.
    """
    if name in _OF_PAUSES:
        return not any(loader.starting_steps(context, rank) for rank in context.result.partials)
    return name.startswith(_OF_LOADING)


def _waits_in_any_case_ns(context: Context, settings: Mapping[str, str]) -> float:
    """Waits for loader workers, per step, that replays leave out though nothing changes: they take workers to deliver
    at their pace, and the recorded steps waited for more than that, as where an epoch begins. Settings that are about
    loading, or about a rank that may load slowly, end them; others do not.
    """
    if any(_may_end_waits(context, name) for name in settings):
        return 0.0
    if context not in _WAITED_NS:
        held = any(len(found) for found in context.recorded.deliveries.values())
        left_ns = _replay_changed(context, {}, 0).step_ns if held else math.inf
        _WAITED_NS[context] = max(context.recorded.step_time_ns(context.replayed_unchanged) - left_ns, 0.0)
    return _WAITED_NS[context]


def _paced(settings: Iterable[str]) -> tuple[int, ...]:
    """The ranks that are to take their peers' pace."""
    ranks = (name.removeprefix(_OF_RANK) for name in settings if name.startswith(_OF_RANK))
    return tuple(sorted(int(rank) for rank in ranks if rank.isdecimal()))


def _whole(long: LongStepShare) -> float:
    """The mean unprofiled step."""
    return long.step_ns + (long.share - float(long.recorded.mean())) * long.longer_ns


def _as_often(long: LongStepShare, steps_ns: Int64, mid_ns: float) -> float:
    """What a prediction (``mid_ns``) of as many long steps as were recorded is to be multiplied by for as many as there
    are, where the recorded steps take ``steps_ns`` with the change. Where none was recorded, the change leaves what
    they take longer as it is.

    Example: 1 of 8 recorded steps saves a checkpoint, and 1 of 20 of the others. With a change these 8 take 40 ms, and
    7 of them 20: the mean of 22.5 is predicted, and 21 come of it.
    """
    mean = max(float(steps_ns.mean()), 1.0)
    if not long.recorded.any():
        return 1 + long.share * long.longer_ns / max(mid_ns, 1.0)
    short, longer = float(steps_ns[~long.recorded].mean()), float(steps_ns[long.recorded].mean())
    return (short + long.share * (longer - short)) / mean


def _refuse_undecided(changed: ChangedStep, mid: float, ends: list[float], bounds: tuple[float, float]) -> None:
    """Raise CannotReplay where the prediction is little but what was assumed of latencies; with the ``bounds`` that it
    would have had, which allow for all else that is not sure as well.
    """
    of_latency = ends[:1] if changed.unheld else ends[1:] if changed.doubtful else ends  # the other end holds the doubt
    if changed.assumed and max(abs(end - mid) for end in of_latency) > _UNDECIDED * mid:
        least, most = (ns / 1e6 for ns in bounds)
        raise CannotReplay(
            f"{'; '.join(changed.assumed)}: the step may take anything from {least:.2f} to {most:.2f} ms. Record steps "
            "that also send another size, such as a loss averaged across ranks"
        )


def _replay_changed(context: Context, settings: Mapping[str, str], leaning: int) -> ChangedStep:
    """Edit the recorded schedules and replay them; ``leaning`` as in ``Context``. Raises as ``predict`` does."""
    schedules = editable_schedules(context.result, context.recorded, with_hosts=context.with_hosts)
    unheld: frozenset[int] = frozenset()
    if leaning <= 0:
        unheld = schedules.free_hidden_loading(context.result.step_ns)
    else:
        schedules.hold_by_hidden_loading(context.result.step_ns)
    loader.keep_workers_pace(schedules, context)
    if context.profiler is not None:
        context.profiler.remove_from(schedules, context.result)
    of_loading = schedules.has_doubtful_loading
    doubtful = of_loading or waits_for_absent(context.result, context.recorded)
    if leaning < 0:
        schedules.free_loading(schedules.ops.keys() - unheld, doubtful=True)
    loader.keep_unprofiled_pace(schedules, context)
    paced = _paced(settings)
    asked = sorted(((setting_named(name), name, value) for name, value in settings.items()), key=lambda a: a[0].order)
    follows = context.longer_with_absent if leaning == 0 else None
    # Whether others keep up with a rank at its peers' pace is not known.
    if leaning < 0 or follows is not None or not paced:
        # What is sent, and how fast, does not change when they come.
        at_once = leaning < 0 and bool(asked) and asked[0][0].order <= 0
        schedules.free_of_absent(never_late=follows is not None or at_once)
    elif leaning == 0:
        schedules.free_of_few_absent()
    even = WORK_OF_RANKS in settings
    slower = speed.slow_devices(context) if even else None
    question = context.for_question(schedules, tuple(schedules.ops) if even else paced, leaning, slower=slower)
    paced_by_workers = frozenset(schedules.loading_step_ns)
    sent, computed, work = transfers_ns(schedules), {}, {}
    if not context.on_devices:
        computed, work = computed_ns(schedules), work_of_ranks(schedules)
    applied = _apply(schedules, question, [each for each in asked if each[0].order <= _SENDING])
    left = transfers_ns(schedules)
    freed = freed_ns(context, sent, left)
    removed = {} if context.on_devices else removed_ns(context, (sent, work), (left, work_of_ranks(schedules)))
    applied += _apply(schedules, question, [each for each in asked if each[0].order > _SENDING])
    applied.append(speed.keep_copies(schedules, question, settings))
    longer_ns, shorter_ns = loader.of_turns_ns(context, schedules.loading_step_ns)
    sure = Uncertainty.worst([*applied, Uncertainty(0.0, 0.0, slower_ns=longer_ns)])
    schedules.lift_holds()
    replayed = replay(schedules.compiled())
    if not replayed.complete:
        raise CannotReplay(
            "with these settings the ranks would wait for each other forever: this is a defect, report it"
        )
    predicted = schedules.step_ns(replayed, context.replayed_unchanged) * (follows or 1.0) * schedules.longer
    steps_ns = context.recorded.steps_ns(replayed)
    if leaning:
        least = 0.0
    elif context.on_devices:
        least = least_of_devices_ns(schedules, context, sure)
    else:
        hidden = (loader.hidden_waits_ns(context, rank) for rank in paced_by_workers - schedules.loading_step_ns.keys())
        least = _least_on_cpus_ns(schedules, context, settings, (computed, work), max([freed, *hidden]))
    return ChangedStep(
        predicted,
        least,
        freed,
        0.0 if leaning else quicker_alone_ns(context, sent, transfers_ns(schedules)),
        steps_ns,
        shorter_ns,
        loader.longest_pace_ns(schedules, context),
        schedules.settling,
        sure,
        bool(question.unsure) or doubtful,
        doubtful,
        of_loading,
        bool(unheld),
        question.assumptions(),
        removed,
    )


def _apply(
    schedules: EditableSchedules, context: Context, asked: Sequence[tuple[Setting, str, str]]
) -> list[Uncertainty]:
    """Change the schedules by these settings (with name and value), one after the other; how sure each is. Ranks that
    are not in the recording change with the others where a setting says how long all work themselves.
    """
    applied, absent = [], waits_for_absent(context.result, context.recorded)
    for setting, name, value in asked:
        of_all = absent and setting.order < _SENDING and not name.startswith(_OF_RANKS)
        before_ns = schedules.work_ns() if of_all else 0.0
        applied.append(setting.apply(schedules, context, name, value))
        if before_ns:
            schedules.change_absent(schedules.work_ns() / before_ns, context.leaning)
    return applied


def _least_on_cpus_ns(
    schedules: EditableSchedules, context: Context, settings: Collection[str],
    recorded: tuple[Mapping[int, float], Mapping[int, RankWork]], freed: float,
) -> float:  # fmt: skip
    """What a rank computes, or its thread runs, in a step with these schedules at least; ``recorded``: what ranks
    compute, and their work, in the recorded steps; ``freed``: what they may wait less for cores.
    """
    if threads.NAME in settings:
        return threads.least_ns(schedules)
    least = least_computed_ns(recorded[0], computed_ns(schedules), context, freed)
    return max(least, least_run_ns(recorded[1], work_of_ranks(schedules), context))


class Predictor:
    """``predict`` for the rules, which do without an answer where there is none."""

    def __init__(self, context: Context, measured_ns: float | None = None) -> None:
        """``measured_ns``: what the unchanged step takes, for which predictions are to be; None: as in ``context``."""
        self._context = context
        step_ns = context.unprofiled_ns or context.result.step_ns
        self._times = 1.0 if measured_ns is None else measured_ns / step_ns
        self._step_ns = step_ns
        # Rules, the joint plan and the curves ask for the same more than once.
        self._known: dict[tuple[tuple[str, str], ...], Prediction | None] = {}
        self._middle: dict[tuple[tuple[str, str], ...], ChangedStep] = {}

    def __call__(self, settings: Mapping[str, str]) -> Prediction | None:
        """The step with settings changed; None where that cannot be replayed."""
        key = tuple(sorted(settings.items()))
        if key not in self._known:
            try:
                answer = predict(self._context, settings, self._middle.pop(key, None))
                # A step of a few launches and next to no work would take no time: that says nothing.
                self._known[key] = answer.predicted_us.times(self._times) if answer.mid_ns >= 1 else None
            except CannotReplay:
                self._known[key] = None
        return self._known[key]

    def may_save(self, settings: Mapping[str, str], share: float) -> bool:
        """Whether the prediction may save this share of the step, by one of the replays that it would take. True where
        nothing can be replayed: that is for the prediction to say.
        """
        key = tuple(sorted(settings.items()))
        context = _for_settings(self._context, settings)
        if context.with_other_costs or key in self._known:
            return True
        try:
            changed = self._middle[key] = _replay_changed(context, settings, 0)
        except CannotReplay:
            self._known[key] = None
            return True
        mid_ns = changed.step_ns * context.correction
        mid_ns -= min(changed.freed_ns * context.correction, mid_ns) / 2
        return mid_ns <= (1 - share) * self._step_ns * _ROUNDED


def predictor(job: JobReplay, *, unprofiled: bool = False) -> Predictor | None:
    """None where nothing can be replayed.

    The recorded step is predicted, which is what rules measure; ``unprofiled``: the one without the profiler, and None
    where that is not known. Where loader workers set the pace of unprofiled steps and the recorded ones do not show it,
    the recorded step changes as an unprofiled one does.
    """
    if not job.replayed.complete or (unprofiled and job.unprofiled_ns is None):
        return None
    if unprofiled or job.ready_ns is not None:
        return Predictor(unprofiled_context(job), None if unprofiled else job.result.step_ns)
    return Predictor(Context(job.result, job.recorded, job.models, job.runs, shared_cores=_shared_cores(job)))


def unprofiled_context(job: JobReplay) -> Context:
    """For questions about the step without the profiler, where that is known, else about the recorded one."""
    unprofiled_ns, long = job.unprofiled_ns, None if job.ready_ns is not None else job.long_step_share
    if unprofiled_ns is None or long is None:
        long = None
    else:
        unprofiled_ns = long.step_ns
    return Context(
        job.result, job.recorded, job.models, job.runs, unprofiled_ns=unprofiled_ns, ready_ns=job.ready_ns,
        long_step_share=long, shared_cores=_shared_cores(job),
    )  # fmt: skip


def _shared_cores(job: JobReplay) -> tuple[SharedCores, ...]:
    """Of jobs on CPUs."""
    on_devices = any(partial.has_device_work for partial in job.result.partials.values())
    return () if on_devices else shared_cores(job.system, job.runs)


def setting_named(name: str) -> Setting:
    """The setting of that name. Raises BadSetting, listing what there is."""
    for setting in SETTINGS:
        if fnmatch.fnmatchcase(name, setting.name):
            return setting
    names = [setting.name for setting in SETTINGS]
    raise BadSetting(f"{name}: no such setting{did_you_mean(name, names)}; choose from {', '.join(names)}")
