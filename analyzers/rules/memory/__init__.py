"""Rules on memory: ``memory_limit`` shards more where it is full, ``sharding_stage`` less where gathers cost time;
``offload``, ``pinned_memory`` and ``batch_copies`` are about copies between host and device. Of memory snapshots:
``out_of_memory``, why an allocation failed, ``memory_growth``, what is never freed, ``fragmentation``, what is held in
vain.
"""
