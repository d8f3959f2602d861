"""`Elastic`, the option: replicas that come and go."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from importlib import import_module
from typing import Any

from torch import nn

from lowbit_strategy import leaves
from lowbit_strategy.attach.sync_options import RoundMembers
from lowbit_strategy.options.configuration import configuration
from lowbit_strategy.ranks.ranks import Ranks

LIGHTHOUSE_VARIABLE = "TORCHFT_LIGHTHOUSE"


@configuration
class Elastic(RoundMembers):
    """Replicas that come and go while a model is trained with local steps. torchft finds the replicas.

    A replica is one process, or a node whose ranks share one model; its framework knows no other ranks. Members are
    determined only at the start of each exchange:

    1. every replica asks the lighthouse, which answers when all live replicas have asked
    2. if members have changed, they connect again; each keeps its residuals
    3. a new replica gets anchors, outer optimizer and step from an existing one, and starts with residuals of zero
    4. they exchange, and apply the result only when all have received everything. An exchange that fails because a
       replica is lost changes nothing, and is repeated with the remaining ones

    Args:
        lighthouse: Address of ``lowbit lighthouse``, such as ``"http://10.0.0.1:29510"``. None: from the environment
            variable TORCHFT_LIGHTHOUSE.
        min_replicas: If there are fewer replicas, all wait.
        name: This replica's name in messages and reports; replicas are ordered by name. None: host and process id of
            its first rank.
        address: The address at which other replicas reach this machine. None: the one from which it reaches the
            lighthouse.
        timeout: Seconds that a message may take. After that, a replica that has stopped counts as lost.
        connect_timeout: Seconds that replicas have to connect to each other.
        patience: Seconds to wait for the lighthouse, or for `min_replicas`, before giving up.

    Raises:
        ValueError: A value is out of range, or there is no lighthouse.
    """

    lighthouse: str | None = None
    min_replicas: int = 1
    name: str | None = None
    address: str | None = None
    timeout: float = 60.0
    connect_timeout: float = 10.0
    patience: float = 3600.0

    def __post_init__(self) -> None:
        if self.min_replicas < 1:
            raise ValueError(f"min_replicas must be at least 1, got {self.min_replicas}")
        for field in ("timeout", "connect_timeout", "patience"):
            if not getattr(self, field) > 0:
                raise ValueError(f"{field} must be a positive number of seconds, got {getattr(self, field)!r}")
        if self.lighthouse is not None and not re.fullmatch(r"https?://[^/]+:\d+/?", self.lighthouse):
            raise ValueError(f'lighthouse must be an address such as "http://10.0.0.1:29510", got {self.lighthouse!r}')
        if self.name is not None and not re.fullmatch(r"[\w.-]+", self.name):
            raise ValueError(f"name must consist of letters, digits, dots, dashes and underscores, got {self.name!r}")

    @property
    def lighthouse_address(self) -> str:
        """The lighthouse's address; raise a ValueError if none is given."""
        address = self.lighthouse or os.environ.get(LIGHTHOUSE_VARIABLE)
        if not address:
            raise ValueError(
                "elastic needs the address of a lighthouse: start one with lowbit lighthouse, and give"
                f' Elastic(lighthouse="http://HOST:29510") or set {LIGHTHOUSE_VARIABLE}'
            )
        return address.rstrip("/")

    def check_options(self, options: Any) -> None:
        rule = options.outer
        if rule is None:
            raise ValueError("elastic needs local steps: also give an outer rule, such as outer=DiLoCo(every=50)")
        if rule.travels_a_turn:
            raise ValueError(
                f"elastic does not support {rule.name}, an outer rule whose exchanges last a round: members are known"
                " for only one exchange. Use DiLoCo or LocalSGD"
            )
        for field in ("delay", "synchronous"):
            if getattr(rule, field):
                raise ValueError(
                    f"elastic does not support {field} of an outer rule: members change at the beginning of an"
                    " exchange, and are known for only that one. Leave it out"
                )

    def on_meshes(self, prepared: Any, module: nn.Module, meshes: Sequence[Ranks]) -> Any:
        if len(meshes) > 1:
            raise ValueError(
                "elastic= supports models whose parameters are all on one mesh, but this one has some, such as experts,"
                " on another: leave it out"
            )
        register = leaves.load("lowbit_strategy.elastic.registration:registered", "elastic")
        return register(self, prepared, module, meshes[0].group)

    def adapter(self, framework: str) -> Any:
        return import_module(f"lowbit_strategy.elastic.{framework}")
