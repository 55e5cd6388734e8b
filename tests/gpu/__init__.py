"""The acceptance run on a GPU: ``make gpu``, or ``python -m tests.gpu`` where torch with CUDA is installed already.

``job.py`` is the training (user code with a stopwatch, CUDA events and counters of its own), ``recorded.py`` runs it
under ``perfscope run`` and reads what comes out, ``raw.py`` adds up the raw trace events by itself. ``account.py``,
``changes.py``, ``several.py`` and ``care.py`` compare the two: each check is a ``Point`` with what was expected, what
was found, and whether it holds. Nothing that is expected comes from the code under test.

Without a GPU the same checks can be tried on the CPU (``--device cpu``), as far as they make sense there; the points
that need a GPU are then skipped, and say so.
"""
