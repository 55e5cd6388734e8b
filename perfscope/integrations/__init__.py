"""PerfScope in other programs' own hooks: a few lines each on top of ``perfscope.record``.

``transformers`` has a callback for the Trainer, ``lightning`` a callback and a profiler. A module here imports its
framework, so import it only where that is used; ``import perfscope`` imports none of them. Ray Train needs no module:
``perfscope.record`` decorates the function that its workers run.
"""
