"""The trace of one rank, and values that every analysis shares.

``trace`` is the data model: what ``analyzers/readers`` produce and ``analyzers/rank`` consumes; ``columns`` has the
arrays of its events while a reader fills them. ``clock`` sets the ranks' clocks against each other, with the robust
statistics of ``medians``. ``hardware`` has the devices' peaks, ``custom_flops`` the user's FLOP formulas, ``protobuf``
the encoding that ``perfscope merge`` and TensorBoard need.
"""
