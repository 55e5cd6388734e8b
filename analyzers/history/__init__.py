"""Step histories: the files with the time of every step in, the ``History`` of the run out.

``rank_history`` reads and reduces the file of one rank, in a worker, and ``own_times`` what it did itself, without its
waiting; ``excess`` compares the ranks' own times, ``stragglers`` names who delays the run; ``job_history`` makes the
history of the job from all of them; ``steps_only`` makes the Summary of a recording that has step histories and no
traces. ``verdict_of_run``, beside this package, adds the history to the verdict on traces.
"""
