"""Recordings whose metadata is changed at random, and what an analysis of them must not do.

Every value of every JSON file beside the traces is replaced by values of other types, of other sizes, by nothing; lists
and objects lose, repeat and gain items. Whatever is written there, the analysis ends with a result or with an error of
the product's own that names a file. A mutation is determined by the seed and its number.
"""

from __future__ import annotations

import json
import random
import re
import shutil
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from perfscope.analyzers.analyze import analyze
from perfscope.errors import PerfscopeError
from perfscope.recording.paths import samples_file
from perfscope.recording.samples import DEVICE_COLUMNS, HOST_COLUMNS, LOADER, PROCESS_COLUMNS, RANK, SCHEMA
from perfscope.reports import markdown, terminal
from perfscope.reports.page import page
from tests.emulator.emulate import emulate
from tests.emulator.spec import Job, Recording

ROOT = Path(__file__).resolve().parents[2]

VALUES: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 3, 2**31, 2**63 - 1, 2**63, 2**80, -(2**70), 0.5, 1e18, 1e300, -1e300, float("nan"),
    float("inf"), "", "x", "0", "-3", "1e400", "\x1b[31mred", "\ud800", "a\x00b", "<script>alert(1)</script>", "é" * 3,
    "x" * 10_000, [], {}, [[]], [{}], [None], ["x"], [1, 2, 3], [-1], [2**70], {"x": 1}, {"": {}}, {"x": {"y": [1]}},
    {"1": "2"},
)  # fmt: skip
"""What takes the place of a value."""

SETTINGS: dict[str, Any] = {
    "ddp": {
        "bucket_cap_mb": 25.0, "static_graph": False, "find_unused_parameters": True, "gradient_as_bucket_view": False,
        "unused_parameter_size": 0, "bucket_bytes": [1188864, 727040], "comm_hook": "",
    },
    "fsdp": {
        "version": 1, "sharding_strategy": "FULL_SHARD", "backward_prefetch": None, "forward_prefetch": False,
        "cpu_offload": True, "offload": True, "replicate_degree": 2, "reshard_after_forward": True,
    },
    "deepspeed": {
        "zero_optimization": {
            "stage": 3, "overlap_comm": False, "reduce_bucket_size": 500_000_000, "allgather_bucket_size": 500_000_000,
            "stage3_prefetch_bucket_size": 50_000_000, "stage3_param_persistence_threshold": 100_000,
            "offload_param": {"device": "cpu"}, "offload_optimizer": {"device": "cpu"},
        },
        "config": {"zero_optimization": {"stage": 3}, "wall_clock_breakdown": True},
    },
    "megatron": {
        "expert_model_parallel_size": 2, "use_distributed_optimizer": True, "overlap_grad_reduce": False,
        "overlap_param_gather": False, "optimizer_cpu_offload": True, "tensor_model_parallel_size": 2,
        "pipeline_model_parallel_size": 2, "num_layers": 8, "micro_batch_size": 1, "global_batch_size": 8,
    },
    "pipeline": {"schedule": "Schedule1F1B", "microbatches": 4, "virtual_stages": 1},
    "precision": {"float32_matmul_precision": "highest", "allow_tf32": False, "cudnn_allow_tf32": True},
    "amp": {"dtype": "bfloat16", "scaler": True},
    "optimizer": {"classes": ["AdamW"], "fused": False, "foreach": True},
    "compile": {"mode": "default", "graph_breaks": 3, "compiled_frames": 2},
    "autograd": {"detect_anomaly": True},
    "gradient_accumulation": {"backwards_per_step": 4, "no_sync": False},
    "lightning": {"detect_anomaly": True, "accumulate_grad_batches": 4},
    "accelerate": {"gradient_accumulation_steps": 4},
    "transformers": {"dataloader_num_workers": 0, "gradient_accumulation_steps": 4},
}  # fmt: skip
"""Of every subject that rules and what-ifs read."""

REST: dict[str, Any] = {
    "cpu": {
        "cores": "0-3", "quota": 2.0, "steps": 6, "wall_ns": 600_000_000, "process_ns": 500_000_000,
        "thread_ns": 400_000_000, "waited_ns": 1_000_000,
    },
    "cpu_count": 4, "cpu_threads": 4, "started_at": "2026-11-21T09:48:17+00:00", "rendezvous": "10.0.0.1:29500",
    "command": ["python", "train.py"], "batch_shape": [4, 129], "model_flops_per_step": 1e12,
    "environment": {"NCCL_DEBUG": "INFO", "OMP_NUM_THREADS": "1", "CUDA_LAUNCH_BLOCKING": "0"},
    "applied": {"ddp.bucket_cap_mb": {"from": 25, "to": 10, "times": 1}}, "problems": ["nothing"], "attempt": 0,
}  # fmt: skip
"""Fields that a simulated rank does not write."""

_UNCLEAN = re.compile(r"[\x00\x1b\ud800-\udfff]")


def recordings(folder: Path) -> list[Path]:
    """Small recordings of all kinds under ``folder``, with metadata that holds everything: the bases of mutations."""
    jobs = {
        "ddp": Job(ranks=2, ranks_per_host=2, recording=Recording(run=True, steps=3)),
        "fsdp": Job(strategy="fsdp", ranks=2, ranks_per_host=1, recording=Recording(run=True, steps=3)),
        "pipeline": Job(strategy="pipeline", ranks=2, stages=2, microbatches=4, recording=Recording(run=True, steps=3)),
    }
    for name, job in jobs.items():
        (folder / name).mkdir(parents=True)
        emulate(job).write(folder / name)
        for path in (folder / name).glob("*.run.json"):
            raw = json.loads(path.read_text())
            own = {"fsdp": SETTINGS["fsdp"], "pipeline": SETTINGS["megatron"], "ddp": SETTINGS["deepspeed"]}[name]
            some = {"fsdp": "fsdp", "pipeline": "megatron", "ddp": "deepspeed"}[name]
            settings = {key: value for key, value in SETTINGS.items() if key not in ("fsdp", "deepspeed", "megatron")}
            raw = {**REST, **raw, "settings": {**settings, **raw["settings"], some: own}}
            path.write_text(json.dumps(raw))
            sample(folder / name, raw)
    shutil.copytree(ROOT / "sample_traces" / "starved", folder / "starved")
    return sorted(folder.iterdir())


