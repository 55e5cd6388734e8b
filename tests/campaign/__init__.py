"""The campaign against hostile and damaged files, kills and load: ``python -m tests.campaign``.

- ``inputs``: mutated files of every kind that is read, some of them through the whole analysis
- ``kills``: rank, launcher, ``perfscope`` and sampler of real trainings killed at random moments

What is done to a file is in ``mutators``, the files in ``seeds``, how each kind is read in ``kinds`` (by readers) and
``whole`` (by the analysis), and ``supervise`` runs the inputs: each is determined by the seed and its number.
"""
