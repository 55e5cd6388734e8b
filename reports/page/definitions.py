"""What every number on the page means: shown on hover and in the page's glossary.

A number that is a field of the results has its definition there; here stand its name and what is not a field.
"""

from __future__ import annotations

from typing import Final

from perfscope.results import rows
from perfscope.results.categories import TimeCategory
from perfscope.results.communication.inspector import InspectorRow
from perfscope.results.fields import meaning
from perfscope.results.findings import Finding
from perfscope.results.memory.snapshots import GrowthRow, HolderRow, OutOfMemoryRow, SnapshotRow
from perfscope.results.roles.side_by_side import RoleRow, SharedDevice
from perfscope.results.summary import Summary
from perfscope.results.system import DeviceRow, HostRow, ProcessRow
from perfscope.results.tables import (
    CompiledModuleRow,
    CompiledRow,
    KernelRow,
    LaunchRow,
    ModuleRow,
    OperatorRow,
    StageRow,
)
from perfscope.results.time_breakdown import TimeBreakdown

_FIELDS: Final[dict[str, tuple[str, type, tuple[str, ...]]]] = {
    "step_time": ("Step time", rows.JobInfo, ("step_time_us",)),
    "step_us": ("Unprofiled step time", rows.JobInfo, ("unprofiled_step_us",)),
    "perturbation": ("Profiler overhead", rows.JobInfo, ("perturbation",)),
    "mfu": ("MFU, model FLOPs utilization", rows.Utilisation, ("mfu",)),
    "hfu": ("HFU, hardware FLOPs utilization", rows.Utilisation, ("hfu",)),
    "model_flops": ("Model FLOPs per step", rows.Utilisation, ("model_flops_per_step",)),
    "flops_coverage": ("FLOPs coverage", rows.Utilisation, ("flops_coverage",)),
    "peak": ("Peak", rows.Utilisation, ("peak_tflops",)),
    "comm": ("Communication", TimeBreakdown, ("comm_us",)),
    "hidden_comm": ("Overlapped communication", TimeBreakdown, ("hidden_comm_us",)),
    "wait": ("Wait", rows.CollectiveRow, ("wait_us",)),
    "transfer": ("Transfer", rows.CollectiveRow, ("transfer_us",)),
    "algbw": ("Algorithm bandwidth", rows.CollectiveRow, ("algbw_gbps",)),
    "busbw": ("Bus bandwidth", rows.CollectiveRow, ("busbw_gbps",)),
    "last_arriver": ("Last arrival", rows.CollectiveRow, ("last_arriver",)),
    "residual": ("Residual of the fit", rows.CostRow, ("residual",)),
    "lost": ("Straggler cost", rows.StragglerRow, ("lost_us",)),
    "cause": ("Cause", rows.StragglerRow, ("cause",)),
    "scope": ("Scope", rows.StragglerRow, ("scope",)),
    "pattern": ("Pattern", rows.StragglerRow, ("pattern",)),
    "share_of_steps": ("Share of steps", rows.StragglerRow, ("share_of_steps",)),
    "confidence": ("Confidence", Finding, ("confidence",)),
    "severity": ("Severity", Finding, ("severity",)),
    "ceiling": ("Ceiling", Finding, ("ceiling",)),
    "prediction": ("Prediction", Finding, ("predicted_step_us",)),
    "offset": ("Clock offset", rows.ClockRow, ("offset_us",)),
    "clock_residual": ("Clock residual", rows.ClockRow, ("residual_us",)),
    "loader_wait": ("Dataloader wait", rows.DataLoaderRow, ("wait_us",)),
    "loader_blocking": ("Blocking", rows.DataLoaderRow, ("blocking_us",)),
    "loader_sampler": ("Sampler", rows.DataLoaderRow, ("sampler_us",)),
    "loader_batch": ("Load time per batch", rows.DataLoaderRow, ("batch_us",)),
    "memory_peak": ("Reserved peak", rows.MemoryRow, ("peak_bytes",)),
    "memory_allocated": ("Allocated peak", rows.MemoryRow, ("allocated_peak_bytes",)),
    "headroom": ("Headroom", rows.MemoryRow, ("headroom_bytes",)),
    "fragmentation": ("Fragmentation", rows.MemoryRow, ("fragmentation",)),
    "allocation_retries": ("Allocation retries", rows.MemoryRow, ("allocation_retries",)),
    "inspector_count": ("Logged operations", InspectorRow, ("count",)),
    "inspector_all": ("Operations of all ranks", InspectorRow, ("matched",)),
    "inspector_wait": ("Wait by NCCL Inspector", InspectorRow, ("wait_us",)),
    "inspector_transfer": ("Transfer by NCCL Inspector", InspectorRow, ("transfer_us",)),
    "inspector_timing": ("Clock of NCCL Inspector", InspectorRow, ("timing",)),
    "role_busy": ("Busy, of a role", RoleRow, ("busy_share",)),
    "role_alone": ("Busy alone", RoleRow, ("alone_share",)),
    "role_waits": ("Waits for, of a role", RoleRow, ("waits",)),
    "role_idle": ("Idle, of a role", RoleRow, ("idle_share",)),
    "role_turns": ("Turns", RoleRow, ("turns",)),
    "role_turn": ("A turn", RoleRow, ("turn_us",)),
    "hand_overs": ("Hand-overs", SharedDevice, ("hand_overs",)),
    "device_known_by": ("How a shared device is known", SharedDevice, ("known_by",)),
    "snapshot_peak": ("Peak of a snapshot", SnapshotRow, ("peak_bytes",)),
    "snapshot_reserved": ("Most held", SnapshotRow, ("reserved_peak_bytes",)),
    "snapshot_unused": ("Of no use at the peak", SnapshotRow, ("fragmentation",)),
    "snapshot_split": ("Free between others", SnapshotRow, ("split_bytes",)),
    "snapshot_cached": ("Free segments", SnapshotRow, ("cached_bytes",)),
    "snapshot_largest": ("Largest free block", SnapshotRow, ("largest_free_bytes",)),
    "snapshot_rounding": ("Rounding", SnapshotRow, ("rounding_bytes",)),
    "snapshot_private": ("Private pools", SnapshotRow, ("private_bytes",)),
    "snapshot_phase": ("Phase of an allocation", HolderRow, ("phase",)),
    "snapshot_module": ("Module of an allocation", HolderRow, ("module",)),
    "snapshot_kept": ("Still allocated at the end", HolderRow, ("kept_bytes",)),
    "snapshot_growth": ("Growth per step", GrowthRow, ("bytes_per_step",)),
    "snapshot_cause": ("Cause of a failed allocation", OutOfMemoryRow, ("cause",)),
    "kernel_class": ("Class", KernelRow, ("operator_class",)),
    "kernel_time": ("Time of a kernel", KernelRow, ("us_per_step", "share")),
    "kernel_type": ("Type", KernelRow, ("dtype", "tensor_cores")),
    "kernel_rate": ("Rate", KernelRow, ("tflops", "share_of_peak")),
    "slowest_rank": ("Slowest rank", KernelRow, ("slowest_over_median",)),
    "operator_host": ("Host time of an operator", OperatorRow, ("host_us_per_step",)),
    "operator_device": ("Device time of an operator", OperatorRow, ("device_us_per_step",)),
    "operator_flops": ("FLOPs of an operator", OperatorRow, ("flops_per_step",)),
    "range_depth": ("Depth", ModuleRow, ("depth",)),
    "range_host": ("Host time of a range", ModuleRow, ("host_us_per_step",)),
    "range_device": ("Device time of a range", ModuleRow, ("device_us_per_step",)),
    "compiled_lines": ("Lines of compiled code", CompiledRow, ("lines", "modules")),
    "compiled_call": ("Call in compiled code", CompiledRow, ("name",)),
    "compiled_share": ("Share of compiled code", CompiledRow, ("share",)),
    "compiled_module": ("Module in compiled code", CompiledModuleRow, ("module",)),
    "compiled_shared": ("Shared time of a module", CompiledModuleRow, ("shared_us_per_step",)),
    "launch_call": ("Launch call", LaunchRow, ("call_us_mean",)),
    "launch_delay": ("Launch delay", LaunchRow, ("delay_us_median",)),
    "queue_depth": ("Queue", LaunchRow, ("queue_depth_median",)),
    "starved": ("Device idle", LaunchRow, ("starved_share",)),
    "short_kernels": ("Short kernels", LaunchRow, ("short_kernels_share",)),
    "critical_path": ("Critical path", Summary, ("critical_path",)),
    "stage_busy": ("Busy time of a stage", StageRow, ("busy_us",)),
    "bubble_start": ("Warm-up bubble", StageRow, ("bubble_start_us",)),
    "bubble_steady": ("Steady bubble", StageRow, ("bubble_steady_us",)),
    "bubble_drain": ("Drain bubble", StageRow, ("bubble_drain_us",)),
    "micro_batch_pass": ("Forward, backward", StageRow, ("forward_us",)),
    "stage_flops": ("Model FLOPs of a stage", StageRow, ("flops_per_step",)),
    "usable_cores": ("Usable cores", HostRow, ("cores_usable",)),
    "cpu_busy": ("CPU busy", HostRow, ("cpu_share",)),
    "job_cores": ("Cores used by the job", HostRow, ("job_cores",)),
    "runnable": ("Runnable threads", HostRow, ("runnable",)),
    "pressure": ("Pressure: CPU, I/O", HostRow, ("cpu_pressure_share",)),
    "throttled": ("Throttled by the CPU quota", HostRow, ("throttled_share",)),
    "steal": ("Steal", HostRow, ("steal_share",)),
    "host_memory": ("Memory of the host", HostRow, ("memory_used_bytes",)),
    "disk": ("Disk", HostRow, ("disk_read_bytes_per_s",)),
    "network": ("Network", HostRow, ("network_received_bytes_per_s",)),
    "gpu_busy": ("GPU busy", DeviceRow, ("utilisation",)),
    "clock_mhz": ("Clock", DeviceRow, ("sm_mhz",)),
    "slowed_by": ("Clocks limited by", DeviceRow, ("throttled",)),
    "rank_cores": ("CPU used", ProcessRow, ("cores",)),
    "waited_for_core": ("Waited for a core", ProcessRow, ("waited_share",)),
    "worker_cores": ("CPU per worker", ProcessRow, ("worker_cores",)),
}
"""Glossary key -> (name, class, the fields whose definitions it gives)."""


