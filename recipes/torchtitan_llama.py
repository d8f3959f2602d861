"""torchtitan: its Llama, its tensor parallelism and FSDP2, and one line for compression.

    pip install torchtitan
    torchrun --nproc-per-node 4 -m recipes.torchtitan_llama --steps 60

torchtitan's trainer (0.3.0) needs GPUs and was not run; this loop calls what it calls, on CPUs: `ParallelDims`,
`parallelize_llama`. Around the trainer, where it is made and started, it is the same line:

    trainer = config.build()
    session = compress(trainer.model_parts[0], trainer.optimizers.optimizers, LoCo())
    trainer.train()

Ranks and dims are read from the model: with 4 ranks two have a model together by tensor parallelism, and gradients are
compressed between two such pairs. Experts of its mixtures, which are on another mesh, are served in the same way; its
own expert parallelism needs GPUs, too, and was not run. A pipeline's stages are `nn.ModuleList(trainer.model_parts)`.
"""

from __future__ import annotations

import argparse
import os
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn import functional as F
from torchtitan.config import CompileConfig, ParallelismConfig, TrainingConfig
from torchtitan.distributed import ParallelDims, parallel_dims
from torchtitan.distributed.activation_checkpoint import SelectiveAC
from torchtitan.models import llama3
from torchtitan.models.common.attention import ScaledDotProductAttention
from torchtitan.tools import utils

from lowbit_strategy import LoCo, compress
from recipes.text import standard_library

VOCABULARY, CONTEXT, BATCH = 256, 64, 8


def on_cpus() -> None:
    """What torchtitan takes for granted on GPUs."""
    utils.device_type, utils.device_module, parallel_dims.device_type = "cpu", torch.cpu, "cpu"
    llama3.get_attention_config = lambda backend: ScaledDotProductAttention.Config()  # FlexAttention compiles for GPUs


def small_llama(width: int = 32, depth: int = 2, heads: int = 4) -> Any:
    """Torchtitan's configuration of a model of 27,000 parameters."""
    rope = llama3.ComplexRoPE.Config(dim=width // heads, max_seq_len=CONTEXT, theta=500000, scaling="llama")
    layers = llama3._build_llama3_layers(
        n_layers=depth, dim=width, n_heads=heads, hidden_dim=2 * width, rope=rope, fuse_qkv=True, attn_backend="sdpa"
    )
    return llama3.Llama3Model.Config(
        dim=width,
        vocab_size=VOCABULARY,
        tok_embeddings=llama3.Embedding.Config(
            num_embeddings=VOCABULARY, embedding_dim=width, param_init=llama3._EMBEDDING_INIT
        ),
        norm=llama3.RMSNorm.Config(normalized_shape=width, param_init=llama3._NORM_INIT),
        lm_head=llama3.Linear.Config(
            in_features=width, out_features=VOCABULARY, param_init=llama3._output_linear_init(width)
        ),
        layers=layers,
    )


def parallel_model(tensor_parallel: int) -> tuple[nn.Module, ParallelDims]:
    """As torchtitan's trainer makes it: on the meta device, parallelized, then initialized."""
    training = TrainingConfig(local_batch_size=BATCH, seq_len=CONTEXT)
    world_size = dist.get_world_size()
    parallelism = ParallelismConfig(
        data_parallel_shard_degree=world_size // tensor_parallel,
        tensor_parallel_degree=tensor_parallel,
        spmd_backend="partial_dtensor",
    )
    dims = ParallelDims.from_config(parallelism, world_size)
    config, debug = small_llama(), SimpleNamespace(moe_force_load_balance=False)
    config.update_from_config(config=SimpleNamespace(training=training, parallelism=parallelism, debug=debug))
    with torch.device("meta"):
        model = config.build()
    llama3.parallelize_llama(
        model,
        parallel_dims=dims,
        training=training,
        parallelism=parallelism,
        compile_config=CompileConfig(enable=False),
        ac_config=SelectiveAC.Config(),
        dump_folder="runs",
    )
    model.to_empty(device="cpu")
    torch.manual_seed(0)
    with torch.no_grad():
        model.init_weights(buffer_device=None)
    for part in model.modules():
        if hasattr(part, "set_force_sum_reduction_for_comms"):
            part.set_force_sum_reduction_for_comms(True)  # gloo has no other way to leave the division to the loss
    return model.train(), dims


def batch(text: torch.Tensor, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    starts = torch.randint(text.numel() - CONTEXT, (BATCH, 1), generator=torch.Generator().manual_seed(seed))
    windows = text[starts + torch.arange(CONTEXT + 1)].long()
    return windows[:, :-1], windows[:, 1:]


def main() -> None:
    """Train on a few bytes of Python's standard library."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--tensor-parallel", type=int, default=2)
    parser.add_argument("--stock", action="store_true", help="without compression")
    options = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    on_cpus()
    model, dims = parallel_model(options.tensor_parallel)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    if not options.stock:
        session = compress(model, optimizer, LoCo())  # the line
    mesh, text = dims.get_mesh("batch"), standard_library("train")
    num_tokens = BATCH * CONTEXT * mesh.size()  # torchtitan divides the loss by the tokens of all ranks
    for step in range(options.steps):
        tokens, targets = batch(text, step * mesh.size() + mesh.get_local_rank())
        logits = model(tokens)
        whole = logits.full_tensor() if isinstance(logits, DTensor) else logits
        loss = F.cross_entropy(whole.flatten(0, 1).float(), targets.flatten(), reduction="sum") / num_tokens
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        total = loss.detach().clone()
        dist.all_reduce(total, group=mesh.get_group())
        if dist.get_rank() == 0 and (step + 1) % 10 == 0:
            print(f"step {step + 1}: loss {total.item():.4f}", flush=True)
    if not options.stock:
        session.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
