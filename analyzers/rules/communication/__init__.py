"""Rules on communication: is it exposed, and which setting of the wrapper or of NCCL overlaps or shortens it?

In: a ``RuleContext``. Out: a finding, or None. Most rules look at ``traffic``, what a group of ranks sends per step, or
at ``reductions``, the all-reduces of gradients, whose sizes need not be known. DDP: ``ddp_buckets`` (bounded by
``small_buckets`` where latency is not known), ``ddp_buffers``, ``bucket_view``, ``no_sync``, ``gradient_compression``
and ``unused_parameters``, which write their settings with ``ddp_arguments``. FSDP: ``fsdp_no_sync``, ``fsdp_prefetch``,
``fsdp_reduce_dtype``. DeepSpeed: ``deepspeed_buckets``. Megatron: ``megatron_overlap`` and ``tensor_parallel_span``.
NCCL itself: ``nccl_environment``, and ``host_backend`` where it is not used. What loops write out:
``gradients_by_hand``, ``loop_collectives``; what may be either: ``late_gradients``. What layers need:
``sync_batch_norm``.
"""
