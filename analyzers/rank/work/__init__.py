"""The tables of one rank: ``Attribution`` in, sums per name and step (``tables``) out.

``kernel_times``, ``operator_times``, ``range_times`` (modules, synchronizations), ``launch_times``, ``compiled_times``,
``quickest`` and ``flops`` compute one table each, with the sums of ``per_step``.
"""
