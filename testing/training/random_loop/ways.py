"""The same loop told to our session in several ways, and to frameworks.

| way | what it is not told |
|---|---|
| `OneCall` | anything |
| `ByHand`, `NeverEnded` | scaled programs, of the latter; in which an optimizer of another session does not step |
| `WithFabric` | scaled programs |
| `WithAccelerate` | HSDP, scaled programs; two models under FSDP2 |
| `WithLightning` | two models, scaled programs; local steps that one training step takes in turns, a closure |
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, ClassVar

import lightning as L
import torch
from accelerate import Accelerator
from accelerate.utils import DistributedDataParallelKwargs
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lowbit_strategy import fabric as with_fabric
from lowbit_strategy.accelerate import LowBitAccelerator, LowBitPlugin, binding_of
from lowbit_strategy.custom_loop import SyncOptions, attach_ddp, attach_fsdp, compress, prepare
from lowbit_strategy.lightning import LowBitDDPStrategy, LowBitFSDPStrategy
from testing.processes.node_size import nodes_of
from testing.training.accelerated import fresh_state, fsdp_plugin
from testing.training.fabric import launch
from testing.training.random_loop.loop import LIMIT, Loop
from testing.training.random_loop.models import judged
from testing.training.random_loop.space import WIDTH, Program
from testing.training.regression import trainer

DDP_OPTIONS: dict[str, Any] = {"bucket_cap_mb": 0.01, "find_unused_parameters": True}
SHARDED_NUMEL = 1500  # each of the two networks has more, and none of their layers
IN_TURNS = {"in_turns", "at_two_rates", "added", "accumulated", "surgery"}


class OneCall(Loop):
    """`compress`."""

    def attach(self, roots: list[nn.Module], compressor: Any) -> None:
        self.models = [self.wrap(root) for root in roots]
        self.optimizers = self.make_optimizers()
        for root, model in zip(roots, self.models, strict=True):
            owners = [each for each in self.optimizers if self.steps(each, root)]
            self.sessions.append(compress(model, owners, compressor, scaler=self.scaler, **self.options))
        self.begin()

    @staticmethod
    def steps(optimizer: Any, root: nn.Module) -> bool:
        own = {id(param) for group in optimizer.param_groups for param in group["params"]}
        return any(id(param) in own for param in root.parameters())


class ByHand(Loop):
    """`prepare`, `attach_ddp` or `attach_fsdp`, and the session's calls."""

    meshes_are_whole: ClassVar[bool] = False

    def attach(self, roots: list[nn.Module], compressor: Any) -> None:
        chosen = SyncOptions(**self.options, shard_size=self.place.shard_size)
        prepared = [prepare(root, compressor, chosen, scatter=self.place.sharded) for root in roots]
        self.models = [self.wrap(root) for root in roots]
        self.optimizers = self.make_optimizers()
        for model, own in zip(self.models, prepared, strict=True):
            take: Any = attach_fsdp if self.place.sharded else attach_ddp
            session = take(model, own, has_scaler=self.scaler is not None)
            session.bind(lambda: self.optimizers, lambda: self.scaler)
            session.resume()
            self.sessions.append(session)
        self.begin()

    def differentiate(self, loss: Tensor, *, overflows: bool) -> None:
        for session in self.sessions:
            session.begin_step(self.scaler)
        super().differentiate(loss, overflows=overflows)

    def stepped(self, optimizer: Any) -> None:
        for session in self.sessions:
            if session.owns(optimizer):
                session.end_step(optimizer)


class NeverEnded(ByHand):
    """The loop does not say when a step ends."""

    def stepped(self, optimizer: Any) -> None:
        """Nothing."""


