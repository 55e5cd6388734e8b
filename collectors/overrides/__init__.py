"""Settings that ``perfscope tune`` tries, applied from outside: no module here is imported in an ordinary run.

``overrides`` applies those of ``ddp``, ``loader``, ``no_sync`` and ``deepspeed``; ``log`` notes what was replaced for
the run's metadata; ``stop`` ends the training after a number of steps.
"""
