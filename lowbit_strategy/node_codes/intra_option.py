"""``intra=``: codes gradients inside a node, if there is something to code."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from lowbit_strategy.attach.part import Part
from lowbit_strategy.attach.prepare import PreparedModel
from lowbit_strategy.attach.sync_options import SyncOptions
from lowbit_strategy.node_codes.coding import BlockCoding


class NodeCodesOption(Part):
    """The bits per code inside a node; None: gradients are exact there."""

    def __init__(self, options: SyncOptions) -> None:
        self._bits = options.intra

    def check_options(self, options: Any) -> None:
        if self._bits not in (None, 8):
            raise ValueError(f"intra must be 8, for codes of 8 bits inside a node, or None, got {self._bits!r}")

    def on_ranks(self, prepared: PreparedModel) -> PreparedModel:
        if self._bits is None:
            return prepared
        if (obstacle := _nothing_inside(prepared)) is not None:
            raise ValueError(f"intra={self._bits} is not possible, because {obstacle}: leave it out")
        return replace(prepared, topology=replace(prepared.topology, coding=BlockCoding(self._bits)))


def _nothing_inside(prepared: PreparedModel) -> str | None:
    """Why gradients are not summed inside a node before they are compressed; None: they are."""
    options, topology = prepared.options, prepared.topology
    if prepared.wrapper != "hsdp":
        if topology.node_size is not None:
            return None
        if options.outer is not None:
            return "under DDP ranks take separate local steps"
        return topology.obstacle or ("two_level=False" if options.two_level is False else "nodes are not known")
    if topology.num_parts == 1:
        return "one rank has a whole model (shard_size=1)"
    return None if options.comes_and_goes or topology.num_peers > 1 else "all ranks share one model"
