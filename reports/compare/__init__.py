"""Reports of comparisons and checks: a ``Comparison`` or a ``Check`` in, a page or text out.

``words`` has the sentences and names that all formats share. ``pictures`` and ``tables`` prepare the content of the
``page``; ``terminal`` writes plain text. Markdown and JUnit XML are in ``reports.markdown`` and ``reports.junit``.
"""
