"""Jobs with a planted cause, analyzed as a user would, against an answer that is known otherwise.

In the order of how much they cover:

- ``test_causes``: one small generated job for each cause; every number of the summary against the simulator's state.
- ``test_at_scale`` (over ``jobs``): every cause in every strategy on 8 ranks, some on 64: the straggler and its cost.
  ``python -m tests.benchmarks.planted`` prints the whole table.
- ``test_random`` (over ``draw`` and ``judge``): seeds of random jobs that were once judged wrongly.
  ``python -m tests.benchmarks.planted_random`` draws new ones.
- ``tests.real.test_planted_runs``: real trainings with a planted cause, against the script's own stopwatch.
  ``python -m tests.benchmarks.real_runs`` plants more.
"""
