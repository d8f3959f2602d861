"""``far_links=``: chooses the transport."""

from __future__ import annotations

from dataclasses import replace

from lowbit_strategy.attach.part import Part
from lowbit_strategy.attach.prepare import PreparedModel
from lowbit_strategy.attach.sync_options import SyncOptions


class FarLinksOption(Part):
    """Whether to use the transport for far ranks; None: a measured round trip decides."""

    def __init__(self, options: SyncOptions) -> None:
        self._far = options.far_links

    def on_ranks(self, prepared: PreparedModel) -> PreparedModel:
        return replace(prepared, topology=replace(prepared.topology, far=self._far))
