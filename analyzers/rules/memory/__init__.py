"""Rules on memory: ``memory_limit`` shards more where it is full, ``sharding_stage`` less where gathers cost time;
``offload`` and ``pinned_memory`` are about copies between host and device.
"""
