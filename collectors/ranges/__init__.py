"""Names for what the profiler sees during a capture, as ``record_function`` and NVTX ranges.

``ranges`` is the sink of :mod:`perfscope.collectors.phases` that writes them, and has those of torch and frameworks
written (:mod:`perfscope.collectors.frameworks`); ``collectives`` describes each collective of a CPU job, ``gc_ranges``
garbage collections; ``accumulation`` counts backwards between optimizer steps.
"""
