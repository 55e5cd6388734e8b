"""What rules look at: the summary so far, and what the recording holds beyond it."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import field
from functools import cached_property
from statistics import median
from typing import Any, Final

from perfscope.analyzers.job.extra_work import ExtraCost, LoopCost, LoopWorkCost
from perfscope.analyzers.job.rank_steps import RankSteps
from perfscope.analyzers.job.slow_operators import SlowOperator
from perfscope.analyzers.job.strategies import fsdp_by_ranges
from perfscope.analyzers.job.tables.syncs import SyncRow
from perfscope.analyzers.whatif.curves import uses_torch_ddp
from perfscope.frozen import dataclass
from perfscope.recording.metadata import DataLoaderMetadata, RunMetadata
from perfscope.results.findings import Action, Confidence, Evidence, Finding, Obtained, Predict, Prediction, Severity
from perfscope.results.rows import CollectiveRow, JobInfo
from perfscope.results.summary import Summary
from perfscope.results.tables import OperatorRow
from perfscope.results.time_breakdown import shares
from perfscope.text import byte_size

_NVIDIA: Final = re.compile(r"NVIDIA|Tesla|GeForce|Quadro|TITAN|GRID")
_AMD: Final = re.compile(r"AMD|Instinct|Radeon")
"""Makers in the names of devices, as drivers write them."""

_CLOCKS: Final = "nvidia-smi -q -d PERFORMANCE,CLOCK,POWER"
_CLOCKS_OF_AMD: Final = "amd-smi metric --clock --power --temperature; rocm-smi --showclocks --showpower --showtemp"
_LINKS: Final = "nvidia-smi topo -m"
_LINKS_OF_AMD: Final = "amd-smi topology or rocm-smi --showtopo"
"""Commands that show clocks and what holds them down, and how devices are connected."""

SAME_SHARE: Final = 0.02
"""Shares of the step that differ by less are the same to a reader."""

SPARE: Final = 1.1
"""Memory that must be free, over what a change takes: the allocator needs some too."""

OF_BOUND: Final = 0.5
"""Part of a bound that counts where findings are ordered: nothing reaches its bound, so one must not come before a
prediction of nearly as much."""

TORCH: Final = "torch"
"""Plain torch, and whatever is not known."""

_FRAMEWORKS: Final = ("megatron", "transformers", "lightning", "accelerate", "deepspeed")
"""Keys of ``RunMetadata.settings``, the framework whose arguments the user types first: Transformers drives Accelerate,
which drives DeepSpeed."""


def known(what: str, value: float | None, unit: str = "", ranks: tuple[int, ...] = ()) -> tuple[Evidence, ...]:
    """The evidence where its value is known, else none."""
    return () if value is None else (Evidence(what, value, unit, ranks),)


@dataclass(frozen=True, kw_only=True)
class RuleContext:
    """One job as a rule sees it. Times are µs per step, as in the summary."""

    summary: Summary
    """Without what follows from the rules: findings, plan, curves and verdict."""
    runs: Mapping[int, RunMetadata]
    """What the ranks wrote beside their traces; empty for traces of other tools."""
    per_step: Mapping[int, RankSteps] = field(default_factory=dict)
    """Every rank's used steps one by one, in the order of the job's."""
    core_us: Mapping[int, tuple[float, ...]] = field(default_factory=dict)
    """Rank -> for how long its training thread waited for a core in each used step; empty unless all recorded that."""
    slept_us: Mapping[int, float] = field(default_factory=dict)
    """Rank -> for how long its training thread slept per step outside communication and loading, at least; without
    those of which that is not known."""
    slow_operators: Mapping[int, SlowOperator] = field(default_factory=dict)
    """Straggler that computes longer than its peers -> the operator in which it does."""
    syncs: tuple[SyncRow, ...] = ()
    """Blocking calls after which devices were idle, the costliest first."""
    collectives_on_host: bool = False
    """Collectives are carried out by threads of the host, as gloo's, also those of tensors on devices."""
    microbatches: int = 1
    """Forward passes of DistributedDataParallel per step; 1 also where that is not recorded."""
    recomputation: ExtraCost | None = None
    """Activations that are computed again in the backward; None where that is not seen."""
    conversions: ExtraCost | None = None
    """Tensors whose channels are written last for a convolution, and first again; None where that is not seen."""
    loops: tuple[LoopCost, ...] = ()
    """Loops over many tensors outside the model, the costliest first."""
    loop_work: tuple[LoopWorkCost, ...] = ()
    """What the training loop computes beside the training, by its part, the costliest first."""
    loop_collectives: Mapping[str, float] = field(default_factory=dict)
    """Small collectives per step that the training loop calls for itself, by kind."""
    loop_places: tuple[str, ...] = ()
    """When it calls them, as in ``job.collectives.of_loop``."""
    slow_transfers: Mapping[int, float] = field(default_factory=dict)
    """Number of each used step whose transfers are slow -> how many times as long they take as in most steps."""
    averaged: float = 0.0
    """Larger all-reduces per step there: of parameters, which the loop averages, and not of gradients."""
    reduced_in_backward: float = 0.0
    """All-reduces of gradients per step that autograd issues while the backward goes on."""
    returned: float = 0.0
    """Gradients per step that are reduced to one rank, and broadcast back before the optimizer's step."""
    of_layers: frozenset[tuple[str, str, str | None, int | None]] = frozenset()
    """Group, kind, type and size of the summary's collectives that layers compute with."""
    balanced_step_us: Prediction | None = None
    """The step with the pipeline's work spread evenly over its stages, replayed; None where it is even already."""
    predict: Predict | None = None
    """Replays the recorded steps with settings changed; None where they cannot be replayed."""
    may_save: Callable[[Mapping[str, str], float], bool] | None = None
    """Whether settings changed may save a share of the step: in less time than ``predict`` says how much. True where
    nothing can be replayed."""
    predict_unprofiled: Predict | None = None
    """The same for steps without the profiler; None where no such step was timed."""

    outpaced: bool = False
    """Do loader workers set the pace of unprofiled steps, while the recorded ones had batches ready? ``predict`` then
    changes the recorded step as an unprofiled one, waits included.
    """

    def without_profiler(self, predicted: Prediction, settings: Mapping[str, str]) -> tuple[Prediction, bool]:
        """(what ``predicted``, of the recorded step with these settings, is without the profiler, was that replayed).
        The recorded one itself where no other step was timed.
        """
        if self.info.unprofiled_step_us is None:
            return predicted, True
        replayed = self.predict_unprofiled(settings) if settings and self.predict_unprofiled is not None else None
        if replayed is not None:
            return replayed, True
        return predicted.times(self.info.step_us / self.step_time_us), False

    @property
    def info(self) -> JobInfo:
        """What was run and how long its steps took."""
        return self.summary.job

    @property
    def step_time_us(self) -> float:
        """Mean step time of the job."""
        return self.summary.job.step_time_us

    @property
    def steps(self) -> int:
        """Used steps; 0 when nothing marks steps."""
        return len(self.summary.job.steps)

    @property
    def ranks(self) -> tuple[int, ...]:
        """Ranks in the recording."""
        return self.summary.job.ranks

    @property
    def run(self) -> RunMetadata | None:
        """What the lowest rank wrote about its run; None for traces of other tools."""
        return self.runs[min(self.runs)] if self.runs else None

    @property
    def loader(self) -> DataLoaderMetadata | None:
        """The data loader that rank takes its batches from; None where none is recorded."""
        return self.run.dataloaders[0] if self.run and self.run.dataloaders else None

    @property
    def on_devices(self) -> bool:
        """Does the job train on accelerators? Ranks without device work are listed as ``CPU``."""
        return "CPU" not in self.info.devices

    @property
    def graphs(self) -> str | None:
        """What torch's CUDA graphs are called on the job's devices; None where there are none, or none are known.

        Only NVIDIA's and AMD's devices (HIP graphs) have them under ``torch.compile``.
        """
        devices = self.info.devices
        if not devices:
            return "CUDA graphs" if "nccl" in (self.info.backend or "") else None
        if self.on_amd:
            return "HIP graphs"
        return "CUDA graphs" if all(_NVIDIA.search(name) for name in devices) else None

    @property
    def on_amd(self) -> bool:
        """Are all devices AMD's? Their tools have other names."""
        return bool(self.info.devices) and all(_AMD.search(name) for name in self.info.devices)

    @property
    def device_commands(self) -> dict[str, str]:
        """What to type to see ``clocks`` and ``links`` of the job's devices, for advice to be formatted with."""
        if self.on_amd:
            return {"clocks": _CLOCKS_OF_AMD, "links": _LINKS_OF_AMD}
        return {"clocks": _CLOCKS, "links": _LINKS}

    @property
    def torch_ddp(self) -> bool:
        """Is torch's DistributedDataParallel at work, and not a framework's own?"""
        return uses_torch_ddp(self.info, self.runs)

    def is_of_layers(self, row: CollectiveRow) -> bool:
        """Do layers compute with these collectives, which then are none of gradients?"""
        return (row.group, row.kind, row.dtype, row.bytes) in self.of_layers

    @property
    def reduced_by_unknown(self) -> bool:
        """Do traces of another tool show that gradients are all-reduced, and not by what: torch's
        DistributedDataParallel, or the user's own code?
        """
        return not self.runs and self.info.strategies == ("data",) and not self.averaged

    @property
    def framework(self) -> str:
        """The framework that the user writes settings for: ``megatron``, ``transformers``, ``lightning``, ``fabric``
        (Lightning's, whose loop is the user's own), ``accelerate``, ``deepspeed`` or ``torch``.
        """
        found = next((name for name in _FRAMEWORKS if self.settings(name)), TORCH)
        return "fabric" if found == "lightning" and self.settings(found).get("fabric") else found

    def settings(self, subject: str) -> dict[str, Any]:
        """Recorded settings of one subject, of the lowest rank that has any; empty without."""
        return next((run.settings[subject] for _, run in sorted(self.runs.items()) if run.settings.get(subject)), {})

    @property
    def fsdp_version(self) -> int | None:
        """Of the FSDP in use: as it was recorded, else by the ranges that it writes; None where neither tells."""
        recorded: int | None = self.settings("fsdp").get("version")
        return recorded or fsdp_by_ranges(row.name for row in self.summary.modules)

    @property
    def deepspeed_config(self) -> dict[str, Any]:
        """The DeepSpeed JSON in use; empty without DeepSpeed."""
        return self.settings("deepspeed").get("config") or {}

    @cached_property
    def environment(self) -> dict[str, dict[str, tuple[int, ...]]]:
        """Recorded variables: name -> value -> ranks that have it."""
        variables: dict[str, dict[str, tuple[int, ...]]] = {}
        for rank, run in sorted(self.runs.items()):
            for name, value in run.environment.items():
                ranks = variables.setdefault(name, {})
                ranks[value] = (*ranks.get(value, ()), rank)
        return variables

    @property
    def free_bytes(self) -> int | None:
        """Device memory that is free on the fullest rank at its fullest; None where that is not known of all ranks."""
        free = [
            row.headroom_bytes for row in self.summary.memory if row.kind == "device" and row.headroom_bytes is not None
        ]
        return min(free) if free and len(free) == len(self.ranks) else None

    def lacks_memory(self, takes: float | None) -> bool:
        """Is it known that so many more bytes per rank do not fit? So it is where they are not known (None), and what
        is free is.
        """
        return self.free_bytes is not None and (takes is None or self.free_bytes < SPARE * takes)

    @property
    def free_in_words(self) -> str:
        """``free_bytes`` in words, behind what a change takes."""
        free = self.free_bytes
        return f"{byte_size(free)} are free on the fullest rank" if free is not None else "check that they are free"

    def free_memory(self) -> tuple[Evidence, ...]:
        """``free_bytes`` as evidence; none where it is not known."""
        return known("memory free on the fullest rank", self.free_bytes, "bytes")

    def typical_us(self, category: str) -> float:
        """A category's time, median over the ranks: what one rank alone has is a straggler's."""
        rows = self.summary.time_breakdown
        return median(row.categories()[category] for row in rows) if rows else 0.0

    def operator_us(self, row: OperatorRow) -> float:
        """What an operator takes per rank and step: its device's work, or on CPUs what it does itself."""
        return row.device_us_per_step if self.on_devices else row.host_us_per_step

    @property
    def exposed_transfer_us(self) -> float:
        """Exposed transfer per step, median over the ranks."""
        return self.typical_us("exposed_comm_transfer")

    @property
    def hidden_share(self) -> float:
        """Share of all ranks' communication that compute overlaps, or of their compute where that is less: more cannot
        be overlapped. 0 without any.
        """
        rows = self.summary.time_breakdown
        most = min(sum(row.comm_us for row in rows), sum(row.compute_us for row in rows))
        return sum(row.hidden_comm_us for row in rows) / most if most else 0.0

    @property
    def exposed_share(self) -> float:
        """``exposed_transfer_us`` as a share of the step."""
        return self.share(self.exposed_transfer_us)

    def exposed_of_us(self, transfer_us: float) -> float:
        """How much exposed transfer per step there is at most of collectives that take so long: the rest is of others,
        as of tensor parallelism beside gradients.
        """
        return min(self.exposed_transfer_us, transfer_us)

    def exposed_transfer(self) -> Evidence:
        """``exposed_transfer_us`` as evidence."""
        return Evidence("exposed transfer per step (median)", self.exposed_transfer_us, "us", self.ranks)

    def median_note(self, category: str) -> str:
        """What to add to a share that is the median over the ranks, where it is not about the mean that the time
        breakdown shows.
        """
        mean = shares(self.summary.time_breakdown)[category]
        far = abs(self.share(self.typical_us(category)) - mean) >= SAME_SHARE
        return f" on the median rank ({mean:.0%} on the mean of all)" if far else ""

    def share(self, us: float) -> float:
        """A time as a share of the step."""
        return us / self.step_time_us

    def ceiling(self, recoverable_us: float) -> float:
        """T/(T-R) - 1: the speedup that recovering R of a step T cannot exceed (0.25: at most 1.25x faster)."""
        step = self.step_time_us
        return step / (step - recoverable_us) - 1 if recoverable_us < step else float("inf")

    def finding(
        self,
        rule: str,
        title: str,
        recoverable_us: float,
        *,
        evidence: tuple[Evidence, ...],
        action: Action,
        confidence: Confidence,
        predicted: Prediction | None = None,
        whatif: Mapping[str, str] | None = None,
        severity_us: float | None = None,
    ) -> Finding:
        """A finding that can recover so much of the step at most: replayed where that is predicted, else bounded.

        Its severity is that of ``severity_us`` where given.
        """
        return Finding(
            rule=rule,
            title=title,
            severity=Severity.of_share(self.share(recoverable_us if severity_us is None else severity_us)),
            evidence=evidence,
            action=action,
            predicted_step_us=predicted,
            ceiling=self.ceiling(recoverable_us),
            obtained=Obtained.BOUNDED if predicted is None else Obtained.REPLAYED,
            confidence=confidence,
            whatif=dict(whatif or {}),
        )

    def confidence(self, most: Confidence = Confidence.MEDIUM) -> Confidence:
        """``most``, or low on few steps or where ranks are missing."""
        return Confidence.LOW if self.info.few_steps or self.info.missing_ranks else most

    def could_save(self, change: Mapping[str, str], share: float) -> bool:
        """Whether a change, where it can be predicted, may save this share of the step."""
        return self.may_save is None or self.may_save(change, share)

    def replayed(self, change: Mapping[str, str], least_share: float) -> tuple[Prediction, float] | None:
        """The prediction for a change and the µs of a step that it saves; None where that cannot be replayed, or saves
        less than ``least_share`` of the step.
        """
        prediction = self.predict(change) if self.predict is not None and self.could_save(change, least_share) else None
        if prediction is None:
            return None
        saved_us = self.step_time_us - prediction.mid
        return (prediction, saved_us) if saved_us >= least_share * self.step_time_us else None
