"""The collectives of one rank: its trace in, ``Collectives`` (``collectives.py``) out.

``communication`` decides which events are communication. ``kernels`` (with device work) or ``host`` (without) describes
each of them as ``RawCollectives``, and ``raw`` orders these as ``Collectives``. ``job/collectives`` matches the
collectives of all ranks.
"""
