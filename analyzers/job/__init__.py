"""Across ranks: RankPartials in, tables of the Summary out.

The work passes through the modules in this order:

- ``apart``: traces that turn out to be of several jobs;
- ``identify``: which trace is which rank, which belong to one capture, and why others do not;
- ``hosts``: which ranks share a host, and its clock;
- ``aligned``: the ranks side by side (AlignedJob): common steps, aligned clocks, matched collectives, time breakdown;
- ``collectives``, ``pipelines``, ``tables``, ``system``: one subject each, from an AlignedJob;
- ``critical_path``, ``rank_steps``, ``loading``, ``deliveries``, ``memory``, ``utilisation``, ``cores``, ``asleep``,
  ``lanes``: one question each;
- ``notes``: what the reader must know to judge the numbers.

``blocks`` is the vectorised loop over groups, steps and ranks that several modules use.
"""
