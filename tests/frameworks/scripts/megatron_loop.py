"""Megatron-core's loop on CPU: a small GPT, any tensor and pipeline size, its schedules, DDP, optimizer and timers."""

import argparse
import contextlib
from functools import partial

import megatron.core
import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel.schedules import get_forward_backward_func
from megatron.core.timers import Timers
from megatron.core.transformer.transformer_config import TransformerConfig
from torch.overrides import TorchFunctionMode
from witness import Witness

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=8)
parser.add_argument("--tensor-model-parallel-size", type=int, default=1)
parser.add_argument("--pipeline-model-parallel-size", type=int, default=1)
parser.add_argument("--virtual-pipeline-model-parallel-size", type=int, default=None)
parser.add_argument("--deallocate-pipeline-outputs", action="store_true")
parser.add_argument("--num-microbatches", type=int, default=4)
parser.add_argument("--use-distributed-optimizer", action="store_true")
options = parser.parse_args()
SEQUENCE, BATCH, VOCABULARY = 16, 2, 64


class OnCpu(TorchFunctionMode):
    """Megatron asks for CUDA by name; give it the CPU."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if kwargs.get("device") == "cuda":
            kwargs["device"] = "cpu"
        result = function(*args, **kwargs)
        if function is torch.Tensor.type and len(args) == 1:
            return result.replace("torch.", "torch.cuda.")
        return result


torch.cuda.current_device = lambda: torch.device("cpu")
OnCpu().__enter__()
tensor_parallel.get_cuda_rng_tracker().fork = lambda *_, **__: contextlib.nullcontext()
torch.set_num_threads(1)
torch.manual_seed(0)
dist.init_process_group("gloo")
parallel_state.initialize_model_parallel(
    tensor_model_parallel_size=options.tensor_model_parallel_size,
    pipeline_model_parallel_size=options.pipeline_model_parallel_size,
    virtual_pipeline_model_parallel_size=options.virtual_pipeline_model_parallel_size,
)
timers = Timers(0, "max")
config = TransformerConfig(
    num_layers=4,
    hidden_size=32,
    num_attention_heads=4,
    use_cpu_initialization=True,
    tensor_model_parallel_size=options.tensor_model_parallel_size,
    pipeline_model_parallel_size=options.pipeline_model_parallel_size,
    virtual_pipeline_model_parallel_size=options.virtual_pipeline_model_parallel_size,
    pipeline_dtype=torch.float32,
    batch_p2p_sync=False,
    deallocate_pipeline_outputs=options.deallocate_pipeline_outputs,
    attention_dropout=0.0,
    hidden_dropout=0.0,
    bias_dropout_fusion=False,
    gradient_accumulation_fusion=False,
    masked_softmax_fusion=False,
    timers=timers,
)


def provide(stage):
    return GPTModel(
        config=config,
        transformer_layer_spec=get_gpt_layer_local_spec(),
        vocab_size=VOCABULARY,
        max_sequence_length=SEQUENCE,
        pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=stage),
        post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=stage),
        vp_stage=stage,
    )


virtual = options.virtual_pipeline_model_parallel_size
ddp = DistributedDataParallelConfig(use_distributed_optimizer=options.use_distributed_optimizer)
chunks = [
    DistributedDataParallel(config, ddp, provide(stage)) for stage in ([None] if virtual is None else range(virtual))
]
config.finalize_model_grads_func = finalize_model_grads
optimizer = get_megatron_optimizer(
    OptimizerConfig(optimizer="adam", lr=1e-3, use_distributed_optimizer=options.use_distributed_optimizer), chunks
)
forward_backward = get_forward_backward_func()


def loss_of(output):
    loss = output.float().mean()
    return loss, {"loss": loss.detach()}


def forward_step(batches, model):
    tokens = torch.randint(0, VOCABULARY, (BATCH, SEQUENCE))
    positions = torch.arange(SEQUENCE).expand(BATCH, -1)
    mask = torch.ones(1, 1, SEQUENCE, SEQUENCE, dtype=torch.bool).triu(1)
    return model(tokens, positions, mask, labels=tokens), partial(loss_of)


def run(forward_only):
    return forward_backward(
        forward_step_func=forward_step,
        data_iterator=None if virtual is None else [None] * virtual,
        model=chunks if virtual is not None else chunks[0],
        num_microbatches=options.num_microbatches,
        seq_length=SEQUENCE,
        micro_batch_size=BATCH,
        forward_only=forward_only,
    )


witness = Witness(
    megatron.core.distributed.param_and_grad_buffer,
    megatron.core.pipeline_parallel.schedules,
    megatron.core.timers.DummyTimer,
    megatron.core.timers.Timer,
    Timers,
    torch.autograd,
    dist,
)
steps = 0
for _ in range(options.steps):
    for chunk in chunks:
        chunk.zero_grad_buffer()
    optimizer.zero_grad()
    run(forward_only=False)
    witness.look()
    optimizer.step()
    steps += 1
    if steps == 4:  # evaluation between the steps
        for chunk in chunks:
            chunk.eval()
        with torch.no_grad():
            run(forward_only=True)
        for chunk in chunks:
            chunk.train()
witness.report(dist.get_rank(), dist.get_world_size(), steps)