def sample(folder: Path, run: dict[str, Any]) -> None:
    """Write what a sampler would have, of a rank's host: 20 samples over the trace, of the rank and one worker."""
    trace = json.loads(next(folder.glob(f"rank-{run['rank']:05d}.*trace.json")).read_text())
    moments = [event["ts"] * 1e3 for event in trace["traceEvents"] if event.get("ph") == "X"]
    begin = trace.get("baseTimeNanoseconds", 0) + int(min(moments))
    each = (int(max(moments) - min(moments)) + 10**8) // 18
    device = {
        "index": run["device"]["index"], "name": "NVIDIA A100", "uuid": "", "memory_bytes": 40 << 30,
        "power_limit_mw": 400_000, "sm_mhz_max": 1410, "pcie_width": 8, "pcie_width_max": 16,
    }  # fmt: skip
    lines: list[Any] = [
        {
            "schema": SCHEMA, "host": run["host"], "cores": 8, "cores_physical": 4, "cores_quota": 2.0,
            "memory_bytes": 64 << 30, "devices": [device], "host_columns": list(HOST_COLUMNS),
            "device_columns": list(DEVICE_COLUMNS), "process_columns": list(PROCESS_COLUMNS),
        },
        {"process": run["pid"], "rank": run["rank"], "kind": RANK, "cores": "0-3"},
        {"process": run["pid"] + 50, "rank": run["rank"], "kind": LOADER, "cores": "0-3"},
        {"problem": "no power readings"},
    ]  # fmt: skip
    for count in range(20):
        processes = [[run["pid"] + more, 10 * count, 4, 10**9, 0] for more in (0, 50)]
        host = [100 * count + 1] * len(HOST_COLUMNS)
        lines.append([begin - 10**8 // 2 + count * each, host, [[50] * len(DEVICE_COLUMNS)], processes])
    samples_file(folder, run["host"]).write_text("".join(json.dumps(line) + "\n" for line in lines))


def changed(content: str, dice: random.Random) -> tuple[str, str]:
    """The text of a JSON file, or of one of JSON lines, with some of its values changed, and which."""
    lines = content.splitlines() if content.startswith('{"schema": "perfscope.samples') else [content]
    place = dice.randrange(min(len(lines), 8))
    value, told = mutated(json.loads(lines[place]), dice)
    lines[place] = json.dumps(value)
    return "\n".join(lines) + "\n", f"line {place}: {told}"


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The paths to all values inside a JSON value, itself included."""
    yield path
    if isinstance(value, dict):
        for key, item in value.items():
            yield from places(item, (*path, key))
    elif isinstance(value, list):
        for index, item in enumerate(value[:3]):
            yield from places(item, (*path, index))


def mutated(raw: Any, dice: random.Random) -> tuple[Any, str]:
    """A copy with one to three changes, and what they are."""
    copy = json.loads(json.dumps(raw))
    told = []
    for _ in range(dice.choice((1, 1, 1, 2, 3))):
        path = dice.choice([each for each in places(copy) if each])
        owner = copy
        for key in path[:-1]:
            owner = owner[key]
        how = dice.random()
        if how < 0.08:
            del owner[path[-1]]
            told.append(f"{path} removed")
        elif how < 0.12 and isinstance(owner[path[-1]], list) and owner[path[-1]]:
            owner[path[-1]] = owner[path[-1]] * dice.choice((2, 50))
            told.append(f"{path} repeated")
        else:
            owner[path[-1]] = dice.choice(VALUES)
            told.append(f"{path} = {str(owner[path[-1]])[:40]!r}")
    return copy, "; ".join(told)


def outcome(folder: Path) -> str | None:
    """Analyze and write everything; None where that ends as it must, else what went wrong."""
    try:
        summary = analyze(folder, workers=1)
        texts = [terminal.verdict(summary), markdown.of_summary(summary)]
        texts += [json.dumps(summary.to_dict(), allow_nan=False), page.render(summary)]
    except PerfscopeError as error:
        return None if str(folder) in str(error) else f"an error that names no file: {error}"
    except Exception:
        return traceback.format_exc()
    unclean = [text for text in texts if _UNCLEAN.search(text)]
    return f"control characters in what is shown: {_UNCLEAN.findall(unclean[0])[:3]}" if unclean else None


def run(base: Path, folder: Path, seed: int, numbers: range) -> list[tuple[int, str, str]]:
    """Mutate a file of ``base`` for each number, in the copy ``folder``: number, mutation, fault of each failure."""
    if not folder.exists():
        shutil.copytree(base, folder)
    files = sorted(
        path.name for path in base.iterdir() if path.name.endswith((".run.json", "perfscope.json", ".samples.jsonl"))
    )
    failed = []
    for number in numbers:
        dice = random.Random(f"{seed}-{number}")
        name = dice.choice(files)
        content, told = changed((base / name).read_text(), dice)
        (folder / name).write_text(content)
        fault = outcome(folder)
        shutil.copy(base / name, folder / name)
        if fault is not None:
            failed.append((number, f"{name}: {told}", fault))
    return failed
