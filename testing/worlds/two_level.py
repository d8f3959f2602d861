"""Nodes of several ranks in one process, each rank in a thread: the real engines and hooks' stages over two levels.

A bucket is reduced as under DDP (`all_reduce`), under FSDP2 sharded over all ranks (`reduce_scatter`), or under HSDP
(`replicas`), from what every rank has of it to what every rank gets.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal

import torch
from torch import Tensor

from lowbit_strategy.collectives.comm import Comm, wait_for_all
from lowbit_strategy.collectives.layout import TensorSpec, dim0_row_numel, row_length
from lowbit_strategy.engine.bucket import BucketLayout
from lowbit_strategy.engine.engine import GradientSync
from lowbit_strategy.engine.two_levels import TwoLevelBuckets, reduce_scatter
from lowbit_strategy.methods._base.compressor import Compressor
from lowbit_strategy.ranks.ranks import Ranks
from lowbit_strategy.ranks.topology import NodeCoding
from testing.worlds.threaded import ThreadedWorld

Kind = Literal["ddp", "fsdp", "hsdp"]
Grads = Mapping[str, Tensor]  # flat, by parameter


class NodesWorld:
    """`num_nodes` times `per_node` ranks.

    Args:
        kind: What the model is wrapped in; for ``hsdp`` a node has one replica.
        compressor: Between nodes.
        specs: Parameters.
        coding: As in `Ranks`.
        options: Of every engine.
    """

    def __init__(
        self,
        kind: Kind,
        compressor: Compressor,
        specs: Sequence[TensorSpec],
        num_nodes: int,
        per_node: int,
        *,
        coding: NodeCoding | None = None,
        **options: Any,
    ) -> None:
        self.kind, self.specs, self.num_nodes, self.per_node = kind, list(specs), num_nodes, per_node
        self.size = num_nodes * per_node
        world = ThreadedWorld(self.size)
        intra_node = [ThreadedWorld(per_node) for _ in range(num_nodes)]
        peers = [ThreadedWorld(num_nodes) for _ in range(per_node)]
        self.worlds = [world, *intra_node, *peers]
        self.intra_node: list[Comm] = [intra_node[r // per_node].comms[r % per_node] for r in range(self.size)]
        self.syncs = [
            GradientSync(
                compressor,
                specs,
                Ranks(
                    everyone=world.comms[r],
                    peers=peers[r % per_node].comms[r // per_node],
                    intra_node=self.intra_node[r],
                    coding=coding,
                ),
                torch.device("cpu"),
                sharded=kind == "fsdp",
                **options,
            )
            for r in range(self.size)
        ]
        self._buckets = [TwoLevelBuckets(sync) for sync in self.syncs]
        self._threads = ThreadPoolExecutor(self.size, thread_name_prefix="rank")

    def __enter__(self) -> NodesWorld:
        return self

    def __exit__(self, *error: object) -> None:
        self._threads.shutdown()
        for world in self.worlds:
            world.close()

    def on_all(self, run: Callable[[int], Any]) -> list[Any]:
        """``run(rank)`` in every rank's thread."""

        def guarded(rank: int) -> Any:
            try:
                return run(rank)
            except BaseException:
                for world in self.worlds:
                    world.abort()
                raise

        futures = [self._threads.submit(guarded, rank) for rank in range(self.size)]
        errors = [future.exception() for future in futures]
        first = [error for error in errors if error is not None and not isinstance(error, threading.BrokenBarrierError)]
        if first or any(errors):
            raise (first or [error for error in errors if error])[0]
        return [future.result() for future in futures]

    def step(self, grads: Sequence[Grads]) -> list[dict[str, Tensor]]:
        """One optimizer step in one bucket: every rank's means, of whole parameters (DDP) or of its own rows."""

        def run(rank: int) -> dict[str, Tensor]:
            means = getattr(self, f"_{self.kind}")(rank, grads[rank])
            self.syncs[rank].end_step()
            return means

        return self.on_all(run)

    def whole(self, means: Sequence[Grads]) -> dict[str, Tensor]:
        """Whole means from what the ranks of one node (FSDP2: of all) hold."""
        if self.kind == "ddp":
            return dict(means[0])
        rows = means if self.kind == "fsdp" else means[: self.per_node]
        return {spec.name: torch.cat([row[spec.name] for row in rows]) for spec in self.specs}

    def unsent(self) -> dict[str, Tensor]:
        """What the results so far lack of the true mean, of whole parameters."""
        total = {spec.name: torch.zeros(spec.numel) for spec in self.specs}
        for sync in self.syncs:
            for name, spec in sync.specs.items():
                own, at = sync.state.export_unsent(name), 0
                if spec.whole_shape is None or own is None:
                    continue
                for start, length in spec.ranges:
                    total[name][start : start + length] += own[at : at + length] / self.num_nodes
                    at += length
        return total

    def _ddp(self, rank: int, grads: Grads) -> dict[str, Tensor]:
        entries, parts = _entries((spec.name, grads[spec.name]) for spec in self.specs if spec.numel)
        x = torch.cat(parts)
        self.syncs[rank].begin_step()
        _run(self._buckets[rank].reduce(BucketLayout(entries), x))
        means = {name: x[at : at + grads[name].numel()] for name, at in entries}
        return {spec.name: means.get(spec.name, torch.empty(0)) for spec in self.specs}

    def _fsdp(self, rank: int, grads: Grads) -> dict[str, Tensor]:
        x_WN, entries, rows = self._rows(grads, self.size)
        out = torch.full((x_WN.shape[1],), 3.0)
        layout = BucketLayout(entries, x_WN.shape[1])
        self.syncs[rank].begin_step()
        sync = self.syncs[rank]
        _run(itertools.chain(*reduce_scatter(sync, layout, x_WN.view(-1), out, ranks=sync.ranks)))
        out /= self.size
        return {name: out[at : at + row_length(grads[name].numel(), rows[name], rank)] for name, at in entries}

    def _hsdp(self, rank: int, grads: Grads) -> dict[str, Tensor]:
        x_WN, entries, rows = self._rows(grads, self.per_node)
        out = torch.empty(x_WN.shape[1])
        sync, index = self.syncs[rank], rank % self.per_node
        own = tuple(entry for entry in entries if sync.specs[entry[0]].numel)
        layout = BucketLayout(own, alone=True, names=tuple(name for name, _ in entries))
        sync.begin_step()
        (means,) = sync.node_means.values()
        _run(means.mean_of_rows(layout, x_WN.view(-1), out.view(1, -1)))
        _run(sync.reduce(layout, out, out))
        return {name: out[at : at + row_length(grads[name].numel(), rows[name], index)] for name, at in entries}

    def _rows(self, grads: Grads, num_rows: int) -> tuple[Tensor, tuple[tuple[str, int], ...], dict[str, int]]:
        rows = {spec.name: dim0_row_numel(spec.shape, num_rows) for spec in self.specs}
        entries, padded, at = [], [], 0
        for name, row in rows.items():
            flat = grads[name]
            padded.append(torch.nn.functional.pad(flat, (0, row * num_rows - flat.numel())).view(num_rows, -1))
            entries.append((name, at))
            at += row
        return torch.cat(padded, 1), tuple(entries), rows


def _entries(named: Iterable[tuple[str, Tensor]]) -> tuple[tuple[tuple[str, int], ...], list[Tensor]]:
    entries, parts, at = [], [], 0
    for name, values in named:
        entries.append((name, at))
        parts.append(values)
        at += values.numel()
    return tuple(entries), parts


def _run(stages: Iterable[Any]) -> None:
    wait_for_all(stages)
