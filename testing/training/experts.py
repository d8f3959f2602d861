"""A mixture of experts whose tokens travel between the ranks that have the experts, and ways to wrap it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo, ShardPlacementResult
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from lowbit_strategy import functional
from lowbit_strategy.codecs.base import DenseCodec

WIDTH, NUM_EXPERTS = 32, 4


class Experts(nn.Module):
    """Two-layer networks, stacked: this rank's part of them, where they are a `DTensor`."""

    def __init__(self, width: int = WIDTH, num: int = NUM_EXPERTS) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(num, width, 2 * width) * width**-0.5)
        self.down = nn.Parameter(torch.randn(num, 2 * width, width) * width**-0.5)

    def forward(self, tokens: Tensor, counts: Sequence[int]) -> Tensor:
        """Args:
        tokens: ``[n, width]``, expert by expert.
        counts: How many tokens each expert of this rank gets.
        """
        up, down = (each.to_local() if isinstance(each, DTensor) else each for each in (self.up, self.down))
        parts = zip(tokens.split(list(counts)), up, down, strict=True)
        return torch.cat([torch.relu(part @ first) @ second for part, first, second in parts])


class MixtureOfExperts(nn.Module):
    """Every token goes to one expert, on whatever rank of `group` that is. `group` None: this rank has all of them.

    Attributes:
        imbalance: The load-balancing loss of the last pass, 1 where all experts get as much: Fedus et al., "Switch
            Transformers", 2021, arXiv 2101.03961, equation 4 without alpha.
    """

    imbalance: Tensor

    def __init__(self, width: int = WIDTH, num: int = NUM_EXPERTS) -> None:
        super().__init__()
        self.norm, self.router = nn.LayerNorm(width), nn.Linear(width, num)
        self.experts = Experts(width, num)
        self.num = num
        self.group: dist.ProcessGroup | None = None
        self.codec: Any = DenseCodec("float32")  # of tokens between ranks

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.norm(x).flatten(0, -2)
        shares = self.router(tokens).softmax(-1)
        share, chosen = shares.max(-1)
        order = chosen.argsort(stable=True)
        sorted_tokens, num_each = tokens[order], torch.bincount(chosen, minlength=self.num)
        self.imbalance = self.num * (num_each / len(tokens)) @ shares.mean(0)
        if self.group is None:
            outs = self.experts(sorted_tokens, num_each.tolist())
        else:
            outs = self._travelled(sorted_tokens, num_each, self.group)
        return x + (torch.zeros_like(tokens).index_put((order,), outs) * share[:, None]).view_as(x)

    def _travelled(self, tokens: Tensor, num_each: Tensor, group: dist.ProcessGroup) -> Tensor:
        num_ranks = dist.get_world_size(group)
        theirs = torch.empty_like(num_each)
        dist.all_to_all_single(theirs, num_each, group=group)
        sent, received = (each.view(num_ranks, -1).sum(1).tolist() for each in (num_each, theirs))
        there = functional.all_to_all(tokens, self.codec, input_splits=sent, output_splits=received, group=group)
        counts = theirs.view(num_ranks, -1)
        places = torch.arange(self.num // num_ranks).repeat(num_ranks).repeat_interleave(counts.flatten())
        order = places.argsort(stable=True)
        done = torch.zeros_like(there).index_put((order,), self.experts(there[order], counts.sum(0).tolist()))
        return functional.all_to_all(done, self.codec, input_splits=received, output_splits=sent, group=group)


def distribute(module: MixtureOfExperts, mesh: DeviceMesh) -> None:
    """Each rank of `mesh` keeps its experts."""
    module.group = mesh.get_group()
    for name, param in list(module.experts.named_parameters()):
        setattr(module.experts, name, nn.Parameter(distribute_tensor(param.detach(), mesh, [Shard(0)])))


LAYOUTS = ("module", "parameter", "hsdp", "whole", "left out")


def wrap(model: nn.Sequential, layout: str) -> DeviceMesh:
    """Wrap a sequence of modules, some of them mixtures of experts, on four ranks. Returns the data-parallel mesh.

    | layout | |
    |---|---|
    | module | two ranks have the experts, sharded over the other dim: ``fully_shard`` of its own |
    | parameter | the same by ``shard_placement_fn``, as torchtitan does |
    | hsdp | the same, replicated instead of sharded over the other dim, and the rest over all ranks |
    | whole | each of four ranks has an expert alone, in a mesh of one rank |
    | left out | the same, left out by ``ignored_params`` |
    """
    alone = layout in ("whole", "left out")
    shape = (1, 4) if alone else (dist.get_world_size() // 2, 2)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("efsdp", "ep"))
    everyone = mesh["efsdp", "ep"]._flatten("dp")
    beside = mesh["efsdp"]
    if layout == "hsdp":
        whole = init_device_mesh("cpu", (2, 1, 2), mesh_dim_names=("replicate", "efsdp", "ep"))
        mesh, beside = whole, whole["replicate", "efsdp"]
        shards = whole["efsdp", "ep"]._flatten("shard")
        everyone = DeviceMesh._concatenate([whole["replicate"], shards])
    for part in model:
        ignored: set[nn.Parameter] = set()
        options: dict[str, Any] = {}
        if isinstance(part, MixtureOfExperts):
            distribute(part, mesh["ep"])
            experts = set(part.experts.parameters())
            if layout == "left out":
                ignored = experts
            elif layout == "parameter":
                options["shard_placement_fn"] = placements(experts, everyone, beside)
            else:
                fully_shard(part.experts, mesh=beside)
        fully_shard(part, mesh=everyone, ignored_params=ignored, **options)
    left = {p for part in model if isinstance(part, MixtureOfExperts) for p in part.experts.parameters()}
    fully_shard(model, mesh=everyone, ignored_params=left if layout == "left out" else None)
    for part in model.modules() if layout == "module" else ():
        if isinstance(part, FSDPModule):
            part.set_force_sum_reduction_for_comms(True)  # gloo's only way to divide by another number
        if isinstance(part, Experts):
            part.set_gradient_divide_factor(4.0)  # type: ignore[operator]  # FSDP2's
    return everyone


def placements(experts: set[nn.Parameter], everyone: DeviceMesh, beside: DeviceMesh) -> Any:
    """For ``shard_placement_fn``."""
    of_experts, of_others = FSDPMeshInfo(beside, shard_mesh_dim=0), FSDPMeshInfo(everyone, shard_mesh_dim=0)
    return lambda param: ShardPlacementResult(Shard(0), of_experts if param in experts else of_others)
