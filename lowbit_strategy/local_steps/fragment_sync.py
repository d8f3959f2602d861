"""One synchronization of a fragment, in flight or complete."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lowbit_strategy.collectives.comm import Pending, wait_for_all
from lowbit_strategy.local_steps.fragment import Fragment
from lowbit_strategy.local_steps.header import Header


@dataclass(slots=True)
class FragmentSync:
    """One synchronization of a fragment: this rank's message and, once it has arrived, the result for all ranks.

    Args:
        place: The fragment's place among all fragments.
        fragment: The fragment that is synchronized.
        x: The pseudo-gradient; once it has arrived, the mean.
        header: The message before the pseudo-gradient.
        delay: Optimizer steps after which it is applied.
        age: Optimizer steps since it was sent.
        weights: Each rank's weight, 1 on average; empty: all 1.
        arrivals: Arrivals of the header and of the buckets.
    """

    place: int
    fragment: Fragment
    x: Tensor
    header: Header
    delay: int
    age: int = 0
    weights: tuple[float, ...] = ()
    arrivals: Sequence[Pending] = ()

    def wait(self) -> None:
        """Wait until all of it has arrived."""
        wait_for_all(self.arrivals)

    def share_without(self, left_out: Sequence[int]) -> float:
        """The sum of the other ranks' weights."""
        weights = self.weights or (1.0,) * self.header.world_size
        return sum(weight for rank, weight in enumerate(weights) if rank not in left_out)

    def state_dict(self) -> dict[str, Any]:
        """The fragment's state. Call it after `wait`."""
        return {
            "means": self.fragment.views(self.x),
            "header": {"flat": self.header.flat, "world_size": self.header.world_size},
            "delay": self.delay,
            "age": self.age,
        }

    @classmethod
    def from_state(cls, saved: Mapping[str, Any] | None, fragments: Sequence[Fragment]) -> FragmentSync | None:
        """Restore a synchronization; None if nothing was in flight, or the fragments' parameters have changed."""
        if saved is None:
            return None
        for place, fragment in enumerate(fragments):
            if fragment.anchors.keys() == saved["means"].keys():
                x_N = torch.empty(fragment.numel, dtype=torch.float32, device=fragment.sample.device)
                for name, view in fragment.views(x_N).items():
                    view.copy_(saved["means"][name])
                flat, world_size = saved["header"]["flat"].to(x_N.device), saved["header"]["world_size"]
                header = Header(flat, world_size, len(fragment.sample))
                return cls(place, fragment, x_N, header, saved["delay"], saved["age"])
        return None
