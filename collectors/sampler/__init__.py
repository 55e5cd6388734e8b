"""The system sampler: ``sampler`` (in the first recorded rank of a host) starts ``process``, which reads the counters.

``host`` and ``tasks`` read Linux's ``/proc`` and ``/sys``, ``psutil`` stands in for them elsewhere, ``nvml`` reads
NVIDIA devices. The columns are defined in :mod:`perfscope.recording.samples`.
"""
