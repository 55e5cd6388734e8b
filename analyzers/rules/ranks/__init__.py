"""Rules on differences between ranks: ``imbalanced_work`` and ``pipeline_imbalance`` for unequal work,
``straggling_rank`` with ``remedies`` for unequal speed, ``pipeline_bubble`` for the waiting that even stages have too.
"""
