"""Pipeline parallelism: an AlignedJob in, the Summary's Pipeline out.

The work passes through the modules in this order:

- ``stages``: the messages between the ranks of a pipeline, and the stage of each rank;
- ``schedule``: micro-batches, chunks and the schedule's name, by ranges, settings or the messages between stages;
- ``bubbles``: how long each rank waits for other stages, and in which part of the step;
- ``table``: all of it as the Summary shows it, with the ideal bubble.
"""
