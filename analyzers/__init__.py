"""Analyzers: from files to a Summary.

The work passes through the packages in this order:

- ``readers``: a file in, a Trace out;
- ``rank``: a Trace in, a RankPartial out: everything that one rank shows by itself;
- ``read_ranks``: does both for every trace of a job, on this machine or on a cluster, through ``cached`` and
  ``stored_traces``, and identifies the ranks;
- ``job``: RankPartials in, an AlignedJob out, with aligned clocks and matched collectives; then tables across ranks;
- ``replay``: the recorded steps simulated from their dependency graph; stragglers are found with it;
- ``whatif``: a replay with settings changed, predicted step times out;
- ``rules``: results in, findings with evidence and an action out;
- ``verdict``: the headline, from the findings and ``losses``;
- ``summarize``: all of it in one Summary; ``verdict_of_run`` adds the step history of the run to its verdict;
  ``analyze`` starts it from a path.

Beside them: ``history`` (every step of a long run), ``hang`` (the job that stands still), ``snapshots`` (who holds the
memory), ``compare`` (several Summaries side by side) and ``merge`` (all ranks in one file for Perfetto). An import
contract holds this order: a package imports only from those before it.
"""
