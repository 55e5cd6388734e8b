"""The phases of a training step: data loading, forward, backward, optimizer. Each is patched once, for all who listen.

``phases`` patches torch's functions and the models' forwards, and calls its sinks where a phase begins and ends. Two
sinks exist: ``clock`` times every step of the run, :mod:`perfscope.collectors.ranges.ranges` writes profiler ranges
during a capture. ``loaders`` describes the data loaders that batches come from. Told to the clock besides: ``waits``,
what the thread waits for other ranks; ``checkpoints``, what saves and evaluates. ``core`` counts its waits for a core.
``compiled`` has the clock and what leads to it in C (``_clock.c``), where that was built.
"""
