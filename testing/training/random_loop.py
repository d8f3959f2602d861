"""Random training loops: what scripts do with models, optimizers and sessions, told to PyTorch in several ways.

A `Program` is drawn from a seed and a layout: how the model is set up, and a list of actions. An action is a function
here, decorated with `action`: what it does is its text, and what must hold right after it is checked inside. A `Loop`
runs a program, `compared` says what must hold of runs that belong together.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import gc
import itertools
import logging
import random
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import distribute_tensor
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import prune

from lowbit_strategy import PRESETS, Dense, DiLoCo, LocalSGD, LoCo, StreamingDiLoCo, TopK
from lowbit_strategy import fabric as with_fabric
from lowbit_strategy.collectives.layout import add_ranges_
from lowbit_strategy.control import Accordion, AdaQS, Bounds, Controller, GraVAC, Guard, Phase, Schedule
from lowbit_strategy.custom_loop import SyncOptions, adapt, attach_ddp, attach_fsdp, compress, prepare
from testing.processes.node_size import nodes_of
from testing.processes.ranks import join_group, run_ranks
from testing.training.comparing import close, full
from testing.training.fabric import launch
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
    """

    world_size: int = 2
    sharded: bool = False
    shard_size: int | None = None
    node_size: int | None = None
    is_local: bool = False


