"""The weights of a module of FSDP2 on simulated ranks."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor

from lowbit_strategy.collectives.layout import TensorSpec, dim0_row_numel
from lowbit_strategy.collectives.ordered import Gathering
from lowbit_strategy.engine.weight_sync import WeightSync
from lowbit_strategy.kernels.digest import digests
from lowbit_strategy.methods.weight_codings import WeightCoding
from lowbit_strategy.model.module_layout import ModuleLayout
from testing.worlds.simulated import SimulatedWorld

CPU = torch.device("cpu")
SPECS = (TensorSpec("net.weight", (37, 50)), TensorSpec("net.bias", (37,)), TensorSpec("table", (40, 33), "embedding"))


class Shards:
    """A module's weights, cut over the ranks of a world."""

    def __init__(
        self,
        coding: WeightCoding,
        world_size: int,
        specs: Sequence[TensorSpec] = SPECS,
        dtype: torch.dtype = torch.float32,
        gatherings: Sequence[Gathering] = (),
    ) -> None:
        self.specs, self.world, self.dtype = tuple(specs), SimulatedWorld(world_size), dtype
        layout = ModuleLayout(specs=self.specs, dtype=dtype, num_gathers=2)
        self.syncs = [
            WeightSync(coding, {"net": layout}, {"net": gathering}, CPU)
            for gathering in gatherings or map(Gathering, self.world.comms)
        ]
        generator = torch.Generator().manual_seed(len(self.specs))
        self.values = {spec.name: torch.randn(spec.shape, generator=generator).to(dtype) for spec in self.specs}

    def step_(self, seed: int, size: float = 0.01) -> None:
        """What an optimizer does."""
        generator = torch.Generator().manual_seed(seed)
        for value in self.values.values():
            value += (size * torch.randn(value.shape, generator=generator)).to(self.dtype)

    def end_step(self) -> None:
        """After an optimizer's step."""
        for sync in self.syncs:
            sync.invalidate()
            sync.end_step()

    def look(self) -> dict[str, Tensor]:
        """`gather` in a forward pass between a backward pass and an optimizer's step."""
        for sync in self.syncs:
            sync.modules["net"].gradients_reduced()
            sync.modules["net"].begin_forward()
        return self.gather()

    def rows(self) -> Tensor:
        parts = []
        for spec in self.specs:
            row_numel = dim0_row_numel(spec.shape, self.world.size)
            flat = self.values[spec.name].reshape(-1)
            padded = torch.nn.functional.pad(flat, (0, row_numel * self.world.size - flat.numel()))
            parts.append(padded.view(self.world.size, -1))
        return torch.cat(parts, 1)

    def gather(self) -> dict[str, Tensor]:
        """What every rank has of every parameter; all ranks have the same bits."""
        rows_WN = self.rows()
        outs = [torch.full((rows_WN.numel(),), 7.0, dtype=self.dtype) for _ in self.syncs]
        runs = []
        for rank, (sync, out) in enumerate(zip(self.syncs, outs, strict=True)):
            own = out.view(self.world.size, -1)[rank]  # FSDP2's input is a part of its output
            own.copy_(rows_WN[rank])
            runs.append(sync.modules["net"].run(own, out, digests([own], CPU)))
        for pending in itertools.zip_longest(*runs):
            for handle in pending:
                if handle is not None:
                    handle.wait()
        views = [self._whole(out) for out in outs]
        for name, mine in views[0].items():
            for other in views[1:]:
                torch.testing.assert_close(other[name], mine, rtol=0, atol=0, equal_nan=True)
        return views[0]

    def _whole(self, out: Tensor) -> dict[str, Tensor]:
        found, at = {}, 0
        for spec in self.specs:
            row = dim0_row_numel(spec.shape, self.world.size)
            flat = out.view(self.world.size, -1)[:, at : at + row].reshape(-1)
            found[spec.name] = flat[: spec.numel].view(spec.shape).clone()
            at += row
        return found

    def sent(self) -> int:
        return self.syncs[0].comms[0].sent_nbytes
