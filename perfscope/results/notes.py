"""Notes: what the reader must know to judge the numbers, as a kind with values; each kind's sentence stands here."""

from __future__ import annotations

import string
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import field
from typing import Annotated, Any, Final

from perfscope.frozen import dataclass
from perfscope.grouping import grouped
from perfscope.text import plural, rank_list, ranks_in_words

_BY_COLLECTIVES: Final = (
    "Averaging parameters every so many steps (local SGD), or gathering metrics, does that: many small collectives one "
    "after the other take longer than one of all tensors."
)

SENTENCES: Final[Mapping[str, str]] = {
    "no_steps": "No steps were found ({steps_from}): the whole recording is analyzed as one window, and advice "
    "that needs steps is withheld. Record with perfscope run, call prof.step() under a torch.profiler schedule, or put "
    "a range around each step that is called step and its number (NVTX under Nsight Systems, record_function).",
    "advice_failed": "{what} is missing, by a defect of PerfScope ({error}); everything else holds. Please report it.",
    "few_steps": "Only {count:step} recorded: confidence is low. Record more with perfscope run --active 8.",
    "lone_step_waits": "Before the first kernel of the only recorded step the host of {ranks:ranks} waited for a "
    "batch, for {share:.0%} of the step. That counts as hidden behind the step before, which is not recorded; if it "
    "was not, the step took that much longer. A recording of more steps shows which.",
    "first_step_waits": "Before the first kernel of the first recorded step the host of {ranks:ranks} waited for a "
    "batch, for {share:.0%} of a step, far longer than in the other steps. That counts as hidden behind the step "
    "before, which is not recorded. If data loader workers are slower than the training, later steps wait, too, once "
    "the batches in their queue are used up. A recording of more steps shows it.",
    "stacks": "Python functions were recorded (with_stack=True, perfscope run --stacks), which makes Python code and "
    "nothing else slower: host time, loading in the training process and loops over many tensors seem to take more of "
    "the step than they do. Record without stacks for times, with them for names.",
    "long_step": "Step {steps:list} takes {times:.1f} times as long as the others: {share:.0%} of the recorded time, "
    "most of it {category}. Evaluating, saving a checkpoint, compiling or collecting samples in a step does that.",
    "long_steps": "Steps {steps:list} take {times:.1f} times as long as the others: {share:.0%} of the recorded time, "
    "most of it {category}. Evaluating, saving a checkpoint, compiling or collecting samples in a step does that.",
    "long_step_of_communication": "Step {steps:list} takes {times:.1f} times as long as the others: {share:.0%} of the "
    "recorded time, most of it {category}. " + _BY_COLLECTIVES,
    "long_steps_of_communication": "Steps {steps:list} take {times:.1f} times as long as the others: {share:.0%} of "
    "the recorded time, most of it {category}. " + _BY_COLLECTIVES,
    "long_step_of_loading": "Step {steps:list} takes {times:.1f} times as long as the others: {share:.0%} of the "
    "recorded time, most of it in waiting for a batch that took longer to load.",
    "long_steps_of_loading": "Steps {steps:list} take {times:.1f} times as long as the others: {share:.0%} of the "
    "recorded time, most of it in waiting for batches that took longer to load.",
    "long_step_of_more_work": "Step {steps:list} takes {times:.1f} times as long as the others, and has {work:.1f} "
    "times their FLOPs: longer sequences, more micro-batches, or an evaluation.",
    "long_steps_of_more_work": "Steps {steps:list} take {times:.1f} times as long as the others, and have {work:.1f} "
    "times their FLOPs: longer sequences, more micro-batches, or an evaluation.",
    "evaluation_used": "The model is evaluated (evaluation mode, no gradients) in steps {steps:list}, as most "
    "steps do: their times include it.",
    "evaluation_left_out": "The model is evaluated (evaluation mode, no gradients) in steps {steps:list}, which "
    "are left out: evaluation is not training. They take {share:.0%} of the time of the recorded steps.",
    "starting_left_out": "Steps left out at the job's start: {steps:list}. They took {times:.0f} times as long as the "
    "others: libraries start and code is compiled in them.",
    "steps_by_optimizer": "Steps were detected from optimizer steps and are numbered from the recording's start.",
    "steps_by_backward": "Each step is one backward pass: the program made no optimizer of torch.optim. If a training "
    "step has several, call perfscope.step() at its end.",
    "steps_by_repetition": "Steps were detected from the repetition of the kernels and are numbered from the "
    "recording's start; a step begins where the host usually takes longest to the next launch.",
    "other_captures": "{choice} (perfscope analyze --capture N shows another.)",
    "further_jobs": "The command ran other trainings besides; each is a recording of its own, in this folder: "
    "{folders:texts}.",
    "roles": "The recording holds several roles ({roles:texts}), each with an account of its own: all but the roles "
    "side by side is of {main}. (perfscope analyze --role NAME shows another.)",
    "roles_apart": "The captures of the roles share less than one step, so who waits for whom is not known. perfscope "
    "trigger FOLDER --seconds 30 has all roles of a running job record the same 30 seconds; choose several iterations.",
    "missing_ranks": "{missing} of {all} ranks are not in the recording ({ranks:list}): waits are bounds, and a "
    "slow rank may be among them.",
    "rank_unknown": "The trace does not state its rank; it is shown as rank 0.",
    "rank_by_file_name": "The number of rank {rank} is known only from its file's name ({file}).",
    "ranks_by_file_names": "The numbers of {ranks:ranks} are known only from their files' names "
    "({file} and {more} more).",
    "file_of_another_rank": "{file} holds rank {rank}, although its name has another number.",
    "ranks_by_process_id": "Nothing in the report states the ranks of its processes, so they are numbered by "
    "process id, which may differ from the job's numbers: {order}. Let each process emit an NVTX mark, such as "
    "perfscope::rank#0 of 2.",
    "ranks_by_file_order": "Neither the traces nor their names state the ranks, so they are numbered in the order of "
    "their names, which may differ from the job's numbers: {order}. Name the files rank<N>.json.",
    "ranks_repeated": "Several traces of the same time state rank {stated:list}, while their names number the ranks: "
    "the names are used. Start the profiler after init_process_group, which sets the rank that a trace states.",
    "world_assumed": "No trace states how many ranks the job has, or which of them take part in a collective. "
    "Those of {ranks:ranks} hold the same ones, which end at the same time, so these are taken for all {count} ranks.",
    "world_assumed_in_part": "No trace states how many ranks the job has, or which of them take part in a collective. "
    "Those of {ranks:ranks} hold the same ones, which end at the same time, so these are taken to be of all ranks, "
    "which are {count} by their numbers; the others are not in the recording, or not used.",
    "groups_assumed": "No trace states which ranks take part in a collective. Ranks on which the collectives of one "
    "stream end at the same time are taken for a group: {groups} groups of {count} ranks in all.",
    "reading": "Rank {rank} ({source}): {problems:texts}.",
    "reading_alike": "Each of {ranks:ranks} ({source} and {more} more): {problems:texts}.",
    "no_device_events": "The trace has no GPU events, although the job has devices: the breakdown shows host "
    "threads only. Your own profiling needs ProfilerActivity.CUDA. perfscope run records with it: there CUPTI, which "
    "traces kernels for one profiler at a time (nsys, ncu, DCGM), was in use, missing or not permitted; perfscope "
    "doctor, run where the ranks ran, says which.",
    "device_events_cut": "The file of {ranks:ranks} ends before any GPU event, although the job has devices: the "
    "breakdown shows host threads only. Copy the file again; where the job was killed while it wrote, record again.",
    "device_events_lost": "The file of {ranks:ranks} ends early, and device events are missing from every step: what "
    "the devices did between the recorded ones is not known, and counts as unknown idle time. Copy the file again; "
    "where the job was killed while it wrote, record again.",
    "device_events_unread": "No event of these processes is of a kind that PerfScope knows: {names:texts}. Where "
    "devices are among them, their work is not analyzed, and the breakdown shows host threads only.",
    "mismatch": "Group {group!r}, step {step}: {mismatch}; collectives without a counterpart are not compared.",
    "more_mismatches": "{count} more mismatches like these.",
    "participants_missing": "{share:.0%} of the collectives have participants that are not in the recording: "
    "their wait is a lower bound, and which rank came last is not known.",
    "participants_not_found": "{share:.0%} of the collectives were not found on all ranks that should take part, "
    "though these are recorded: their wait is a lower bound, and which rank came last is not known.",
    "messages_unpaired": "{share:.0%} of the collectives are messages whose other end was not found, as where peers "
    "are not named: their wait is a lower bound, and stragglers and predictions do not hold who waits for whom.",
    "matched_by_end": "{count:collective} could only be matched by when their kernels end: neither their order nor the "
    "recorded peers identify them.",
    "group_unknown": "The recording does not state which ranks take part in some collectives; these are not "
    "compared across ranks.",
    "hosts_by_device_number": "The recording does not name hosts: ranks with increasing device numbers are assumed "
    "to share a host and its clock.",
    "clock_alone": "No collective connects {ranks:ranks} with the lowest rank: their clocks are not aligned.",
    "idle_unknown": "{share:.0%} of the step is idle without a visible cause: the recording holds too few host events "
    "(record CPU activities too), or the device ran work that is not recorded.",
    "graphs_unlisted": "CUDA graphs were launched ({launches:.3g} per step) whose kernels are not in the recording, so "
    "what they compute and communicate is not known: their time counts as unknown idle time, and MFU leaves out their "
    "work. Record with nsys profile --cuda-graph-trace=node, or once without graphs.",
    "unplanned_capture": "This capture was not planned: {reason}.",
    "collector_problem": "{problem}",
    "job_cut": "The job ended before the last planned step was recorded.",
    "exit_code": "The recorded command ended with exit code {code}. What it recorded until then was analyzed.",
    "killed": "The recorded command was killed by signal {signal}. What it recorded until then was analyzed.",
    "history_only": "{reason}: there is no time breakdown, no critical path and no advice. Stages are the time of "
    "the training thread: with a device they are launches and waiting, not the time of kernels, and they include "
    "the wait for other ranks.",
    "restarted": "The job was restarted: {steps:,} steps of earlier attempts are not used.",
    "history_incomplete": "Up to {steps:,} steps are missing in the history: they could not be written, or are "
    "damaged.",
    "ranks_without_history": "{count:rank} without a step history.",
    "pipeline_not_compared": "Ranks of a pipeline do different work, and what they waited was not recorded, so they "
    "are not compared.",
    "pipeline_unknown": "The job has a pipeline, but which rank holds which stage is not recorded, so its bubbles "
    "are not known. Record all ranks with torch.profiler (perfscope run does), whose messages name their peers since "
    "torch 2.5.",
    "microbatches_unknown": "How many micro-batches the pipeline has is not known from the recorded ranks, so its "
    "bubble is not compared with the ideal one. Record a rank of the first and one of the last stage.",
    "bubbles_are_bounds": "Not all ranks that exchange messages are in the recording: the bubbles of their "
    "neighbours are upper bounds, computed from the quickest message of each size.",
    "kernels_not_listed": "Kernels measured by Nsight Compute that are not among the ones listed here, or not by "
    "one name: {names:texts}.",
    "no_samples": "The system sampler took no sample during the recorded steps, or its clock differs from that of the "
    "traces: hosts and devices are not shown. perfscope run --sample-every 0.1 samples more often.",
    "compiled_unknown": "The recording does not show which lines of the model {share:.0%} of the time in compiled code "
    "computes: no rank-N.compiled.json names its graphs. perfscope run writes it (torch 2.6 or newer) where the first "
    "optimizer is made before the model is compiled.",
    "compiled_from_cache": "The recording does not show which lines of the model {share:.0%} of the time in compiled "
    "code computes: torch took the code from its cache, without its lines. Set INDUCTOR_PROVENANCE=1 (torch 2.8 or "
    "newer) for the run: torch compiles once more, and caches the code with its lines.",
    "compiled_in_graphs": "The recording does not show which lines of the model {share:.0%} of the time in compiled "
    "code computes: kernels of operators in CUDA graphs, whose launch does not say which call each is of. Their place "
    "among the generated kernels leaves it open.",
    "graphs_not_annotated": "The recording does not show which modules {share:.0%} of the time of the kernels in CUDA "
    "graphs belongs to: the program does not annotate them as it captures the graphs. torch.cuda.graph(..., "
    "enable_annotations=True) with mark_kernels (torch 2.12 or newer, a driver of CUDA 13.1 or newer) does.",
    "compile_cost": "torch.compile took {whole_s:.1f} s of {ranks:ranks}, {inductor_s:.1f} s of it in inductor for "
    "{graphs:graph}; it took no other rank longer. Graphs that are in torch's cache take less.",
    "compiled_unreadable": "Where compiled code comes from cannot be read: {error}.",
    "compiled_unshown": "The C++ kernels of compiled graphs are not listed one by one: torch shows them to the "
    "profiler only with TORCHINDUCTOR_CPP_ENABLE_KERNEL_PROFILE=1, and compiles once more for it.",
    "few_samples": "{host} has only {count:sample} during the recorded steps: its clocks, temperatures and queues "
    "are single values. Record more steps, or perfscope run --sample-every 0.1.",
    "slowed_clocks": "GPU {index} of {host} was slowed down{clock}: {reasons}.{heat} Check its cooling and power "
    "supply (nvidia-smi -q -d PERFORMANCE,TEMPERATURE,POWER).",
    "power_limit": "GPU {index} of {host} ran at its power limit of {limit_w:.0f} W in {share:.0%} of the "
    "samples{clock}.",
    "pcie_lanes": "GPU {index} of {host} is connected by {lanes} of {possible} PCIe lanes: reseat it, or move it "
    "to another slot.",
    "clocks_set_by_hand": "The clocks of GPU {index} of {host} were set by a user{clock} (nvidia-smi "
    "--reset-gpu-clocks undoes it).",
    "cpu_quota": "The CPU quota of the job on {host} ({cores:g} cores) kept it from running for {share:.0%} of "
    "the time. Raise the container's CPU limit, or use fewer threads and workers.",
    "other_processes": "Other processes used {others:.1f} of the {cores} cores of {host}, the job {job:.1f}: they "
    "slowed it down.",
    "waited_for_cores": "The others waited for {ranks:ranks} {share:.0%} of the step, because training threads wait "
    "for a core: other work on the cores is the cause, and no rank is named for it.",
    "profiling_effect": "In the recorded steps the others waited for {ranks:ranks} {share:.0%} of the step ({what}), "
    "but what that rank takes for it ({own_ms:.3g} ms per step) is longer than a whole step without the profiler "
    "({unprofiled_ms:.3g} ms), which is as long as the recorded one would be without the wait. So the job has no such "
    "straggler while it is not profiled, and none is named. Record again, with a lighter recording (perfscope run "
    "--no-shapes).",
    "recorded_steps_alone": "In the recorded steps the others waited for {ranks:ranks} {share:.0%} of the step "
    "({what}): the training thread there took {recorded_ms:.3g} ms of CPU time per step, the others' {others_ms:.3g} "
    "ms. Without the profiler it took {unprofiled_ms:.3g} ms and the others' {unprofiled_others_ms:.3g} ms, so the job "
    "has no such straggler then, and none is named. Something else may have slowed its core down while the steps were "
    "recorded: record more of them (perfscope run --active).",
    "steal": "The hypervisor gave {share:.0%} of the CPU time of {host} to other machines.",
    "swapping": "{host} swapped {mb_per_s:.0f} MB/s: it is short of memory. Use fewer loader workers, a smaller "
    "prefetch_factor, or more memory.",
    "memory_full": "{share:.0%} of the memory of {host} was in use: the next process may be killed for it.",
    "io_pressure": "At least one task on {host} waited for disks for {share:.0%} of the time ({read_mb_per_s:.0f} "
    "MB/s read, {written_mb_per_s:.0f} MB/s written).",
    "memory_pressure": "At least one task on {host} waited for memory for {share:.0%} of the time.",
    "busy_workers": "The data loader's workers are always computing ({share:.0%} of a core each): only more of "
    "them, or cheaper batches, load faster.",
}
"""Kind of a note -> its sentence over ``values`` and ``ranks``, written as ``_Sentence`` formats."""


