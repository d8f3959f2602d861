"""Switches a model's weights and buffers between this rank's own and those that all ranks share."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from lowbit_strategy.collectives.comm import Comm
from lowbit_strategy.engine.engine import GradientSync
from lowbit_strategy.local_steps.averaged_buffers import AveragedBuffers
from lowbit_strategy.local_steps.fragment import Fragment

_log = logging.getLogger("lowbit_strategy")


class AnchoredModel:
    """A model that is trained with local steps, in fragments.

    Args:
        fragments: Its parameters, each with an anchor.
        buffers: Buffers of the model.
        sync: The engine, which is told when weights change outside optimizer steps.
        inside: The ranks of a replica; None: it is one rank.
    """

    def __init__(
        self, fragments: Sequence[Fragment], buffers: AveragedBuffers, sync: GradientSync, inside: Comm | None
    ) -> None:
        self.fragments = list(fragments)
        self.buffers = buffers
        self._inside = inside
        self._sync = sync
        # this rank's own weights and buffers, while the model has the shared ones
        self._aside: tuple[dict[str, Tensor], dict[str, Tensor]] | None = None

    @property
    def anchors(self) -> dict[str, Tensor]:
        """float32, by name."""
        return {name: anchor for fragment in self.fragments for name, anchor in fragment.anchors.items()}

    @property
    def params(self) -> dict[str, Tensor]:
        """The model's current weights, by name."""
        return {name: param for fragment in self.fragments for name, param in fragment.params.items()}

    @property
    def own_weights(self) -> dict[str, Tensor]:
        """This rank's weights, even inside `shared`."""
        return self.params if self._aside is None else self._aside[0]

    def state_of_buffers(self) -> dict[str, dict[str, Tensor]]:
        """The shared buffers, this rank's values of them (even inside `shared`), and values that are not averaged."""
        own = self.buffers.own if self._aside is None else self._aside[1]
        return {"shared": self.buffers.shared, "own": own, "private": self.buffers.private}

    def compare_buffers(self) -> None:
        """Average values that differ between ranks; warn if one cannot be averaged. Called on all ranks."""
        comm = self._sync.ranks.peers
        found = self.buffers.differing(comm, self._sync.device, range(comm.world_size))
        self.buffers.take_differing(found, warns=self._sync.ranks.logs)

    @contextlib.contextmanager
    def shared(self) -> Iterator[None]:
        """A context in which the model has the anchors and the averaged buffers; may be nested."""
        if self._aside is not None:
            yield
            return
        weights, buffers = self.params, self.buffers.own
        self._aside = {k: v.clone() for k, v in weights.items()}, {k: v.clone() for k, v in buffers.items()}
        self.use_shared()
        try:
            yield
        finally:
            if self._aside is not None:  # `keep` was not called
                weights, buffers = self._aside
                self.use(weights)
                self.buffers.use(buffers)
                self._aside = None

    def keep(self) -> None:
        """Let this rank continue from the model's current values. Called inside `shared`."""
        self._aside = None

    @torch.no_grad()
    def use(self, weights: Mapping[str, Tensor]) -> None:
        """Copy `weights` into the model; parameters without an entry are unchanged."""
        for name, param in self.params.items():
            if name in weights:
                param.copy_(weights[name])
        self._changed()

    def use_shared(self) -> None:
        """Give the model the anchors and the averaged buffers from now on."""
        for fragment in self.fragments:
            fragment.pull_(0.0)
        self._changed()
        self.buffers.use(self.buffers.shared)

    def _changed(self) -> None:
        if self._sync.weights is not None:
            self._sync.weights.invalidate()

    def differs(self, anchors: Mapping[str, Tensor]) -> bool:
        """Whether the model's weights differ from `anchors` on any rank of this replica."""
        kept = {name: param for name, param in self.params.items() if name in anchors}
        here = any(not torch.equal(param, anchors[name].to(param.dtype)) for name, param in kept.items())
        differs = torch.tensor(int(here), device=self._sync.device)
        if self._inside is not None:
            self._inside.all_reduce_max(differs).wait()
        return bool(differs)

    def rebase(self) -> None:
        """Set the anchors to the model's current weights and buffers."""
        for fragment in self.fragments:
            fragment.rebase()
        self.buffers.rebase()

    @torch.no_grad()
    def rebase_on_mean(self, names: Iterable[str]) -> None:
        """Set these anchors to the mean over the ranks. Called on all ranks."""
        peers = self._sync.ranks.peers.with_own_counter()  # with a separate byte counter
        for name in names:
            total = self.anchors[name].contiguous()
            peers.all_reduce(total).wait()
            self.anchors[name].copy_(total / peers.world_size)
        peers.end()
