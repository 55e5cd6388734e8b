"""Replay: the recorded steps of all ranks, simulated from their dependency graph.

In come the aligned ranks (``job.aligned.AlignedJob``); out come their schedules, when everything in a replay happens,
and schedules changed for a question. The work passes through:

1. ``rank_ops``: each rank's part in the collectives: what it follows, how long after it could start, how long it takes
2. ``schedules``: every rank's ops in order, with its own time between them (``RecordedSchedules``); ``program`` has the
   ops, ``lanes`` the host beside the device
3. ``engine``: replays schedules; knows nothing of training
4. ``job_replay``: ranks aligned, schedules made and replayed unchanged: what the summary and what-ifs start from
5. ``peers``: which ranks do the same work, and where each is in it
6. ``pace``: schedules with some ranks at their peers' pace; ``step_time``: what a step takes in a changed replay;
   ``variation``: how far few steps are from many; ``latency``: that of collectives which moved one size only;
   ``uneven_sizes``: what all-to-alls take where no rank moves more than others
7. ``stragglers``: which ranks the others wait for, found by such replays
"""
