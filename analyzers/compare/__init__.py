"""Comparisons: summaries of recordings in, a ``Comparison`` out; or one summary and a budget, and a ``Check``.

``compare`` loads the recordings and compares each candidate with the baseline. ``sample`` chooses the steps that are
compared, ``noise`` decides which differences are significant, by the test in ``significance``, and ``causes`` which
categories explain that of the step. Each of ``metrics`` (of the whole job, and how it scales), ``parts`` (critical
path, collectives, ranks, kernels, operators), ``settings`` and ``advised`` (findings, and predicted effects) makes its
part of a ``Difference``. ``check`` compares the metrics with the limits that ``budget_file`` reads.
"""
