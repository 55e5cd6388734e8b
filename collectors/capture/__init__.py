"""Training steps in, traces and metadata out: decides when the profiler runs in one process, and runs it.

In the order in which a step passes: ``attach`` replaces the ends of steps, ``session`` (one for each process) asks
``steps`` whether a training step has ended. ``watch`` times every step and writes ``history``; ``trigger`` proposes a
capture, ``schedule`` holds planned captures and those that all ranks agreed on. ``lazy`` makes the ``capturer``, or a
``marker`` where another profiler records; a capturer makes one ``capture`` after the other, and the ``writer`` writes
their traces. ``run_file`` collects and writes the rank's metadata.
"""
