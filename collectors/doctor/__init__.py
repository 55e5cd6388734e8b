"""``perfscope doctor``: ``doctor`` runs the probes of ``torch`` and ``host``; ``check`` defines what a probe is."""
