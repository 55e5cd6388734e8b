"""Simulated training jobs with planted causes and known answers.

Shares no code with the product: it writes traces as kineto does and knows the truth from its own simulation::

    slow = SlowCompute(ranks=(2,), factor=1.5)
    job = simulate(JobSpec(causes=(slow,)))
    job.write(folder)
    job.truth.step_time_ns, job.lost_ns(slow)
"""

from tests.generator.engine import Collective, Fabric, Host, Stream, Work
from tests.generator.job import Job, simulate
from tests.generator.loader import Delivery, Loader
from tests.generator.spec import (
    MIB,
    MS,
    US,
    Cause,
    HostSpec,
    HostSync,
    JobSpec,
    LoaderSpec,
    ModelSpec,
    NetworkSpec,
    Pause,
    SlowCompute,
    SlowCopy,
    SlowHost,
    SlowLink,
    SlowLoader,
    SmallBuckets,
    cpu_job,
)
from tests.generator.truth import ROWS, CollectiveTruth, Truth, Window

__all__ = [
    "MIB",
    "MS",
    "ROWS",
    "US",
    "Cause",
    "Collective",
    "CollectiveTruth",
    "Delivery",
    "Fabric",
    "Host",
    "HostSpec",
    "HostSync",
    "Job",
    "JobSpec",
    "Loader",
    "LoaderSpec",
    "ModelSpec",
    "NetworkSpec",
    "Pause",
    "SlowCompute",
    "SlowCopy",
    "SlowHost",
    "SlowLink",
    "SlowLoader",
    "SmallBuckets",
    "Stream",
    "Truth",
    "Window",
    "Work",
    "cpu_job",
    "simulate",
]