class WithFabric(Loop):
    def attach(self, roots: list[nn.Module], compressor: Any) -> None:
        options = self.options | ({"shard_size": self.place.shard_size} if self.place.shard_size else {})
        made: Any = (
            with_fabric.LowBitFSDPStrategy(compressor, min_shard_numel=SHARDED_NUMEL, **options)
            if self.place.sharded
            else with_fabric.LowBitDDPStrategy(compressor, **DDP_OPTIONS, **options)
        )
        self.fabric = launch(made)
        self.models = [self.fabric.setup_module(root) for root in roots]
        optimizers = self.fabric.setup_optimizers(*self.make_optimizers())
        self.optimizers = list(optimizers) if isinstance(optimizers, tuple | list) else [optimizers]
        self.sessions = made.sessions
        self.begin()

    def differentiate(self, loss: Tensor, *, overflows: bool) -> None:
        self.fabric.backward(loss)

    def clip(self, optimizer: Any, owned: list[nn.Parameter]) -> None:
        self.fabric.clip_gradients(self.models[0], optimizer, max_norm=LIMIT)

    @contextlib.contextmanager
    def unsynchronized(self) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            for model in self.models:
                stack.enter_context(self.fabric.no_backward_sync(model))
            yield

    def write(self, name: str) -> dict[str, Any]:
        if self.place.sharded and len(self.models) == 2:  # which Fabric does not save together
            for at, model in enumerate(self.models):
                self.fabric.save(self.folder / f"{name} {at}", {"model": model})
        else:
            self.fabric.save(self.folder / name, self.state())
        return {}

    def read(self, name: str, facts: dict[str, Any]) -> None:
        self.fabric.load(self.folder / name, self.state())

    def state(self) -> dict[str, Any]:
        named = [(f"model {at}", each) for at, each in enumerate(self.models)]
        return dict(named + [(f"optimizer {at}", each) for at, each in enumerate(self.optimizers)])


class WithAccelerate(Loop):
    def attach(self, roots: list[nn.Module], compressor: Any) -> None:
        fresh_state()
        plugin = LowBitPlugin(compressor, **self.options)
        if self.place.sharded:
            sharded = fsdp_plugin("Maker", "Judge")
            self.accelerator: Any = LowBitAccelerator(lowbit_plugin=plugin, fsdp_plugin=sharded)
        else:
            self.accelerator = Accelerator(kwargs_handlers=[DistributedDataParallelKwargs(**DDP_OPTIONS)])
            plugin.attach(self.accelerator)
        prepared = self.accelerator.prepare(*roots, *self.make_optimizers())
        self.models, self.optimizers = list(prepared[: len(roots)]), list(prepared[len(roots) :])
        binding = binding_of(self.accelerator)
        assert binding is not None
        self.binding, self.sessions = binding, binding.sessions
        if self.place.sharded:
            self.net = self.accelerator.unwrap_model(self.models[0])
            self.parts = [self.net.first, self.net.second]
        self.begin()

    def differentiate(self, loss: Tensor, *, overflows: bool) -> None:
        self.accelerator.backward(loss)

    def clip(self, optimizer: Any, owned: list[nn.Parameter]) -> None:
        self.accelerator.clip_grad_norm_(owned, LIMIT)

    @contextlib.contextmanager
    def unsynchronized(self) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            for model in self.models:
                stack.enter_context(self.accelerator.no_sync(model))
            yield

    def accumulate(self, *, num_batches: int) -> None:
        """In the loop that Accelerate's documentation shows."""
        accelerator = self.accelerator
        self.clear()
        accelerator.gradient_accumulation_steps, accelerator.step = num_batches, 0
        for _ in range(num_batches):
            with accelerator.accumulate(*self.models):
                self.backward()  # which divides the loss
                if accelerator.sync_gradients:
                    self.step(clips=True)
        accelerator.gradient_accumulation_steps = 1

    def write(self, name: str) -> dict[str, Any]:
        if self.place.sharded:  # save_state takes one optimizer of each FSDP model
            for model in self.models:
                self.accelerator.get_state_dict(model)
        else:
            self.accelerator.save_state(str(self.folder / f"{name} of accelerate"))
        return {}

    def finish(self) -> None:
        self.binding.finish()  # end_training would end the process group too

    def close(self) -> None:
        self.accelerator.free_memory()


