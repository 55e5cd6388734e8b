"""What ``perfscope run`` writes beside a trace: docs/recording.md."""

from __future__ import annotations

from typing import Any

from tests.emulator import model as layers
from tests.emulator.rank import Rank
from tests.emulator.reducers import buckets
from tests.emulator.spec import Job

DEVICE = "NVIDIA A100-SXM4-80GB"


def metadata(rank: Rank, file: str, unprofiled_ns: list[int]) -> dict[str, Any]:
    """One rank's run; ``unprofiled_ns`` are steps before the recorded ones."""
    job, recording = rank.job, rank.job.recording
    groups = {group.name: group for group in rank.communicators.values()}.values()
    return {
        "schema": "perfscope.run/1",
        "mode": "captures",
        "rank": rank.number,
        "local_rank": rank.number % job.ranks_per_host,
        "world_size": job.ranks,
        "local_world_size": min(job.ranks_per_host, job.ranks),
        "host": f"node{job.host_of(rank.number)}",
        "pid": 4_100 + rank.number,
        "backend": "nccl" if job.ranks > 1 else "",
        "device": {"type": "cuda", "index": rank.number % job.ranks_per_host, "name": DEVICE},
        "versions": {"python": "3.11.9", "torch": "2.6.0", "cuda": "12.4", "nccl": "2.21.5"},
        "strategies": _strategies(job),
        "settings": _settings(job),
        "process_groups": [
            {"name": group.name, "description": group.description, "backend": "nccl", "ranks": list(group.ranks)}
            for group in groups
        ],
        "model": _model(job),
        "dataloaders": [
            {
                "num_workers": job.loader.workers,
                "batch_size": 8,
                "pin_memory": job.loader.pinned,
                "prefetch_factor": job.loader.prefetch if job.loader.workers else None,
                "fetched_batches": len(rank.fetched),
                "fetch_ns": sum(rank.fetched),
            }
        ],
        "steps": {"seen": len(rank.bounds) - 1, "detected_by": "optimizer", "unprofiled_ns": unprofiled_ns},
        "captures": [
            {"file": file, "first_step": recording.first, "last_step": recording.first + recording.steps - 1},
        ],
        "outcome": "finished",
    }


def _strategies(job: Job) -> list[str]:
    if job.ranks == 1:
        return ["single"]
    named = {
        "ddp": ["ddp"],
        "fsdp": ["fsdp"],
        "tensor": ["tensor", "ddp"],
        "pipeline": ["pipeline"],
        "manual": [],
        "flat": [],
    }
    return [name for name in named[job.strategy] if name != "ddp" or job.replicas > 1]


def _settings(job: Job) -> dict[str, Any]:
    found: dict[str, Any] = {}
    if job.microbatches > 1 and job.stages == 1:
        found["gradient_accumulation"] = {"backwards_per_step": job.microbatches, "no_sync": job.no_sync}
    if job.strategy == "ddp" and job.ranks > 1:
        sizes = [elements * job.gradient_bytes for _, elements in buckets(job)[0]]
        found["ddp"] = {"bucket_cap_mb": job.bucket_mb, "bucket_bytes": sizes, "find_unused_parameters": False}
    if job.strategy == "fsdp":
        found["fsdp"] = _fsdp(job)
    return found


def _fsdp(job: Job) -> dict[str, Any]:
    if job.version == 2:
        return {"version": 2, "reshard_after_forward": job.reshard}
    return {
        "version": 1,
        "sharding_strategy": "FULL_SHARD" if job.reshard else "SHARD_GRAD_OP",
        "backward_prefetch": "BACKWARD_PRE" if job.backward_prefetch else None,
        "forward_prefetch": job.forward_prefetch,
        "limit_all_gathers": True,
    }


def _model(job: Job) -> dict[str, Any]:
    each = [elements * 4 for elements in layers.parameters(job)]
    shard = job.ranks if job.strategy == "fsdp" else 1
    sizes = each * (job.model.blocks // job.stages)
    return {
        "name": "Transformer",
        "parameters": sum(sizes) // 4 // shard,
        "parameter_bytes": sum(sizes) // shard,
        "trainable_bytes": sum(sizes) // shard,
        "trainable_sizes": [size // shard for size in sizes],
        "block_sizes": [sum(each)] * (job.model.blocks // job.stages),
        "dtypes": ["float32"],
    }
