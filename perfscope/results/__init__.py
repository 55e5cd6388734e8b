"""What an analysis found, as frozen dataclasses: analyzers make them, reports and JSON are made from them.

The fields of a summary have their meaning and unit in their annotations. Times are µs, shares 0..1; what the data
cannot support is None. Nothing heavy is imported before it is needed (pandas by ``frames``, msgspec by ``file`` and
``schema``).

- ``categories``: the ten categories of a step; ``fields``: units, and what annotations state
- ``summary``: the whole of one job; its parts are in ``rows`` (job, clocks, collectives, stragglers, critical path,
  loading, memory), ``time_breakdown``, ``tables`` (kernels, operators, modules, pipelines, curves, lanes), ``history``
  (every step of the run), ``hang`` (why the job stands still), ``ending`` (how it failed), ``system`` (the machines),
  ``findings`` (what to change), ``cost`` (what it costs; ``prices`` computes that) and ``notes`` (what limits the
  numbers)
- ``frames``: the tables as DataFrames, with ``columns``; ``file``: reads the JSON back; ``schema``: its JSON Schema
- ``roles``: several roles side by side
- ``comparison`` and ``budget``: what ``perfscope compare`` and ``perfscope check`` found; ``scalars``: TensorBoard's
  curves
"""
