"""What every number on the page means: one definition each, shown on hover and in the page's glossary."""

from __future__ import annotations

from typing import Final

DEFINITIONS: Final[dict[str, tuple[str, str]]] = {
    "step_time": (
        "Step time",
        (
            "Mean advance per step of the slowest rank's window, on aligned clocks. A step's window runs from "
            "the first kernel launched inside it to the first launched inside the next; a step cut by the "
            "recording's edge is dropped."
        ),
    ),
    "mfu": (
        "MFU, model FLOPs utilisation",
        (
            "Model FLOPs ÷ (step time × devices × dense peak of the type the matrix products ran in). Model "
            "FLOPs count the forward and backward matrix products, convolutions and attention, without "
            "recomputation."
        ),
    ),
    "hfu": ("HFU, hardware FLOPs utilisation", "As MFU, with recomputed FLOPs counted too."),
    "model_flops": (
        "Model FLOPs per step",
        (
            "Summed over the ranks present: the run's own count where there is one, else from the operators' "
            "recorded shapes. Embedding look-ups count nothing."
        ),
    ),
    "flops_coverage": (
        "FLOPs coverage",
        (
            "Share of matrix-operator time whose shapes were recorded. Below 100% the FLOPs, and MFU with "
            "them, are a lower bound."
        ),
    ),
    "peak": ("Peak", "Dense peak (no sparsity) of one device for the type, from a table that names its sources."),
    "exposed_comm": (
        "Exposed communication",
        (
            "A communication kernel is running and no compute kernel is: waiting for late ranks plus transfer, "
            "as a share of all ranks' step time. Exposed is not blocking: it is recoverable only as far as it "
            "lies on the critical path."
        ),
    ),
    "data_loading": (
        "Data loading",
        (
            "The device is idle while the training loop is inside the data loader's __next__, as a share of all "
            "ranks' step time."
        ),
    ),
    "account": (
        "Account",
        (
            "Every nanosecond of a rank's step lands in exactly one row, in the order of the rows; they add up "
            "to the step. Without an accelerator the device is the process's own training threads."
        ),
    ),
    "compute": ("Compute", "At least one compute kernel is running: the union over streams, never a sum of durations."),
    "exposed_comm_wait": (
        "Waiting for late ranks",
        (
            "A communication kernel is running, no compute kernel is, and the last participant has not arrived "
            "yet. The late rank causes it; the others pay."
        ),
    ),
    "exposed_comm_transfer": (
        "Transfer, not hidden",
        "A communication kernel is running, no compute kernel is, and all participants have arrived.",
    ),
    "exposed_copy": ("Copy, not hidden", "Only a memory copy or memory set is running on the device."),
    "idle_dataloader": (
        "Idle: data loading",
        "Nothing on the device while the launching thread is inside the data loader's __next__.",
    ),
    "idle_sync": (
        "Idle: blocked in a sync",
        ("The host was blocked in a synchronize or .item(), and the device ran dry before the next launch arrived."),
    ),
    "idle_launch": (
        "Idle: launching",
        "Nothing on the device while the host was busy in framework operators and launches: launch-bound.",
    ),
    "idle_host": (
        "Idle: other host work",
        (
            "Nothing on the device while the host ran Python or other work between operators; garbage "
            "collection and checkpoint writing are named where visible."
        ),
    ),
    "idle_dependency": (
        "Idle: held by a dependency",
        "The next kernel was already queued, waiting on an event or another stream.",
    ),
    "idle_unknown": (
        "Idle: unknown",
        "Nothing on the device and no visible reason. Above 2% of a step it is a defect.",
    ),
    "comm": ("Communication", "Time in which a collective ran on this rank: hidden plus exposed."),
    "hidden_comm": ("Hidden communication", "Communication that overlaps compute, and so costs the step nothing."),
    "wait": (
        "Wait",
        (
            "Last arrival − own arrival, mean over instances and participants. A rank arrives where its kernel "
            "starts, on aligned clocks."
        ),
    ),
    "transfer": (
        "Transfer",
        "End − last arrival, mean of one instance. A collective's duration on one rank is not its cost.",
    ),
    "algbw": ("Algorithm bandwidth", "Bytes ÷ transfer time, GB/s (10⁹ bytes a second)."),
    "busbw": (
        "Bus bandwidth",
        (
            "Algorithm bandwidth × 2(n−1)/n for all-reduce, (n−1)/n for all-gather, reduce-scatter and "
            "all-to-all, 1 for broadcast, reduce and send/receive (the convention of nccl-tests), for n ranks."
        ),
    ),
    "last_arriver": ("Last to arrive", "The rank that came last, and the share of instances in which it did."),
    "cost_model": (
        "Cost model",
        (
            "t(S) = α + S·f(n)/B, fitted on the transfer times of one group and kind: α is what a collective of "
            "no size costs, B the bus bandwidth of a very large one."
        ),
    ),
    "residual": ("Residual of the fit", "Median relative error of the fitted transfer times."),
    "lost": (
        "Lost time",
        (
            "The step time that would be saved were this rank as fast as the median of its peers, which do the "
            "same work."
        ),
    ),
    "cause": (
        "Cause",
        (
            "The category in which the late rank spent more than its peers' median since the group's previous "
            "collective."
        ),
    ),
    "share_of_steps": ("Share of steps", "Share of the used steps in which this rank was the one that came last."),
    "confidence": (
        "Confidence",
        ("How sure a statement is: low below five steps, or when a part of the job is missing from the recording."),
    ),
    "severity": ("Severity", "How much of the step it is about: high from 20%, medium from 5%, low below."),
    "ceiling": (
        "Ceiling",
        (
            "T/(T−R) − 1 for R recoverable out of a step T: no change of this kind can bring more. Ceilings of "
            "overlapping causes are never added."
        ),
    ),
    "prediction": (
        "Prediction",
        (
            "The step replayed with the change. The error of replaying the unchanged step is printed beside it; "
            "above 5% predictions are withdrawn."
        ),
    ),
    "perturbation": (
        "Perturbation",
        (
            "Median profiled step ÷ median unprofiled step, both on the host's clock: 1.1 means that profiling "
            "slowed the steps by 10%."
        ),
    ),
    "offset": (
        "Clock offset",
        (
            "What was added to this rank's clock to meet the lowest rank's; estimated from collectives, whose "
            "completion is nearly simultaneous on all participants."
        ),
    ),
    "clock_residual": (
        "Clock residual",
        "Median distance of this rank's collective ends from the group's, after alignment.",
    ),
    "loader_wait": ("Wait in the loader", "Time inside the data loader's __next__, per step."),
    "loader_blocking": (
        "Blocking",
        ("The part of the wait in which nothing else of the step went on: the account's row for data loading."),
    ),
    "loader_batch": ("Time to load a batch", "Time that one worker needs to load one batch."),
    "memory_peak": ("Peak memory", "The most the framework's allocator held during the recording."),
    "critical_path": (
        "Critical path",
        "The chain of dependent work that fixes the job's step time. Its stretches add up to the step time.",
    ),
}
"""Glossary key -> (name, definition)."""
