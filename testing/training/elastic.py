"""A small model that replicas train, step by step, with faults at chosen moments of a turn."""

from __future__ import annotations

import dataclasses
import functools
import json
import logging
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from lowbit_strategy import Compressor, DiLoCo, Elastic, LoCo, OuterRule
from lowbit_strategy.collectives.comm import GroupComm, LocalComm
from lowbit_strategy.elastic import replica as elastic_replica
from lowbit_strategy.elastic.membership import Membership
from lowbit_strategy.elastic.replica import ElasticOuterSync
from lowbit_strategy.engine.engine import GradientSync
from lowbit_strategy.engine.listeners import StepListener, StepPhase
from lowbit_strategy.local_steps.outer_sync import OuterSync
from lowbit_strategy.model.parameters import describe_parameters
from lowbit_strategy.ranks.ranks import Ranks

EVERY = 4
RULE = DiLoCo(every=EVERY, momentum=0.5)
COMPRESSOR = LoCo(block_size=32, beta=0.0, reset_steps=None)
MOMENTS = ("before", "connecting", "exchange", "received", "confirming", "committed", "helping", "healing")


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 32), nn.BatchNorm1d(32), nn.Tanh(), nn.Linear(32, 8))


class Taught(nn.Module):
    """A frozen teacher follows the student; `fixed` stays as it was made."""

    def __init__(self, fixed: float) -> None:
        super().__init__()
        self.net = net()
        self.teacher = nn.Parameter(torch.zeros(8, 32), requires_grad=False)
        self.fixed = nn.Parameter(torch.full((8,), fixed), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.net[:3](x)
        out: Tensor = self.net[3](hidden)
        with torch.no_grad():
            self.teacher.lerp_(list(self.net.parameters())[-2], 0.2)
        return out + 0.1 * hidden @ self.teacher.T + 0.1 * self.fixed


def local_step(model: nn.Module, optimizer: torch.optim.Optimizer, name: str, step: int) -> float:
    generator = torch.Generator().manual_seed(1000 * ord(name[0]) + step)
    x = torch.randn(8, 16, generator=generator)
    optimizer.zero_grad()
    loss = (model(x) - torch.tanh(x[:, :8])).square().mean()
    loss.backward()
    optimizer.step()
    return loss.item()


class Turn(NamedTuple):
    """What all who have taken a turn must agree on, and what one of them has sent until then."""

    history: int
    digest: int
    members: list[str]
    turn: int
    sent: int
    weights: list[float]
    time: float


@dataclass(frozen=True, kw_only=True)
class Trained:
    """What a rank has come to."""

    losses: list[float]
    weights: list[Tensor]
    sent: int


@dataclass(frozen=True, kw_only=True)
class TrainedReplica(Trained):
    """And what a replica has beside: its turns, and how often it got the others' state."""

    turns: list[Turn]
    steps: int
    digest: int
    healed: int


class AfterTurns(StepListener):
    """Calls `note` when a turn has been taken."""

    def __init__(self, sync: GradientSync, note: Callable[[], None]) -> None:
        self._note = note
        sync.listeners.add(self, StepPhase.RECORD)

    def end_step(self, *, counted: bool) -> None:
        self._note()


class Replica:
    """One replica, without a framework."""

    def __init__(
        self,
        elastic: Elastic,
        rule: OuterRule = RULE,
        compressor: Compressor = COMPRESSOR,
        facts: Mapping[str, object] = MappingProxyType({}),
        model: nn.Module | None = None,
    ) -> None:
        logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", stream=sys.stderr)
        assert elastic.name is not None
        self.name = elastic.name
        self.model = net() if model is None else model
        if self.name != "a":  # whoever joins has other weights
            with torch.no_grad():
                next(self.model.parameters()).add_(1.0)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        ranks = Ranks.flat(LocalComm()).coming_and_going()
        self.sync = GradientSync(compressor, describe_parameters(self.model), ranks, torch.device("cpu"), sharded=False)
        self.membership = Membership(elastic, {"model": "small", "rule": rule, **facts})
        self.outer = ElasticOuterSync(
            self.sync,
            dict(self.model.named_parameters()),
            rule,
            buffers=functools.partial(_buffers, self.model),
            membership=self.membership,
        )
        self.turns: list[Turn] = []
        AfterTurns(self.sync, self.note)
        self.log: Path | None = None

    def note(self) -> None:
        turn = Turn(
            history=self.outer.standing.history,
            digest=self.outer._digest(),
            members=list(self.outer.members),
            turn=self.outer.num_syncs,
            sent=self.sync.ranks.peers.sent_nbytes,
            weights=list(self.outer.weights),
            time=time.time(),
        )
        self.turns.append(turn)
        if self.log is not None:
            with self.log.open("a") as file:
                file.write(json.dumps(turn._asdict()) + "\n")

    def run(self, steps: int, pause: float, until: Path | None = None, *, start_with: int = 0) -> TrainedReplica:
        """Train for `steps`, and then for as long as there is no file `until`, and three more rounds. At the beginning
        there must be `start_with` replicas.
        """
        options = self.membership.options
        self.membership.options = dataclasses.replace(options, min_replicas=max(start_with, options.min_replicas))
        self.outer.join()
        self.membership.options = options
        losses = []
        while self.sync.step_index < steps:
            if until is not None and not until.exists():
                steps = self.sync.step_index + 3 * EVERY
            losses.append(local_step(self.model, self.optimizer, self.name, self.sync.step_index))
            time.sleep(pause)
            self.outer.after_step(0.1)
        self.outer.finish()
        self.membership.leave()
        return TrainedReplica(
            turns=self.turns,
            losses=losses,
            steps=self.sync.step_index,
            digest=self.outer._digest(),
            weights=[param.detach().clone() for param in self.model.parameters()],
            healed=self.outer.num_heals,
            sent=self.sync.ranks.peers.sent_nbytes,
        )


def train_without(rank: int, world_size: int, steps: int, rule: OuterRule = RULE) -> Trained:
    """The same training by ranks that stay, as `Replica.run`."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    outer = outer_without(model, rule)
    losses = []
    for step in range(steps):
        losses.append(local_step(model, optimizer, "abc"[rank], step))
        outer.after_step(0.1)
    outer.finish()
    weights = [param.detach().clone() for param in model.parameters()]
    return Trained(losses=losses, weights=weights, sent=outer.sync.ranks.peers.sent_nbytes)


def outer_without(model: nn.Module, rule: OuterRule) -> OuterSync:
    """Local steps of ranks that stay."""
    ranks = Ranks.flat(GroupComm())
    sync = GradientSync(COMPRESSOR, describe_parameters(model), ranks, torch.device("cpu"), sharded=False)
    return OuterSync(sync, dict(model.named_parameters()), rule, buffers=functools.partial(_buffers, model))


def _buffers(model: nn.Module) -> dict[str, Tensor]:
    frozen = {name: param for name, param in model.named_parameters() if not param.requires_grad}
    return dict(model.named_buffers()) | frozen


def train(
    elastic: Elastic,
    folder: Path,
    steps: int = 24,
    pause: float = 0.02,
    fault: tuple[str, int] | None = None,
    how: str = "kill",
    until: str = "",
    start_with: int = 0,
    **options: Any,
) -> TrainedReplica:
    """Train; at the moment and turn that `fault` names, die, or stop for the others to notice.

    `options` are of the `Replica`.
    """
    replica = Replica(elastic, **options)
    replica.log = folder / f"{replica.name}.turns"
    if fault is not None:
        arm(replica, *fault, end=_die if how == "kill" else _stop)
    replica.outer.on_healed = lambda: _note_healing(folder, replica.name)
    return replica.run(steps, pause, folder / until if until else None, start_with=start_with)


def _note_healing(folder: Path, name: str) -> None:
    if (folder / f"{name}.struck").exists():
        (folder / f"{name}.healed").touch()


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _stop() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


class Strikable(Protocol):
    """What `arm` needs: a `Replica`, or something else that has one of its own."""

    outer: ElasticOuterSync
    membership: Membership
    turns: list[Any]
    log: Path | None


def arm(replica: Strikable, moment: str, turn: int, end: Callable[[], None] = _die) -> None:
    """At `moment`, the first time that it comes after `turn` turns of this replica, call `end`, once."""
    outer, membership = replica.outer, replica.membership
    armed = [True]

    def strike() -> None:
        if armed[0] and len(replica.turns) >= turn:
            armed[0] = False
            (replica.log or Path(os.devnull)).with_suffix(".struck").write_text(str(time.time()))
            end()

    def before(owner: Any, name: str) -> None:
        original = getattr(owner, name)

        def struck(*values: Any, **options: Any) -> Any:
            strike()
            return original(*values, **options)

        setattr(owner, name, struck)

    def after(owner: Any, name: str) -> None:
        original = getattr(owner, name)

        def struck(*values: Any, **options: Any) -> Any:
            result = original(*values, **options)
            strike()
            return result

        setattr(owner, name, struck)

    if moment == "before":
        before(outer, "_rendezvous")
    elif moment == "connecting":  # the lighthouse has answered, and the others connect
        before(membership, "_connect")
    elif moment == "exchange":  # after the first of its messages
        _in_exchange(outer, strike)
    elif moment == "received":
        before(outer, "_confirm")
    elif moment == "confirming":  # its word is on the way
        _in_confirmation(outer, strike)
    elif moment == "committed":
        after(outer, "_commit")
    elif moment == "helping":
        before(outer, "_send_state")
    elif moment == "healing":
        after(elastic_replica, "receive")
    else:
        raise ValueError(moment)


def _in_exchange(outer: ElasticOuterSync, strike: Callable[[], None]) -> None:
    reduce = outer.sync.reduce

    def struck(layout: Any, x: Tensor, out: Tensor, marks: Tensor | None = None, **options: Any) -> Any:
        for number, pending in enumerate(reduce(layout, x, out, marks, **options)):
            if number == 1:
                strike()
            yield pending

    outer.sync.reduce = struck  # type: ignore[method-assign]


def _in_confirmation(outer: ElasticOuterSync, strike: Callable[[], None]) -> None:
    confirm = outer._confirm

    def struck(comm: Any) -> None:
        if not outer._pending or outer.num_syncs < 1:
            confirm(comm)
            return

        def confirmed() -> None:
            everyone = torch.empty(comm.world_size, 1, dtype=torch.uint8)
            pending = comm.all_gather(everyone, torch.ones(1, dtype=torch.uint8))
            strike()
            pending.wait()

        outer.membership.together(confirmed)

    outer._confirm = struck  # type: ignore[method-assign]
