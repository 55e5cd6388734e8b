"""Jobs that come to a standstill, simulated: what flight recorders of NCCL ranks hold then, and which rank it was.

``program`` is what a rank issues, ``layouts`` the programs of DDP, FSDP and meshes of tensor, pipeline, data and expert
parallelism, ``machine`` runs them by NCCL's rules until nothing moves, ``faults`` breaks one or two ranks, ``dumps``
writes what torch would, and ``jobs`` draws a random one with its truth. Nothing is shared with the analyzers.
"""
