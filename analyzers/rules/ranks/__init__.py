"""Rules on differences between ranks: ``imbalanced_work`` and ``pipeline_imbalance`` for unequal work,
``straggling_rank`` with ``remedies`` for unequal speed, ``host_pauses`` for what hosts do besides, on all ranks or some
in turn, ``pipeline_bubble`` for the waiting that even stages have too.
"""
