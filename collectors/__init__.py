"""What runs inside the training job: standard library and torch, nothing analyzed, the training left as it was.

How a recording is made, package by package:

1. ``launch``: ``perfscope run`` prepares the folder, puts ``bootstrap`` on ``PYTHONPATH`` and runs the command. Python
   executes the bootstrap at every start; it imports the collector once the process makes its first optimizer.
2. ``capture.attach`` replaces ``Optimizer.step`` (and engines' steps); ``capture.session`` turns them into training
   steps.
3. ``phases`` patches data loading, forward and backward. Its clock times every step where the mode asks for it.
4. ``capture`` decides when the profiler runs, on the same steps on all ranks, and writes traces, step history and run
   metadata. During a capture ``ranges`` and ``frameworks`` name what the profiler sees.
5. ``describe`` and ``frameworks`` describe model, strategies and settings; ``sampler`` is a process of its own for each
   host, which reads the system's counters.
6. ``launch.recap`` reports what was recorded.

``overrides`` changes settings for ``perfscope tune``; ``doctor`` tries what a recording needs; ``inprocess`` starts
recordings from inside the program, where nobody has launched it under ``perfscope run``. The modules beside the
packages serve several of them: ``config`` (the options), ``identity`` and ``claims`` (which rank this process is),
``agreement`` (ranks agree on the steps of a capture), ``annotate`` (writes one range), ``discovery`` (models and
wrappers among live objects), ``patches``, ``problems`` (what failed, never raised), ``redact``, ``cpu``, ``device``.
What is written is defined in :mod:`perfscope.recording`.
"""
