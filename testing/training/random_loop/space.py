"""The space that programs are drawn from."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch

from lowbit_strategy import PRESETS, DiLoCo, LocalSGD, LoCo, StreamingDiLoCo, TopK
from lowbit_strategy.control import Accordion, AdaQS, Bounds, Controller, GraVAC, Guard, Phase, Schedule
from testing.training.optimizers import Lookahead

WIDTH, LENGTH = 32, 10
COMPRESSORS = (LoCo(block_size=32), LoCo(bits=2, block_size=32), TopK(density=0.1), PRESETS["powersgd"])
CONSERVING = (LoCo(block_size=32, residual="float32"), TopK(density=0.1), LoCo(bits=2, residual="float32"))
RULES = (DiLoCo(every=3), LocalSGD(every=2), StreamingDiLoCo(every=4, fragments=2, delay=1))
LADDER = (LoCo(bits=8), LoCo(bits=4), LoCo(bits=2))
WINDOWS: dict[str, Any] = {"interval": 2, "unit": "steps", "eta": 0.3}
CONTROLLERS: dict[str, Callable[[], Controller]] = {
    "accordion": lambda: Accordion(light=LADDER[0], heavy=TopK(density=0.05), **WINDOWS),
    "accordion, mean": lambda: Accordion(light=LADDER[0], heavy=TopK(density=0.05), gradient="mean", **WINDOWS),
    "adaqs": lambda: AdaQS(ladder=LADDER, interval=2, per="parameter"),
    "adaqs, mean": lambda: AdaQS(ladder=LADDER, interval=2, gradient="mean"),
    "gravac": lambda: GraVAC(candidates=LADDER, epsilon=0.2, window=2, settle=0, omega=0.0),
    "guard": lambda: Guard(
        inner=Accordion(light=LADDER[0], heavy=LADDER[2], **WINDOWS),
        bounds=Bounds(max_error=0.3, patience=1),
        observe_every=2,
    ),
    "schedule": lambda: Schedule([Phase(compressor=LADDER[0]), Phase(compressor=TopK(density=0.1), start=4)]),
}
MAKE: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9),
    "adamw": lambda params: torch.optim.AdamW(params, lr=1e-3),
    "lookahead": lambda params: Lookahead(torch.optim.AdamW(params, lr=1e-3)),
}


class Layout(NamedTuple):
    """Args:
    world_size: Number of ranks.
    sharded: By FSDP2 instead of wrapped in DDP.
    shard_size: Ranks that hold one model, of HSDP; None: all.
    node_size: Ranks of a node, over two levels; None: one level.
    is_local: Steps are local.
    is_far: Ranks are taken to be far apart.
    """

    world_size: int = 2
    sharded: bool = False
    shard_size: int | None = None
    node_size: int | None = None
    is_local: bool = False
    is_far: bool = False

    @property
    def options(self) -> dict[str, Any]:
        """Of the session."""
        found: dict[str, Any] = {"far_links": True} if self.is_far else {}
        return found | ({} if self.node_size is None else {"two_level": True})


LAYOUTS = {
    "ddp": Layout(),
    "fsdp": Layout(sharded=True),
    "local": Layout(is_local=True),
    "hsdp": Layout(4, sharded=True, shard_size=2),
    "local hsdp": Layout(4, sharded=True, shard_size=2, is_local=True),
    "two levels": Layout(4, node_size=2),
    "two levels, fsdp": Layout(4, sharded=True, node_size=2),
    "far": Layout(is_far=True),
    "fsdp, far": Layout(sharded=True, is_far=True),
    "two levels, far": Layout(4, node_size=2, is_far=True),
}


@dataclass(frozen=True)
class Program:
    """One training script.

    Args:
        seed: It was drawn from.
        layout: A name in `LAYOUTS`.
        actions: Names in `ACTIONS`.
        saved_after: Of those, before the checkpoint from which the run is resumed.
        optimizers: Names in `MAKE`: one for all parameters, or one for each of two networks.
        to_none: How gradients are cleared.
        scaled: With a ``GradScaler``.
        sessions: The two networks are one model, or two with a session each.
        rule: Of local steps.
        controller: A name in `CONTROLLERS`, or None.
        way: In which it is told in addition to one call; None: the seed says.
    """

    seed: int
    layout: str
    actions: tuple[str, ...] = ()
    saved_after: int = 1
    optimizers: tuple[str, ...] = ("adamw",)
    to_none: bool = True
    scaled: bool = False
    sessions: int = 1
    rule: int = 0
    controller: str | None = None
    way: str | None = None

    @classmethod
    def draw(cls, layout: str, seed: int, controller: str | None = None) -> Program:
        choice, place = random.Random(f"{layout} {seed}"), LAYOUTS[layout]
        makes = [name for name in MAKE if not (place.sharded and name == "lookahead")]  # it keeps unsharded weights
        program = cls(
            seed=seed,
            layout=layout,
            optimizers=tuple(choice.choice(makes) for _ in range(choice.choice([1, 2, 2]))),
            to_none=choice.random() < 0.7,
            scaled=layout == "ddp" and choice.random() < 0.2,
            sessions=choice.choice([1, 1, 2]),
            rule=choice.randrange(len(RULES)),
            controller=controller,
            saved_after=choice.randrange(2, LENGTH - 2),
        )
        if controller is None and not place.is_local and choice.random() < 0.4:
            program = replace(program, controller=choice.choice(list(CONTROLLERS)))
        possible = [name for name, each in ACTIONS.items() if each.suits(program)]
        return replace(program, actions=("together", *(choice.choice(possible) for _ in range(LENGTH)), "together"))

    @property
    def place(self) -> Layout:
        return LAYOUTS[self.layout]

    def moved(self, layout: str) -> Program:
        """The same script in another layout, as far as it can be done there; pruning cannot under FSDP2."""
        optimizers = tuple("adamw" if name == "lookahead" else name for name in self.optimizers)
        actions = tuple("together" if name == "renamed" else name for name in self.actions)
        return replace(self, layout=layout, optimizers=optimizers, actions=actions, scaled=False)


class Action(NamedTuple):
    """What a loop does, and the programs in which it can be done."""

    run: Callable[[Any], None]
    suits: Callable[[Program], bool]


ACTIONS: dict[str, Action] = {}


def action(suits: Callable[[Program], bool] = lambda program: True) -> Callable[[Callable[[Any], None]], None]:
    """An action of loops, which is possible in programs that suit it."""

    def decorate(run: Callable[[Any], None]) -> None:
        ACTIONS[run.__name__] = Action(run, suits)

    return decorate


def has_two(program: Program) -> bool:
    return len(program.optimizers) == 2


def unscaled(program: Program) -> bool:
    return not program.scaled


def has_own_rates(program: Program) -> bool:
    """An optimizer inside another one has other groups than that, once it has been loaded."""
    return "lookahead" not in program.optimizers