def _of_fields(kind: type, names: tuple[str, ...]) -> str:
    """The fields' definitions as the page writes them: what is None in Python is absent there."""
    text = " ".join(meaning(kind, name) for name in names).replace("``", "")
    return text.replace(". None ", ". Absent ").replace(" None ", " absent ")


DEFINITIONS: Final[dict[str, tuple[str, str]]] = {
    "throughput": (
        "Throughput",
        (
            "Samples/s: samples of a rank's batch × batches it takes per step, of all ranks, ÷ step time, unprofiled "
            "where that is known. Batches are those that were drawn while it was recorded. "
            "Only where every rank trains on a batch of its own (no tensor or pipeline parallelism)."
        ),
    ),
    "cost": ("Cost", "Devices × price of a device-hour × time, of the unprofiled step where it is known."),
    "exposed_comm": (
        "Exposed communication",
        (
            "A communication kernel is running and no compute kernel is: waiting for late ranks plus transfer, as a "
            "share of all ranks' step time. Exposed is not blocking: it is recoverable only as far as it lies on the "
            "critical path."
        ),
    ),
    "data_loading": (
        "Data loading",
        (
            "The device is idle while the training loop is inside the data loader's __next__, as a share of all "
            "ranks' step time."
        ),
    ),
    "breakdown": (
        "Time breakdown",
        (
            "Every nanosecond of a rank's step is in exactly one category, the first that applies; they add up to "
            "the step. Without an accelerator the device is the process's own training threads."
        ),
    ),
    **{category.id: (category.label, category.definition) for category in TimeCategory},
    "cost_model": (
        "Cost model",
        (
            "t(S) = α + S·f(n)/B, fitted on the transfer times of one group and kind: α is the time of a "
            "collective without bytes, B the bus bandwidth of a very large one."
        ),
    ),
    "action": ("Change", "The setting, its current and its new value, as written in code."),
    "roofline": (
        "Measured by Nsight Compute",
        (
            "Shares of the device's peaks in computing and in moving data, mean over the launches measured. A kernel "
            "is bound by the larger if that is above 60%, else by latency."
        ),
    ),
    "bubble": (
        "Bubble",
        (
            "Time in which a pipeline stage waits for other stages and does nothing else, in messages between them "
            "and in collectives across them. With p balanced stages, m micro-batches and v chunks of the model per "
            "stage it is (p-1)/(v·m + p-1) of the step."
        ),
    ),
    **{key: (label, _of_fields(kind, names)) for key, (label, kind, names) in _FIELDS.items()},
}
"""Glossary key -> (name, definition)."""
