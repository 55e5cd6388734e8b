"""Work of one rank that a setting would make unnecessary: the ``Trace`` in, ``ExtraWork`` (in ``partial``) out.

``extra_work`` finds activations computed again, conversions, copies and an optimizer's kernels; ``operator_loops``
other loops over many tensors.
"""
