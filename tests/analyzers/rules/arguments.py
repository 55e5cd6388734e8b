"""The arguments of frameworks that advice names; ``tests/frameworks`` compares them with the frameworks themselves."""

from __future__ import annotations

ARGUMENTS = {
    "lightning.pytorch.Trainer": "accumulate_grad_batches detect_anomaly enable_progress_bar log_every_n_steps "
    "precision strategy use_distributed_sampler",
    "lightning.pytorch.strategies.DDPStrategy": "broadcast_buffers bucket_cap_mb ddp_comm_hook find_unused_parameters "
    "gradient_as_bucket_view static_graph",
    "lightning.fabric.Fabric": "precision strategy",
    "lightning.fabric.strategies.DDPStrategy": "broadcast_buffers bucket_cap_mb find_unused_parameters "
    "gradient_as_bucket_view static_graph",
    "accelerate.Accelerator": "dataloader_config gradient_accumulation_steps kwargs_handlers mixed_precision",
    "accelerate.DistributedDataParallelKwargs": "broadcast_buffers bucket_cap_mb comm_hook find_unused_parameters "
    "gradient_as_bucket_view static_graph",
    "accelerate.utils.DataLoaderConfiguration": "non_blocking",
    "transformers.TrainingArguments": "average_tokens_across_devices bf16 dataloader_num_workers "
    "dataloader_persistent_workers dataloader_pin_memory dataloader_prefetch_factor ddp_broadcast_buffers "
    "ddp_bucket_cap_mb ddp_find_unused_parameters ddp_static_graph fp16 "
    "gradient_accumulation_steps gradient_checkpointing logging_nan_inf_filter logging_steps optim output_dir "
    "per_device_train_batch_size tf32 torch_compile torch_compile_mode",
}
"""Function or class -> its arguments, as advice names them."""
