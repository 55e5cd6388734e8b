"""A rank that makes no step for the hang timeout writes what it does, and the training goes on.

``prepare`` is called when torch has been imported, before the script makes its process groups. ``watch`` looks from a
thread of its own whether steps are made, and writes two files when none is: ``stacks`` those of all threads,
``flight`` the last collectives, from torch's own flight recorder and, where that has gaps, from ``log``. Files of a
rank that moves on are removed again, so that a recording holds them only where the job stood still to its end.
"""
