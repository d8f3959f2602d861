"""Which weights a model has on one rank: its own, or the anchors that all ranks share."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from lowbit_strategy.engine.engine import GradientSync
from lowbit_strategy.rounds.averaged_buffers import AveragedBuffers
from lowbit_strategy.rounds.fragment import Fragment

_log = logging.getLogger("lowbit_strategy")


class AnchoredModel:
    """A model that is trained locally, in fragments.

    Args:
        fragments: Its parameters, each with an anchor.
        buffers: Of the model.
        sync: Learns where its weights have changed beside an optimizer's steps.
    """

    def __init__(self, fragments: Sequence[Fragment], buffers: AveragedBuffers, sync: GradientSync) -> None:
        self.fragments = list(fragments)
        self.buffers = buffers
        self._sync = sync
        # this rank's own weights and buffers, while the model has what all ranks share
        self._aside: tuple[dict[str, Tensor], dict[str, Tensor]] | None = None

    @property
    def anchors(self) -> dict[str, Tensor]:
        """float32, by name."""
        return {name: anchor for fragment in self.fragments for name, anchor in fragment.anchors.items()}

    @property
    def params(self) -> dict[str, Tensor]:
        """What the model computes with, by name."""
        return {name: param for fragment in self.fragments for name, param in fragment.params.items()}

    @property
    def own_weights(self) -> dict[str, Tensor]:
        """This rank's, whatever the model has at present."""
        return self.params if self._aside is None else self._aside[0]

    def state_of_buffers(self) -> dict[str, dict[str, Tensor]]:
        """Likewise: this rank's own, what all ranks share of them, and what has no mean."""
        own = self.buffers.own if self._aside is None else self._aside[1]
        return {"shared": self.buffers.shared, "own": own, "private": self.buffers.private}

    def compare_buffers(self) -> None:
        """In a turn, on all ranks: average what differs between them, and warn of what has no mean."""
        comm = self._sync.ranks.peers
        before = comm.sent_nbytes
        names = self.buffers.compare(comm, self._sync.device)
        self._sync.byte_check.besides(comm.sent_nbytes - before)
        if names and self._sync.ranks.rank == 0:
            _log.warning(
                "%s%s differ between ranks and have no mean, as they are no floating point numbers: each rank goes on"
                " with its own. A checkpoint has those of the first rank, and each rank's own beside the residuals",
                ", ".join(names[:3]),
                f" and {len(names) - 3} more" if names[3:] else "",
            )

    @contextlib.contextmanager
    def shared(self) -> Iterator[None]:
        """The model has the anchors and the averaged buffers inside; may be nested."""
        if self._aside is not None:
            yield
            return
        weights, buffers = self.params, self.buffers.own
        self._aside = {k: v.clone() for k, v in weights.items()}, {k: v.clone() for k, v in buffers.items()}
        self.use_shared()
        try:
            yield
        finally:
            if self._aside is not None:  # nobody has called `keep`
                weights, buffers = self._aside
                self.use(weights)
                self.buffers.use(buffers)
                self._aside = None

    @torch.no_grad()
    def use(self, weights: Mapping[str, Tensor]) -> None:
        """Put these, as far as there are any, into the model."""
        for name, param in self.params.items():
            if name in weights:
                param.copy_(weights[name])
        self._changed()

    def differs(self, anchors: Mapping[str, Tensor]) -> bool:
        """Whether the model has other weights than `anchors`, as far as there are any."""
        kept = {name: param for name, param in self.params.items() if name in anchors}
        return any(not torch.equal(param, anchors[name].to(param.dtype)) for name, param in kept.items())

    def has_other_weights(self, anchors: Mapping[str, Tensor]) -> bool:
        """Whether the model has other weights than these, on this rank or on one that has the same model."""
        differs = torch.tensor(int(self.differs(anchors)), device=self._sync.device)
        if self._sync.ranks.intra_node is not None:
            self._sync.ranks.intra_node.all_reduce_max(differs).wait()
        return bool(differs)

    def keep(self) -> None:
        """In `shared`: this rank goes on from what the model has."""
        self._aside = None

    def rebase(self) -> None:
        """What the model has are the anchors from now on."""
        for fragment in self.fragments:
            fragment.rebase()
        self.buffers.rebase()

    @torch.no_grad()
    def rebase_on_mean(self, names: Iterable[str]) -> None:
        """Each rank has these in its own way: their anchors are the mean. On all ranks."""
        peers = self._sync.ranks.peers.twin()  # beside the engine's counters
        for name in names:
            total = self.anchors[name].contiguous()
            peers.all_reduce(total).wait()
            self.anchors[name].copy_(total / peers.world_size)
        peers.end()

    def use_shared(self) -> None:
        """The model has the anchors and the averaged buffers from now on."""
        for fragment in self.fragments:
            fragment.pull_(0.0)
        self._changed()
        self.buffers.use(self.buffers.shared)

    def _changed(self) -> None:
        if self._sync.weights is not None:
            self._sync.weights.invalidate()
