"""What-if: the recorded steps replayed with settings changed.

In comes a replayed job (``replay.job_replay.JobReplay``) and settings as the user types them; out comes a
``WhatIfAnswer``: step time measured, replayed unchanged, and predicted (low, mid, high). The work passes through:

1. ``whatif``: ``perfscope.whatif``, from a path to an answer
2. ``predict``: all settings by name; edits the schedules, replays them, says how sure that is
3. ``change``: what every setting builds on: context, costs of transfers, refusals, uncertainty
4. ``schedules``: the recorded schedules as objects that can be edited; ``unprofiled``: without the profiler's cost;
   ``ranges``: low and high of the answer, and what CPUs do sooner where less is sent
5. the settings: ``speed`` (ranks, computation, host, network), ``extra_work`` (what need not be done), ``loader``,
   ``threads``, ``ddp`` with ``bucketing``, ``by_hand``, ``sharding`` (with ``sharding_recorded``, ``sharding_plan`` and
   ``sharding_on``), ``fsdp`` (with ``gathers`` and ``gather_limit``), ``microbatches`` (with ``stage_schedules`` and
   ``pipeline_turns``)
6. ``curves``: predictions over the values of a setting; ``stage_balance``: a pipeline with even stages
"""
