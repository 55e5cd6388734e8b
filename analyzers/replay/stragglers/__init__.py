"""Stragglers: which ranks, hosts, stages or links the others wait for, why, and what that costs.

In come the aligned ranks, the recorded schedules and their unchanged replay; out come rows for the summary. The work
passes through:

1. ``own_time``: by how much ranks' own time exceeds that of their peers; how short a step can be for the hosts
2. ``slow_links``, ``slow_stages``, ``lone_ranks``, ``slow_for_work``: causes that no comparison of times with peers
   shows
3. ``search``: replays candidates at their peers' pace (``paced``); those that save more than noise are stragglers
   (``straggler``), each with its cause (``causes``)
4. ``hiding``, ``sets``: which of them hide each other, and what each adds; ``in_turn``: which are slow in turn, or now
   and then; ``uneven``: which only have more work, ``within_steps`` also where another rank has it after
   each collective
5. ``rows``: how steady and how sure each is, as ``StragglerRow``
6. ``contention``: which of these only waited for a core
"""
