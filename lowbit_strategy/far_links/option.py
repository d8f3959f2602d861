"""``far_links=``: which transport ranks get."""

from __future__ import annotations

from dataclasses import replace

from lowbit_strategy.attach.part import Part
from lowbit_strategy.attach.prepare import PreparedModel
from lowbit_strategy.attach.sync_options import SyncOptions


class FarLinksOption(Part):
    """One for ranks that are far apart, or not; None: as a measured round trip says."""

    def __init__(self, options: SyncOptions) -> None:
        self._far = options.far_links

    def on_ranks(self, prepared: PreparedModel) -> PreparedModel:
        return replace(prepared, topology=replace(prepared.topology, far=self._far))
