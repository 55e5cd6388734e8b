"""A second simulator of training jobs, built like the machine and not like a schedule.

``tests.generator`` lays out the phases of a step and gives each its time. Here each rank is a program: a coroutine
whose Python statements cost host time, launch kernels into a bounded queue, wait for streams and events, issue
collectives through communicators; a DataLoader's workers deliver when they are done. What a step takes, who waits for
whom and what a change brings is what comes of running the programs. Shares no code with the product or with
``tests.generator``.

``spec`` describes a job, ``emulate`` runs it: ``machine`` (devices, collectives, waiting), ``rank`` (a process and its
device), ``nccl``, ``model`` (operators), ``reducers`` (DDP, FSDP, by hand), ``pipeline``, ``loader``, ``training`` (the
scripts), ``trace`` (kineto's files). ``draw`` makes random jobs, ``changes`` makes the changes that what-ifs promise,
``judge`` compares the product's answers with a job that is run again::

    emulation = emulate(Job(causes=(Cause("slow compute", 1.4, ranks=(2,)),)))
    emulation.write(folder)
    emulation.step_ns - step_ns(emulation.job.without(*emulation.job.causes))
"""

from tests.emulator.emulate import Emulation, emulate, step_ns
from tests.emulator.spec import MIB, MS, US, Cause, Cpu, Job, Loader, Model, Network, Recording

__all__ = [
    "MIB", "MS", "US", "Cause", "Cpu", "Emulation", "Job", "Loader", "Model", "Network", "Recording", "emulate",
    "step_ns",
]  # fmt: skip
