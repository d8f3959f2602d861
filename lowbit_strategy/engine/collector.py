"""Under DDP, methods that look at the whole model wait for the last bucket, which reduces for all."""

from __future__ import annotations

from collections.abc import Sequence

from lowbit_strategy.collectives.layout import ParamView
from lowbit_strategy.methods._base.method import Method


class Collector:
    """Collects the views of one backward pass's buckets, for methods that need the whole model.

    A bucket is announced when DDP hands it in, on the autograd thread, and arrives when a worker reduces it. The last
    bucket may arrive before earlier ones, so it waits until all announced buckets have arrived.

    Args:
        names: All parameters, in the order in which methods see them, regardless of buckets.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self._order = {name: at for at, name in enumerate(names)}
        self._num_announced = 0
        self._complete = True  # the last bucket of the pass has been announced
        self._arrived: dict[Method, list[list[ParamView]]] = {}

    def announce(self, *, first: bool, last: bool) -> None:
        """Note that DDP has handed in a bucket, perhaps the `first` or the `last` of a pass. When a pass begins,
        nothing is in flight, and anything left by a failed pass is dropped.
        """
        if self._complete or first:
            self._num_announced, self._arrived = 0, {}
        self._num_announced += 1
        self._complete = last

    def arrive(self, method: Method, views: list[ParamView]) -> None:
        self._arrived.setdefault(method, []).append(views)

    def misses(self, method: Method) -> bool:
        """Whether the last bucket, which calls this, must wait for earlier ones."""
        return len(self._arrived[method]) < self._num_announced

    def views(self, method: Method) -> list[ParamView]:
        """All views of the pass, in the order of the model's parameters."""
        views = [view for bucket_views in self._arrived[method] for view in bucket_views]
        return sorted(views, key=lambda view: self._order[view.spec.name])

    def waits(self, method: Method) -> bool:
        """Whether a bucket must wait because the last one has not reduced yet."""
        return method in self._arrived

    def finish(self, method: Method) -> None:
        """Note that the last bucket has reduced for all."""
        del self._arrived[method]
