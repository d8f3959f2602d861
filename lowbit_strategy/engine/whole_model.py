"""Methods that look at the whole model under DDP: its buckets come one by one, the last one reduces for all."""

from __future__ import annotations

from collections.abc import Sequence

from lowbit_strategy.methods._base.method import Method
from lowbit_strategy.methods._base.reducer import View


class Collector:
    """Views of the buckets of one backward pass.

    Buckets are announced when DDP hands them in, on the autograd thread, and arrive when a worker reduces them. The
    last one may arrive before earlier ones do, so it waits until as many have arrived as have been announced.

    Args:
        names: All parameters, in the order in which methods see them whatever the buckets.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self._order = {name: at for at, name in enumerate(names)}
        self._num_announced = 0
        self._complete = True  # the last bucket of the pass has been announced
        self._arrived: dict[Method, list[list[View]]] = {}

    def announce(self, *, last: bool) -> None:
        """A bucket has been handed in; `last`: the pass has no more."""
        if self._complete:
            self.begin_pass()
        self._num_announced += 1
        self._complete = last

    def begin_pass(self) -> None:
        """Nothing is in flight: what an earlier pass that failed has left is forgotten."""
        self._num_announced, self._arrived = 0, {}

    def arrive(self, method: Method, views: list[View]) -> None:
        self._arrived.setdefault(method, []).append(views)

    def misses(self, method: Method) -> bool:
        """Whether the last bucket, which calls, must wait for earlier ones."""
        return len(self._arrived[method]) < self._num_announced

    def views(self, method: Method) -> list[View]:
        """All views of the pass, in the order of the model's parameters."""
        views = [view for bucket_views in self._arrived[method] for view in bucket_views]
        return sorted(views, key=lambda view: self._order[view.spec.name])

    def waits(self, method: Method) -> bool:
        """Whether the last bucket has not reduced yet."""
        return method in self._arrived

    def finish(self, method: Method) -> None:
        """The last bucket has reduced for all."""
        del self._arrived[method]