@dataclass(frozen=True, kw_only=True)
class Note:
    """Something the reader must know to judge a number: what is missing, bounded, perturbed or assumed."""

    about: Annotated[str, "What it concerns: ``steps``, ``clock``, ``collectives``, ``utilisation``, ``reading`` …"]
    kind: Annotated[str, "What it reports, by which programs recognize it: ``few_steps``, ``exit_code`` …"]
    text: Annotated[str, "The same as a sentence."]
    ranks: tuple[int, ...] = ()
    values: Annotated[dict[str, Any], "The numbers and names in the sentence."] = field(default_factory=dict)

    @property
    def names_ranks(self) -> bool:
        """Its sentence gives its ranks."""
        return "{rank" in SENTENCES.get(self.kind, "")


def note(about: str, kind: str, ranks: Iterable[int] = (), **values: Any) -> Note:
    """The note of a kind. ``values`` are of JSON's types."""
    ranks = tuple(ranks)
    text = _Sentence().format(SENTENCES[kind], ranks=ranks, **values)
    return Note(about=about, kind=kind, text=text, ranks=ranks, values=values)


def ended(code: int) -> Note:
    """How a command that failed ended: ``code`` is its exit code, or less than 0, the signal that killed it."""
    if code < 0:
        return note("collection", "killed", signal=-code)
    return note("collection", "exit_code", code=code)


def collector_problems(problems: Mapping[int, Iterable[str]]) -> Iterator[Note]:
    """One note for each problem that collectors recorded; ``problems`` are by rank."""
    for text, having in grouped((text, rank) for rank, texts in problems.items() for text in texts).items():
        yield note("collection", "collector_problem", having, problem=text)


class _Sentence(string.Formatter):
    """``{count:step}`` is "1 step" or "3 steps"; ``list`` writes ranks or steps, ``ranks`` ranks with that word, and
    ``texts`` several texts.
    """

    def format_field(self, value: Any, format_spec: str) -> str:
        if format_spec == "texts":
            return "; ".join(value)
        if format_spec == "list":
            return rank_list(value)
        if format_spec == "ranks":
            return ranks_in_words(value)
        return (
            plural(value, format_spec) if format_spec.isalpha() and len(format_spec) > 1 else format(value, format_spec)
        )
