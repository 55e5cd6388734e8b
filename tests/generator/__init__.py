"""Simulated training jobs with planted causes and known answers.

Shares no code with the product: it writes traces as kineto does and knows the truth from its own simulation::

    slow = SlowCompute(ranks=(2,), factor=1.5)
    job = simulate(JobSpec(causes=(slow,)))
    job.write(folder)
    job.truth.step_time_ns, job.lost_ns(slow)
"""

from tests.generator.causes import (
    Cause,
    Evaluation,
    ExtraLayers,
    HostSync,
    Pause,
    ReduceEachMicrobatch,
    RotatingPause,
    SlowCompute,
    SlowCopy,
    SlowHost,
    SlowLink,
    SlowLoader,
    SmallBuckets,
)
from tests.generator.engine import Host
from tests.generator.job import TENSORBOARD, Job, simulate, step_time_ns
from tests.generator.layout import Group, Layout
from tests.generator.loader import Delivery, Loader
from tests.generator.parts import MIB, MS, US, HostSpec, LoaderSpec, ModelSpec, NetworkSpec, PipelineSpec
from tests.generator.spec import JobSpec, cpu_job
from tests.generator.stages import Passes, StageTruth
from tests.generator.sweep import CATEGORIES, Window
from tests.generator.truth import CollectiveTruth, Truth
from tests.generator.work import Collective, Fabric, Stream, Work

__all__ = [
    "CATEGORIES",
    "MIB",
    "MS",
    "TENSORBOARD",
    "US",
    "Cause",
    "Collective",
    "CollectiveTruth",
    "Delivery",
    "Evaluation",
    "ExtraLayers",
    "Fabric",
    "Group",
    "Host",
    "HostSpec",
    "HostSync",
    "Job",
    "JobSpec",
    "Layout",
    "Loader",
    "LoaderSpec",
    "ModelSpec",
    "NetworkSpec",
    "Passes",
    "Pause",
    "PipelineSpec",
    "ReduceEachMicrobatch",
    "RotatingPause",
    "SlowCompute",
    "SlowCopy",
    "SlowHost",
    "SlowLink",
    "SlowLoader",
    "SmallBuckets",
    "StageTruth",
    "Stream",
    "Truth",
    "Window",
    "Work",
    "cpu_job",
    "simulate",
    "step_time_ns",
]