class _Module(L.LightningModule):
    """Each of its training steps is one action of the loop."""

    def __init__(self, loop: WithLightning) -> None:
        super().__init__()
        self.first, self.second = loop.parts  # under the names that they have elsewhere: names are seeds
        self.loop, self.automatic_optimization = [loop], False

    def forward(self, x: Tensor, which: str, head: int) -> Tensor:
        return judged(self.first, self.second, x, which, head)

    def configure_optimizers(self) -> Any:
        return self.loop[0].make_optimizers()

    def on_train_start(self) -> None:
        self.loop[0].begins()

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        self.loop[0].act()

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self(torch.ones(4, WIDTH), "both", 0)

    def on_validation_model_zero_grad(self) -> None:
        """Lightning's own would take zeros away that the loop has left: the optimizer would step fewer parameters."""

    def on_train_batch_end(self, *_: Any) -> None:
        if self.loop[0].glances:
            self.trainer.save_checkpoint(self.loop[0].folder / "lightning.ckpt")


class WithLightning(Loop):
    def attach(self, roots: list[nn.Module], compressor: Any) -> None:
        options = self.options | ({"shard_size": self.place.shard_size} if self.place.shard_size else {})
        self.strategy: Any = (
            LowBitFSDPStrategy(compressor, min_shard_numel=SHARDED_NUMEL, **options)
            if self.place.sharded
            else LowBitDDPStrategy(compressor, **DDP_OPTIONS, **options)
        )
        self.module = _Module(self)

    def begins(self) -> None:
        optimizers: Any = self.module.optimizers()
        self.optimizers = list(optimizers) if isinstance(optimizers, list) else [optimizers]
        self.sessions = [self.strategy.session]
        self.begin()

    def forward(self, x: Tensor, which: str, head: int) -> Tensor:
        return self.module(x, which, head)

    def differentiate(self, loss: Tensor, *, overflows: bool) -> None:
        self.module.manual_backward(loss)

    def clip(self, optimizer: Any, owned: list[nn.Parameter]) -> None:
        self.module.clip_gradients(optimizer, gradient_clip_val=LIMIT, gradient_clip_algorithm="norm")

    def unsynchronized(self) -> Any:
        return self.strategy.block_backward_sync()

    def run(self, *, glances: bool = False, until: int | None = None) -> list[float]:
        assert until is None
        self.glances = glances
        validates = {"val_check_interval": 2, "limit_val_batches": 1} if glances else {"limit_val_batches": 0}
        batches: Any = DataLoader(torch.zeros(self.place.world_size * len(self.program.actions), 1))  # type: ignore[arg-type]
        with nodes_of(self.place.node_size or self.place.world_size):
            made = trainer(self.strategy, max_steps=-1, max_epochs=1, num_sanity_val_steps=0, **validates)
            made.fit(self.module, batches, batches)
        return [*self.losses, *self.sums()]

    def glance(self) -> None:
        """The trainer validates, and the module saves after its step."""

    def close(self) -> None:
        """The trainer has."""


def can_save_alone(loop: Loop) -> bool:
    """Whether a rank may save while others do not."""
    return isinstance(loop, OneCall | ByHand) and not (loop.place.is_local or loop.program.scaled)


def can_tell(way: type[Loop], program: Program) -> bool:
    """Whether a program can be told so."""
    place, actions = program.place, set(program.actions)
    if way is NeverEnded:
        return not program.scaled
    if way is WithAccelerate:
        return not (program.scaled or place.shard_size or (program.sessions == 2 and place.sharded))
    if way is WithLightning:
        takes_turns = place.is_local and not actions.isdisjoint(IN_TURNS)
        return program.sessions == 1 and not (program.scaled or takes_turns or "closure" in actions)
    return way is not WithFabric or not program.scaled
