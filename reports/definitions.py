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
    "throughput": (
        "Samples a second",
        (
            "Samples of a rank's batch × batches it takes in a step × ranks ÷ step time, outside the recording where "
            "that is known. Only where every rank trains on a batch of its own (no tensor or pipeline parallelism)."
        ),
    ),
    "cost": (
        "Cost",
        "Devices × price of a device-hour × time, of the unprofiled step where it is known.",
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
        ("The category in which it spent more time of its own than its peers' median."),
    ),
    "scope": (
        "Who",
        (
            "A rank; a host whose ranks are slow alike and cost more together than one by one, or several ranks that "
            "are; a pipeline stage that is slower than others of the same work; or ranks that pauses strike in turn."
        ),
    ),
    "pattern": (
        "When",
        "Steady: in 60 % of the steps or more. Intermittent: in some. Rotating: in turn with other ranks.",
    ),
    "share_of_steps": ("Share of steps", "Share of the used steps in which this rank was the one that came last."),
    "confidence": (
        "Confidence",
        ("How sure a statement is: low below five steps, or when a part of the job is missing from the recording."),
    ),
    "action": (
        "Change",
        "The setting, what it is now and what to make of it, as one would write it.",
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
    "memory_allocated": (
        "Memory of tensors",
        (
            "The largest sum of live tensors. Of the host's memory only what was allocated since the profiler started "
            "is counted, so there it is a lower bound."
        ),
    ),
    "headroom": (
        "Headroom",
        (
            "Capacity − peak memory: what the allocator could still have asked for. What others hold on the device "
            "(the driver's context, communication buffers) comes off it."
        ),
    ),
    "fragmentation": (
        "Unused share",
        (
            "1 − tensors ÷ what the allocator held, when it held most and tensors filled most of it: memory lost to "
            "fragmentation and to sizes that were cached and did not come again."
        ),
    ),
    "allocation_retries": (
        "Retries",
        (
            "Times that the allocator found no memory, gave its cache back to the device and asked again, since the "
            "process began. Each waits for the device; more than none in steady training is memory running out."
        ),
    ),
    "kernel_class": (
        "Class",
        (
            "What a kernel or operator does, by the operator that launched it or one around that, else by the "
            "kernel's name."
        ),
    ),
    "kernel_time": (
        "Time of a kernel",
        (
            "Sum of its durations per rank and step, kernels that run at once counted each; share of all device "
            "work, communication included."
        ),
    ),
    "kernel_type": (
        "Type",
        (
            "Type of the factors of its products: the operator's recorded type, and for float32 by the kernel's "
            "name whether it computes in TF32. A name may also say that tensor cores are not used."
        ),
    ),
    "kernel_rate": (
        "Rate",
        (
            "FLOPs ÷ time, of the calls whose shapes are recorded, recomputation included; and its share of the "
            "device's dense peak for that type. Several kernels of one operator share its FLOPs by their time."
        ),
    ),
    "slowest_rank": (
        "Slowest rank",
        "The longest mean duration of a kernel on any rank ÷ the median of the ranks' means.",
    ),
    "roofline": (
        "Measured by Nsight Compute",
        (
            "Shares of the device's peaks in computing and in moving data, mean over the launches measured. A "
            "kernel is bound by the larger if that is above 60%, else by latency."
        ),
    ),
    "operator_host": (
        "Host time of an operator",
        "Time in the operator itself, its launch calls included and the operators that it calls left out.",
    ),
    "operator_device": (
        "Device time of an operator",
        ("Sum of the durations of the device work whose launch lies in this operator and in none that it calls."),
    ),
    "operator_flops": ("FLOPs of an operator", "Computed by its kernels per rank and step, recomputation included."),
    "range_depth": ("Depth", "How many ranges lie around it; 0 is outermost."),
    "range_host": ("Host time of a range", "Its whole length on the host."),
    "range_device": (
        "Device time of a range",
        (
            "Time in which device work ran that was launched inside it, on the same thread: a module's backward "
            "is not in it, since autograd calls no modules."
        ),
    ),
    "launch_call": ("Launch call", "Mean length of the calls that launch kernels and copies."),
    "launch_delay": (
        "Launch delay",
        "From the end of a launch call to the start of its work. 0: the device waits for the host.",
    ),
    "queue_depth": (
        "Queue",
        "Pieces of work launched but not yet begun, median over time. 0: the host is not ahead of the device.",
    ),
    "starved": ("Starved launches", "Share of launches before which the device had finished all that was launched."),
    "short_kernels": ("Short kernels", "Share of kernels shorter than 10 µs, about the cost of launching one."),
    "critical_path": (
        "Critical path",
        "The chain of dependent work that fixes the job's step time. Its stretches add up to the step time.",
    ),
    "usable_cores": (
        "Cores",
        "That the job's ranks on this host may use together: their bindings, and their container's CPU quota.",
    ),
    "cpu_busy": ("CPU busy", "Share of the time of all the host's cores in which they ran anything, the job or not."),
    "job_cores": (
        "Cores used by the job",
        "CPU time of the ranks' processes and their data loader workers ÷ time: how many cores they kept busy.",
    ),
    "stage_busy": (
        "Own work of a stage",
        "The step less its bubbles: computing, transfers, waiting for its own copies, and idle time of its own.",
    ),
    "bubble": (
        "Bubble",
        (
            "Time in which a pipeline stage waits for other stages and does nothing else, in messages between them "
            "and in collectives across them. With p even stages, m micro-batches and v chunks of the model a "
            "stage it is (p-1)/(v·m + p-1) of the step."
        ),
    ),
    "bubble_start": ("Bubble at the start", "Until the stage's first micro-batch of the step has come."),
    "bubble_steady": ("Bubble in between", "From its first forward of the step to the end of its last backward."),
    "bubble_drain": (
        "Bubble at the end",
        "After its last backward, until the pipeline has drained: what follows needs all stages.",
    ),
    "micro_batch_pass": (
        "Forward, backward",
        (
            "One micro-batch through one chunk of the stage's model, mean: from its first kernel's start to its last "
            "one's end; without a device, the range's time less what it waits for other stages."
        ),
    ),
    "stage_flops": ("Model FLOPs of a stage", "Of one of its ranks per step, mean over its ranks."),
    "runnable": (
        "Runnable threads",
        "Threads on the whole host that ran or waited for a core, mean over the samples. More than cores: a queue.",
    ),
    "pressure": (
        "Waited for CPU, for I/O",
        "Share of the time in which some thread of the host stood still for want of it (Linux's pressure information).",
    ),
    "throttled": (
        "Held back by the CPU quota",
        "Share of the time for which the container's CPU limit kept the job from running.",
    ),
    "steal": ("Steal", "Share of the CPU time that the hypervisor gave to other machines."),
    "host_memory": ("Memory of the host", "Largest use in the recorded steps, caches that can be dropped left out."),
    "disk": ("Disk", "Bytes per second to and from the host's own disks; network file systems are not among them."),
    "network": (
        "Network",
        "Bytes per second over all interfaces but loopback, which has its own column, as has RDMA (InfiniBand).",
    ),
    "gpu_busy": (
        "GPU busy",
        "Share of the time in which any kernel ran, as the driver samples it. 100% does not mean that it was full.",
    ),
    "clock_mhz": ("Clock", "Mean clock of the streaming multiprocessors in the recorded steps."),
    "slowed_by": (
        "Slowed by",
        "Reasons that the driver gave for clocks below the highest, with the share of the samples that had each.",
    ),
    "rank_cores": ("CPU used", "CPU time of all threads of the rank's process ÷ time."),
    "waited_for_core": (
        "Waited for a core",
        "Share of the time in which the rank's main thread was ready to run but had no core to run on.",
    ),
    "worker_cores": (
        "CPU of one loader worker",
        "CPU time ÷ time, mean over the rank's data loader workers. 1: a worker that does nothing but compute.",
    ),
}
"""Glossary key -> (name, definition)."""