LAYOUTS = {
    "ddp": Layout(),
    "fsdp": Layout(sharded=True),
    "local": Layout(is_local=True),
    "hsdp": Layout(4, sharded=True, shard_size=2),
    "local hsdp": Layout(4, sharded=True, shard_size=2, is_local=True),
    "two levels": Layout(4, node_size=2),
    "two levels, fsdp": Layout(4, sharded=True, node_size=2),
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

    run: Callable[[Loop], None]
    suits: Callable[[Program], bool]


ACTIONS: dict[str, Action] = {}


def action(suits: Callable[[Program], bool] = lambda program: True) -> Callable[[Callable[[Loop], None]], None]:
    def decorate(run: Callable[[Loop], None]) -> None:
        ACTIONS[run.__name__] = Action(run, suits)

    return decorate


def has_two(program: Program) -> bool:
    return len(program.optimizers) == 2


def unscaled(program: Program) -> bool:
    return not program.scaled


# -- models -----------------------------------------------------------------------------------------------------------


class Judge(nn.Module):
    """A body and two heads, one of which works at a time."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())
        self.heads = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))

    def forward(self, x: Tensor, head: int) -> Tensor:
        made: Tensor = self.heads[head](self.body(x))
        return made


class Two(nn.Module):
    """Two networks, the second of which judges what the first makes."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
        self.second = Judge()

    def forward(self, x: Tensor, which: str, head: int) -> Tensor:
        return judged(self.first, self.second, x, which, head)


def judged(first: Any, second: Any, x: Tensor, which: str, head: int) -> Tensor:
    made: Tensor = x if which == "second" else first(x)
    return made if which == "first" else second(made, head)


class Around(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.inner(x)
        return made


@functools.cache
def mesh_of(size: int) -> DeviceMesh:
    """Once per process: groups of gloo have threads that never end."""
    return init_device_mesh("cpu", (dist.get_world_size() // size, size), mesh_dim_names=("replicas", "shards"))


# -- loops ------------------------------------------------------------------------------------------------------------


class Loop:
    """One run of a program.

    Args:
        program: What it does.
        how: ``stock``, ``one call``, ``by hand``, ``never ended`` or ``fabric``.
        compressor: Of the model.
        folder: For checkpoints.
        still: Learning rates are zero, and no step is skipped by the scaler.
    """

    def __init__(self, program: Program, how: str, compressor: Any, folder: Path, *, still: bool = False) -> None:
        self.program, self.how, self.folder, self.still = program, how, folder, still
        self.place, self.by_hand = program.place, how in ("by hand", "never ended")
        torch.manual_seed(0)
        self.net = Two()
        self.parts: list[nn.Module] = [self.net.first, self.net.second]
        self.models: list[Any] = []
        self.optimizers: list[Any] = []
        self.scaler = torch.amp.GradScaler("cpu", init_scale=256.0) if program.scaled and not still else None
        self.options: dict[str, Any] = {"outer": RULES[program.rule]} if self.place.is_local else {}
        if self.place.node_size is not None:
            self.options["two_level"] = True
        self.sessions: list[Any] = []
        roots: list[nn.Module] = [self.net] if program.sessions == 1 else self.parts
        with nodes_of(self.place.node_size or self.place.world_size):
            self.attach(roots, compressor)
        self.params = [list(part.parameters()) for part in self.parts]
        self.totals = {name: torch.zeros_like(param) for name, param in self.net.named_parameters()}
        self.names = {param: name for name, param in self.net.named_parameters()}
        if program.controller is not None:
            for session in self.sessions:
                adapt(session.sync, CONTROLLERS[program.controller]()).timer = itertools.count().__next__
        self.renamed: list[str] = []
        self.losses: list[float] = []
        self.wrong: list[str] = []
        self.num_passes = self.at = 0

    # -- setting up --

    def attach(self, roots: list[nn.Module], compressor: Any) -> None:
        if self.how == "fabric":
            options = self.options | ({"shard_size": self.place.shard_size} if self.place.shard_size else {})
            made: Any = (
                with_fabric.LowBitFSDPStrategy(compressor, min_shard_numel=1500, **options)
                if self.place.sharded
                else with_fabric.LowBitDDPStrategy(
                    compressor, bucket_cap_mb=0.01, find_unused_parameters=True, **options
                )
            )
            self.fabric = launch(made)
            self.models = [self.fabric.setup_module(root) for root in roots]
            optimizers = self.fabric.setup_optimizers(*self.make_optimizers())
            self.optimizers = list(optimizers) if isinstance(optimizers, tuple | list) else [optimizers]
            self.sessions = made.sessions
            return
        chosen = SyncOptions(**self.options, shard_size=self.place.shard_size)
        prepared = [prepare(root, compressor, chosen, scatter=self.place.sharded) for root in roots if self.by_hand]
        self.models = [self.wrap(root) for root in roots]
        self.optimizers = self.make_optimizers()
        for root, model, own in itertools.zip_longest(roots, self.models, prepared):
            if self.how == "one call":
                owners = [each for each in self.optimizers if self.steps(each, root)]
                self.sessions.append(compress(model, owners, compressor, scaler=self.scaler, **self.options))
            elif self.by_hand:
                take: Any = attach_fsdp if self.place.sharded else attach_ddp
                session = take(model, own, has_scaler=self.scaler is not None)
                session.bind(lambda: self.optimizers, lambda: self.scaler)
                session.resume()
                self.sessions.append(session)

    def wrap(self, root: nn.Module) -> Any:
        if not self.place.sharded:
            return DistributedDataParallel(root, bucket_cap_mb=0.01, find_unused_parameters=True)
        mesh = mesh_of(self.place.shard_size or self.place.world_size)
        if self.place.shard_size is None or self.by_hand:  # the session makes the other level
            mesh = mesh["shards"]
        for part in self.parts if root is self.net else ():
            fully_shard(part, mesh=mesh)
        return fully_shard(root, mesh=mesh)

    def make_optimizers(self) -> list[torch.optim.Optimizer]:
        names = self.program.optimizers
        parts: list[nn.Module] = self.parts if len(names) == 2 else [self.net]
        made = [MAKE[name](list(part.parameters())) for name, part in zip(names, parts, strict=True)]
        for group in (group for optimizer in made for group in optimizer.param_groups if self.still):
            group["lr"] = 0.0
        return made

    @staticmethod
    def steps(optimizer: Any, root: nn.Module) -> bool:
        own = {id(param) for group in optimizer.param_groups for param in group["params"]}
        return any(id(param) in own for param in root.parameters())

    # -- what a loop does --

    def backward(self, which: str = "both", *, head: int = 0, overflows: bool = False, factor: float = 1.0) -> Tensor:
        x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(8 * self.num_passes + dist.get_rank()))
        self.num_passes += 1
        loss: Tensor = factor * (self.forward(x, which, head) - x.roll(1, 1)).square().mean()
        self.losses.append(loss.item())
        if self.how == "fabric":
            self.fabric.backward(loss)
            return loss
        for session in self.sessions if self.by_hand else ():
            session.begin_step(self.scaler)
        scaled = loss if self.scaler is None else self.scaler.scale(loss * float("inf") if overflows else loss)
        scaled.backward()
        return loss

    def forward(self, x: Tensor, which: str, head: int) -> Tensor:
        if len(self.models) == 2:
            return judged(self.models[0], self.models[1], x, which, head)
        made: Tensor = self.models[0](x, which, head)
        return made

    def step(self, *parts: int) -> None:
        """Step the optimizers of these parts; of none of which nothing has a gradient."""
        for optimizer in dict.fromkeys(self.optimizers[min(at, len(self.optimizers) - 1)] for at in parts or (0, 1)):
            owned = [param for group in optimizer.param_groups for param in group["params"]]
            if all(param.grad is None for param in owned):
                continue
            if self.scaler is None:
                self.add_up(owned)
                optimizer.step()
            else:
                self.scaler.step(optimizer)
            if self.how == "by hand" or (self.how == "never ended" and self.scaler is not None):
                for session in self.sessions:
                    if session.owns(optimizer):
                        session.end_step(optimizer)
        if self.scaler is not None:
            self.scaler.update()

    def add_up(self, params: list[nn.Parameter]) -> None:
        """What the optimizer is given."""
        for param in params:
            if param.grad is not None:
                self.totals[self.names[param]].data.add_(param.grad)

    def clear(self) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=self.program.to_none)

    def every_param(self) -> list[nn.Parameter]:
        return [param for part in self.params for param in part]

    def check(self, holds: bool, what: str) -> None:
        self.wrong += [] if holds else [f"action {self.at}: {what}"]

    @contextlib.contextmanager
    def unsynchronized(self) -> Iterator[None]:
        if self.how == "fabric":
            with contextlib.ExitStack() as stack:
                for model in self.models:
                    stack.enter_context(self.fabric.no_backward_sync(model))
                yield
        elif self.place.sharded:
            for model in self.models:
                model.set_requires_gradient_sync(False)
            yield
            for model in self.models:
                model.set_requires_gradient_sync(True)
        else:
            with contextlib.ExitStack() as stack:
                for model in self.models:
                    stack.enter_context(model.no_sync())
                yield

    # -- what must not matter --

    @torch.no_grad()
    def glance(self) -> None:
        """A validation, a checkpoint and a copy that nobody asked for."""
        with contextlib.ExitStack() as shared:
            for session in self.sessions:
                shared.enter_context(session.shared_weights(validates=False))
            for model in self.models:
                model.eval()
            self.forward(torch.ones(4, WIDTH), "both", 0)
            for model in self.models:
                model.train()
        self.save("glance")

    def save(self, name: str) -> dict[str, Any]:
        """A checkpoint, by each framework's own way; what does not fit into it is returned."""
        path, facts = self.folder / name, {"num_passes": self.num_passes, "at": self.at, "renamed": list(self.renamed)}
        facts["has_grad"] = [param.grad is not None for param in self.every_param()]
        if self.how == "fabric":
            self.fabric.save(path, self.fabric_state())
            return facts
        with contextlib.ExitStack() as saving:
            stamps = [saving.enter_context(each.save(f"{path}.{at}")) for at, each in enumerate(self.sessions)]
            for session in self.sessions:
                saving.enter_context(session.shared_weights(validates=False))
            kept = copy.deepcopy(([local(param) for param in self.every_param()], self.optimizer_states()))
        return facts | {"stamps": copy.deepcopy(stamps), "kept": kept}

    def load(self, name: str, facts: dict[str, Any]) -> None:
        self.num_passes, self.at = facts["num_passes"], facts["at"]
        for how in facts["renamed"]:
            self.rename(how)
        if self.how == "fabric":
            self.fabric.load(self.folder / name, self.fabric_state())
        else:
            values, states = copy.deepcopy(facts["kept"])
            for param, value in zip(self.every_param(), values, strict=True):
                local(param).copy_(value)
            stateful: list[Any] = [*self.optimizers, *([] if self.scaler is None else [self.scaler])]
            for at, each in enumerate(stateful):
                each.load_state_dict(states[at])
            for lookahead in self.lookaheads():
                lookahead.inner.load_state_dict(states.pop())
                lookahead.slow, lookahead.num_steps = states.pop(), states.pop()
            for at, session in enumerate(self.sessions):
                session.load(f"{self.folder / name}.{at}", facts["stamps"][at])
                session.resume()
        for param, had in zip(self.every_param(), facts["has_grad"], strict=True):
            if had and not self.program.to_none:
                param.grad = torch.zeros_like(param)

    def take_over(self, facts: dict[str, Any]) -> None:
        self.num_passes, self.at = facts["num_passes"], facts["at"]
        for how in facts["renamed"]:
            self.rename(how)
        with torch.no_grad():
            for param, value in zip(self.every_param(), facts["values"], strict=True):
                placed = distribute_tensor(value, param.device_mesh, param.placements) if self.place.sharded else value  # type: ignore[attr-defined]
                local(param).copy_(local(placed))
        for at, session in enumerate(self.sessions):
            session.load(f"{self.folder / 'left'}.{at}", facts["stamps"][at])
            session.resume()

    def lookaheads(self) -> list[Lookahead]:
        return [each for each in self.optimizers if isinstance(each, Lookahead)]

    def optimizer_states(self) -> list[Any]:
        states: list[Any] = [each.state_dict() for each in self.optimizers]
        states += [] if self.scaler is None else [self.scaler.state_dict()]
        for each in reversed(self.lookaheads()):
            states += [each.num_steps, each.slow, each.inner.state_dict()]
        return states

    def fabric_state(self) -> dict[str, Any]:
        named = [(f"model {at}", each) for at, each in enumerate(self.models)]
        return dict(named + [(f"optimizer {at}", each) for at, each in enumerate(self.optimizers)])

    def rename(self, how: str) -> None:
        self.renamed.append(how)
        layer = self.net.first
        if how == "prune":
            prune.custom_from_mask(layer[2], "weight", torch.arange(WIDTH).remainder(3).ne(0).expand(WIDTH, WIDTH))
        else:
            layer[0] = Around(layer[0])

    # -- the whole run --

    def run(self, *, glances: bool = False, until: int | None = None) -> list[float]:
        end = until or len(self.program.actions)
        while self.at < end:
            ACTIONS[self.program.actions[self.at]].run(self)
            self.at += 1
            if glances:
                self.glance()
        if until is not None:
            return []
        for session in self.sessions:
            session.finish()
        return [*self.losses, *self.sums()]

    def sums(self) -> list[float]:
        return [float(local(param).double().sum()) for param in self.every_param()]

    def close(self) -> None:
        for session in self.sessions:
            session.close()

    def conserved(self) -> list[Tensor]:
        """What optimizers were given, and what ranks have not sent of it."""
        self.run()
        found = []
        prefixes = ("",) if self.program.sessions == 1 else ("first.", "second.")
        for name, total in self.totals.items():
            whole = full(total)
            for prefix, session in zip(prefixes, self.sessions, strict=False):
                own = name.removeprefix(prefix)
                if not name.startswith(prefix) or (unsent := session.sync.state.export_unsent(own)) is None:
                    continue
                mean, spec = torch.zeros(whole.numel()), session.sync.specs[own]
                runs = [(0, spec.numel)] if spec.whole_shape is None else spec.ranges
                add_ranges_(mean, runs, unsent)
                dist.all_reduce(mean)
                whole += mean.view_as(whole) / session.sync.ranks.peers.world_size
            found.append(whole)
        return found


def local(param: Any) -> Tensor:
    """This rank's part, the same memory."""
    part: Tensor = (param.to_local() if hasattr(param, "to_local") else param).detach()
    return part


# -- actions ----------------------------------------------------------------------------------------------------------


@action()
def together(loop: Loop) -> None:
    loop.clear()
    loop.backward(overflows=loop.at % 4 == 3 and not loop.still)
    loop.step()


@action(has_two)
def first_alone(loop: Loop) -> None:
    """The second's gradients are thrown away."""
    loop.clear()
    loop.backward()
    loop.step(0)
    loop.clear()


@action(has_two)
def second_alone(loop: Loop) -> None:
    loop.clear()
    loop.backward("second")
    loop.step(1)


@action(has_two)
def in_turns(loop: Loop) -> None:
    """As a generator and its critic."""
    ACTIONS["first_alone"].run(loop)
    ACTIONS["second_alone"].run(loop)


@action(has_two)
def at_two_rates(loop: Loop) -> None:
    """The second steps once on the gradients of three passes, the first on those of each."""
    loop.clear()
    for _ in range(3):
        loop.optimizers[0].zero_grad(set_to_none=loop.program.to_none)
        loop.backward()
        loop.step(0)
    loop.step(1)


@action()
def thrown_away(loop: Loop) -> None:
    loop.clear()
    loop.backward(("both", "first", "second")[loop.at % 3])
    loop.clear()


@action(unscaled)
def spiked(loop: Loop) -> None:
    """A step is skipped because the norm of its gradients is finite and too large; nothing moves."""
    loop.clear()
    before = loop.sums()
    loop.backward(factor=1e4)
    norm = torch.nn.utils.get_total_norm([param.grad for param in loop.every_param() if param.grad is not None])
    loop.check(float(full(norm)) > 10, "the gradients of the spike are small")
    loop.clear()
    loop.check(loop.place.is_local or before == loop.sums(), "weights moved in a step that was skipped")


@action()
def surgery(loop: Loop) -> None:
    """One backward pass per task, then a step on the mean of what they gave. What was cleared before it since the last
    step would count as well.
    """
    ACTIONS["together"].run(loop)
    kept: list[list[Tensor | None]] = []
    params = loop.every_param()
    for _ in range(2 + loop.at % 2):
        loop.clear()
        loop.backward()
        kept.append([None if param.grad is None else param.grad.clone() for param in params])
    loop.clear()
    for param, *grads in zip(params, *kept, strict=True):
        there = [grad for grad in grads if grad is not None]
        param.grad = sum(there[1:], there[0]) / len(grads) if there else None
    loop.step()


@action()
def taken_away(loop: Loop) -> None:
    """Some gradients are taken from the optimizer."""
    loop.clear()
    loop.backward()
    for param in loop.params[1]:
        param.grad = None
    loop.step(0)


@action()
def added(loop: Loop) -> None:
    """A micro-batch is not synchronized."""
    loop.clear()
    with loop.unsynchronized():
        loop.backward()
    loop.backward()
    loop.step()


@action(lambda program: unscaled(program) and has_two(program))
def closure(loop: Loop) -> None:
    """The optimizer itself calls backward."""
    loop.clear()

    @torch.enable_grad()
    def compute() -> Tensor:
        loss = loop.backward()
        loop.add_up(loop.params[1])
        return loss

    loop.optimizers[1].step(compute)
    for session in loop.sessions if loop.how == "by hand" else ():
        if session.owns(loop.optimizers[1]):
            session.end_step(loop.optimizers[1])
    loop.clear()


@action()
def rests(loop: Loop) -> None:
    """The other head works: this one has no gradient and stays."""
    loop.clear()
    loop.backward(head=1)
    resting = loop.net.second.heads[0].weight
    if loop.program.to_none:
        loop.check(resting.grad is None, "a head that rests has a gradient")
    before = local(resting).clone()
    loop.step()
    if loop.program.to_none and not loop.place.is_local and "lookahead" not in loop.program.optimizers:
        loop.check(torch.equal(before, local(resting)), "a head that rests has moved")


@action()
def renamed(loop: Loop) -> None:
    """A layer is pruned, or a module put around one."""
    prunes = not (loop.place.sharded or "prune" in loop.renamed) and loop.at % 2 == 0
    loop.rename("prune" if prunes else "around")
    ACTIONS["together"].run(loop)


@action()
def saved_on_one_rank(loop: Loop) -> None:
    """As scripts do whose checkpoint the first rank writes, where stock waits for nobody and steps have ended."""
    if loop.how in ("one call", "by hand") and not loop.place.is_local and dist.get_rank() == 0:
        loop.save("of one rank")


# -- what must hold ---------------------------------------------------------------------------------------------------

WAYS = ("by hand", "never ended", "fabric")


def compared(program: Program, folder: Path) -> list[str]:
    """What is not as it has to be in runs of one program; on all ranks."""
    wrong: list[str] = []
    compressor = COMPRESSORS[program.seed % len(COMPRESSORS)]
    is_sharded, is_local = program.place.sharded, program.place.is_local

    def run(how: str, what: Any = compressor, **options: Any) -> list[float]:
        gc.collect()  # groups of gloo keep their threads as long as anything refers to them
        loop = Loop(program, how, what, folder)
        found = loop.run(**options)
        wrong.extend(f"{how}: {text}" for text in loop.wrong)
        loop.close()
        return found

    expected = run("one call")
    values = expected[len(expected) - len(list(Two().parameters())) :]
    alike: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(alike, values)
    if not is_sharded and any(each != alike[0] for each in alike):
        wrong.append("ranks differ")
    if not all(value == value for value in values):
        wrong.append("not finite")
    told = WAYS[program.seed % 3] if not program.scaled else "by hand"
    if told == "never ended" and program.sessions == 2 and (is_local or program.controller is not None):
        told = "by hand"  # a step that has moved nothing of a model is none of its steps unless the loop says so
    if run(told) != expected:
        wrong.append(f"{told} is not one call")
    if run("one call", glances=True) != expected:
        wrong.append("glances matter")
    resumes = "fabric" if told == "fabric" and resumes_in_fabric(program) else "one call"
    measures_time = program.controller == "gravac"  # which a first step has not
    if not measures_time and resumed(program, resumes, compressor, folder) != values:
        wrong.append(f"{resumes}: resumed differs")
    if is_local:
        return wrong
    dense, stock = run("one call", Dense()) if program.controller is None else None, run("stock", None)
    if dense is not None and not close(dense, stock, 1e-5):
        wrong.append("dense is not stock")
    if program.controller is None and "prune" not in program.actions:
        pair = [
            loop.conserved()
            for how, what in (("one call", CONSERVING[program.seed % len(CONSERVING)]), ("stock", None))
            if [loop := Loop(program, how, what, folder, still=True)]
        ]
        if not all(torch.allclose(one, other, rtol=1e-3, atol=1e-3) for one, other in zip(*pair, strict=True)):
            wrong.append("gradients are not conserved")
    return wrong


def left(program: Program, folder: Path) -> None:
    """Run until the checkpoint, which any layout may load: `taken_over`."""
    loop = Loop(program, "one call", COMPRESSORS[program.seed % len(COMPRESSORS)], folder)
    loop.run(until=program.saved_after)
    facts = loop.save("left")
    del facts["kept"]
    facts["values"] = [full(param) for param in loop.every_param()]
    if dist.get_rank() == 0:
        torch.save(facts, folder / "left.pt")
    loop.close()
    dist.barrier()


def taken_over(program: Program, folder: Path) -> list[str]:
    """What is wrong with a run that goes on from the checkpoint of another layout, without the optimizers' state."""
    loop = Loop(program, "one call", COMPRESSORS[program.seed % len(COMPRESSORS)], folder)
    facts = torch.load(folder / "left.pt", weights_only=False)
    loop.take_over(facts)
    loop.run()
    values = [full(param) for param in loop.every_param()]
    wrong = loop.wrong + ([] if all(bool(value.isfinite().all()) for value in values) else ["not finite"])
    alike: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(alike, [float(value.double().sum()) for value in values])
    loop.close()
    return wrong + (["ranks differ"] if any(each != alike[0] for each in alike) else [])


def resumes_in_fabric(program: Program) -> bool:
    """Without what stock cannot save or load: nested optimizers, and sharded in one file two models, or an optimizer
    that has not stepped all its parameters.
    """
    has_stepped = "rests" in program.actions[: program.saved_after]
    whole = not program.place.sharded or (program.sessions == 1 and has_stepped)
    return whole and not program.scaled and "lookahead" not in program.optimizers


def resumed(program: Program, how: str, compressor: Any, folder: Path) -> list[float]:
    """The weights of a run that ended in the middle, and went on as another."""
    first = Loop(program, how, compressor, folder)
    first.run(until=program.saved_after)
    facts = first.save("middle")
    first.close()
    dist.barrier()
    second = Loop(program, how, compressor, folder)
    second.load("middle", facts)
    found = second.run()[-len(second.every_param()) :]
    second.close()
    return found


def run_programs(
    rank: int,
    world_size: int,
    folder: Path,
    programs: Sequence[Program],
    what: Literal["compare", "leave", "take over"],
) -> list[tuple[Program, list[str]]]:
    """Programs with what is wrong with them, on every rank: in `compared`, `left` or `taken_over`. An error ends the
    list: ranks may be out of step then.
    """
    logging.getLogger("lowbit_strategy").setLevel(logging.ERROR)  # each session would report
    join_group(rank, world_size, folder / what, 60)
    found: list[tuple[Program, list[str]]] = []
    for program in programs:
        own = folder / f"{program.seed}"
        own.mkdir(exist_ok=True)
        try:
            wrong = {"compare": compared, "leave": left, "take over": taken_over}[what](program, own)
        except Exception:
            return [*found, (program, [traceback.format_exc()])]
        found += [(program, wrong)] if wrong else []
    return found


def launched(
    folder: Path, programs: Sequence[Program], onto: str | None = None, env: Mapping[str, str | None] | None = None
) -> list[tuple[Program, list[str]]]:
    """Run programs of one layout, in one launch; with `onto`, in two: they go on in that layout. `env`: as for
    `run_ranks`.
    """
    first, stages = programs[0].layout, list[tuple[Any, Sequence[Program]]]([("compare", programs)])
    if onto is not None:
        stages = [(what, [each.moved(to) for each in programs]) for what, to in (("leave", first), ("take over", onto))]
    found: list[tuple[Program, list[str]]] = []
    for what, each in stages:
        (folder / what).mkdir(parents=True)
        size = each[0].place.world_size
        limit_s = 60 * len(each) + 60
        ran = run_ranks(run_programs, size, folder, each, what, timeout=limit_s, process_group=None, env=env)
        found += ran[0]
    return found
