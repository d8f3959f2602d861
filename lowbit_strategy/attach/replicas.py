"""The door for replicas that join and leave: what the option that brings them has to offer, and each replica."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, cast

import torch.distributed as dist
from torch import nn

from lowbit_strategy import leaves
from lowbit_strategy.attach.rounds import EveryStep
from lowbit_strategy.options.conversion import Conversion, Mismatch, Source, call, register_conversion


class Replicas(ABC):
    """An option that brings replicas which join and leave."""

    @abstractmethod
    def check(self, options: Any) -> None:
        """Raises:
        ValueError: `options` (`SyncOptions`) do not go with it.
        """

    @abstractmethod
    def register(self, prepared: Any, module: nn.Module, group: dist.ProcessGroup | None) -> Callable[..., EveryStep]:
        """This replica becomes known to the others, whom it meets in `Session.resume`; on all of its ranks.

        Args:
            prepared: A `PreparedModel`; compressor and options are the same on all replicas.
            module: The model.
            group: The ranks of this replica.

        Returns:
            What lets it meet the others, in the place of `RoundRule.attach`.

        Raises:
            ValueError: The ranks do not share one model.
            ConnectionError: Nobody answers.
        """

    @abstractmethod
    def adapter(self, framework: str) -> Any:
        """A module with what the adapter of that name calls where replicas come and go."""


def _from_mapping(value: Any, source: Source) -> Replicas:
    if not isinstance(value, Mapping):
        raise Mismatch
    return cast("Replicas", call(leaves.load("lowbit_strategy.elastic:Elastic", "elastic"), value, source))


register_conversion(Replicas, Conversion(_from_mapping, "an instance of Elastic", "a mapping", (dict[str, Any],)))
