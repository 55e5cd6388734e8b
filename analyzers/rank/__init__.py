"""Analyzes one rank: a :class:`~perfscope.trace.trace.Trace` in, a small ``RankPartial`` out.

``analyze.analyze_rank`` runs the modules in this order:

- ``launches``: device work and the call that launched each piece, calls that block; ``steps``: where steps begin and
  end (from ``repetition`` where nothing marks them); ``host_activity``: what the training threads do (``pauses``); on
  sets of time (``intervals``) and nested ranges (``nesting``).
- ``time_breakdown``: each nanosecond of the steps in one category, as a ``timeline``, idle time by its cause (``idle``,
  ``sync_delays``); ``progress``: where the rank is blocked by communication, and what it does otherwise;
  ``launch_order``: its host beside its device (``host_lane``).
- ``collectives/``: every collective with its group, kind, size and sequence number.
- ``attribution``: which operator launched each kernel, with how many FLOPs (``flops/``, ``kernel_classes``).
- ``extra/``: work that a setting would make unnecessary.
- ``work/``: tables of kernels, operators, ranges, launches and synchronizations.
- ``passes`` (micro-batches), ``memory``, ``lanes`` (events of one step for the page).

``partial`` has the values that travel; ``job/`` compares those of all ranks and imports nothing that computes them.
"""
