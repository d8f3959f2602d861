"""One run of a random program, in plain PyTorch without compression. What derives from it tells the same to others."""

from __future__ import annotations

import contextlib
import copy
import functools
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import distribute_tensor
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_, prune

from lowbit_strategy.collectives.layout import add_part_
from lowbit_strategy.custom_loop import adapt
from testing.processes.node_size import nodes_of
from testing.training.comparing import full
from testing.training.optimizers import Lookahead
from testing.training.random_loop.models import Around, Two, judged
from testing.training.random_loop.space import ACTIONS, CONTROLLERS, MAKE, RULES, WIDTH, Program

BATCH, LIMIT = 4, 0.1  # samples; the largest norm of a gradient that is clipped


@functools.cache
def mesh_of(size: int) -> DeviceMesh:
    """Once per process: groups of gloo have threads that never end."""
    return init_device_mesh("cpu", (dist.get_world_size() // size, size), mesh_dim_names=("replicas", "shards"))


class Loop:
    """One run of a program.

    Args:
        program: What it does.
        compressor: Of the model.
        folder: For checkpoints.
        still: Learning rates are zero, nothing is clipped, and no step is skipped by the scaler.

    Attributes:
        meshes_are_whole: HSDP's mesh is given to ``fully_shard``, and not made by the session.
    """

    meshes_are_whole: ClassVar[bool] = True

    def __init__(self, program: Program, compressor: Any, folder: Path, *, still: bool = False) -> None:
        self.program, self.folder, self.still, self.place = program, folder, still, program.place
        torch.manual_seed(0)
        self.net = Two()
        self.parts: list[nn.Module] = [self.net.first, self.net.second]
        self.models: list[Any] = []
        self.optimizers: list[Any] = []
        self.scaler = torch.amp.GradScaler("cpu", init_scale=256.0) if program.scaled and not still else None
        self.options = self.place.options | ({"outer": RULES[program.rule]} if self.place.is_local else {})
        self.sessions: list[Any] = []
        self.renamed: list[str] = []
        self.losses: list[float] = []
        self.wrong: list[str] = []
        self.num_passes = self.at = 0
        with nodes_of(self.place.node_size or self.place.world_size):
            self.attach([self.net] if program.sessions == 1 else self.parts, compressor)

    # -- setting up --

    def attach(self, roots: list[nn.Module], compressor: Any) -> None:
        """Set the model and its optimizers up, and then call `begin`."""
        self.models = [self.wrap(root) for root in roots]
        self.optimizers = self.make_optimizers()
        self.begin()

    def begin(self) -> None:
        self.params = [list(part.parameters()) for part in self.parts]
        self.totals = {name: torch.zeros_like(param) for name, param in self.net.named_parameters()}
        self.names = {param: name for name, param in self.net.named_parameters()}
        for session in self.sessions if self.program.controller is not None else ():
            adapt(session.sync, CONTROLLERS[str(self.program.controller)]()).timer = itertools.count().__next__

    def wrap(self, root: nn.Module) -> Any:
        if not self.place.sharded:
            return DistributedDataParallel(root, bucket_cap_mb=0.01, find_unused_parameters=True)
        mesh = mesh_of(self.place.shard_size or self.place.world_size)
        if self.place.shard_size is None or not self.meshes_are_whole:
            mesh = mesh["shards"]
        for part in self.parts if root is self.net else ():
            fully_shard(part, mesh=mesh)
        return fully_shard(root, mesh=mesh)

    def make_optimizers(self) -> list[Any]:
        names = self.program.optimizers
        parts: list[nn.Module] = self.parts if len(names) == 2 else [self.net]
        made = [MAKE[name](list(part.parameters())) for name, part in zip(names, parts, strict=True)]
        for group in (group for optimizer in made for group in optimizer.param_groups if self.still):
            group["lr"] = 0.0
        return made

    # -- what a loop does --

    def backward(
        self,
        which: str = "both",
        *,
        head: int = 0,
        overflows: bool = False,
        factor: float = 1.0,
        num_batches: int = 1,
        empty: bool = False,
    ) -> Tensor:
        """One pass. `factor`: of what the model makes. `num_batches`: of a step. `empty`: the last rank has none."""
        samples = 0 if empty and dist.get_rank() == dist.get_world_size() - 1 else BATCH
        x = torch.randn(samples, WIDTH, generator=torch.Generator().manual_seed(8 * self.num_passes + dist.get_rank()))
        self.num_passes += 1
        made = factor * self.forward(x, which, head)
        loss: Tensor = (made - x.roll(1, 1)).square().sum() / (BATCH * WIDTH)
        self.losses.append(loss.item())
        self.differentiate(loss / num_batches, overflows=overflows)
        return loss

    def differentiate(self, loss: Tensor, *, overflows: bool) -> None:
        scaled = loss if self.scaler is None else self.scaler.scale(loss * float("inf") if overflows else loss)
        scaled.backward()

    def forward(self, x: Tensor, which: str, head: int) -> Tensor:
        if len(self.models) == 2:
            return judged(self.models[0], self.models[1], x, which, head)
        made: Tensor = self.models[0](x, which, head)
        return made

    def step(self, *parts: int, clips: bool = False) -> None:
        """Step the optimizers of these parts; of none of which nothing has a gradient."""
        for optimizer in dict.fromkeys(self.optimizers[min(at, len(self.optimizers) - 1)] for at in parts or (0, 1)):
            owned = [param for group in optimizer.param_groups for param in group["params"]]
            if all(param.grad is None for param in owned):
                continue
            if clips and not self.still:
                self.clip(optimizer, owned)
            if self.scaler is None:
                self.add_up(owned)
                optimizer.step()
            else:
                self.scaler.step(optimizer)
            self.stepped(optimizer)
        if self.scaler is not None:
            self.scaler.update()

    def clip(self, optimizer: Any, owned: list[nn.Parameter]) -> None:
        if self.scaler is not None:
            self.scaler.unscale_(optimizer)
        clip_grad_norm_(owned, LIMIT)

    def stepped(self, optimizer: Any) -> None:
        """An optimizer has stepped, or a scaler has skipped its step."""

    def accumulate(self, *, num_batches: int) -> None:
        """A step on the mean of several batches, of which the last is synchronized."""
        self.clear()
        for at in range(num_batches):
            with self.unsynchronized() if at < num_batches - 1 else contextlib.nullcontext():
                self.backward(num_batches=num_batches)
        self.step(clips=True)

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
        if self.place.sharded:
            for model in self.models:
                model.set_requires_gradient_sync(False)
            yield
            for model in self.models:
                model.set_requires_gradient_sync(True)
            return
        with contextlib.ExitStack() as stack:
            for model in self.models:
                stack.enter_context(model.no_sync())
            yield

    def rename(self, how: str) -> None:
        self.renamed.append(how)
        layer = self.net.first
        if how == "prune":
            prune.custom_from_mask(layer[2], "weight", torch.arange(WIDTH).remainder(3).ne(0).expand(WIDTH, WIDTH))
        else:
            layer[0] = Around(layer[0])

    # -- what must not matter --

    @torch.no_grad()
    def glance(self) -> None:
        """A validation, a checkpoint and a copy that nobody asked for."""
        with self.shared_weights():
            for model in self.models:
                model.eval()
            self.forward(torch.ones(4, WIDTH), "both", 0)
            for model in self.models:
                model.train()
        self.write("glance")

    @contextlib.contextmanager
    def shared_weights(self) -> Iterator[None]:
        with contextlib.ExitStack() as shared:
            for session in self.sessions:
                shared.enter_context(session.shared_weights(validates=False))
            yield

    # -- checkpoints --

    def save(self, name: str) -> dict[str, Any]:
        """A checkpoint, by each framework's own way; what does not fit into it is returned."""
        facts = {"num_passes": self.num_passes, "at": self.at, "renamed": list(self.renamed)}
        facts["has_grad"] = [param.grad is not None for param in self.every_param()]
        return facts | self.write(name)

    def load(self, name: str, facts: dict[str, Any]) -> None:
        self.num_passes, self.at = facts["num_passes"], facts["at"]
        for how in facts["renamed"]:
            self.rename(how)
        self.read(name, facts)
        for param, had in zip(self.every_param(), facts["has_grad"], strict=True):
            if had and not self.program.to_none:
                param.grad = torch.zeros_like(param)

    def write(self, name: str) -> dict[str, Any]:
        with contextlib.ExitStack() as saving:
            paths = enumerate(self.sessions)
            stamps = [saving.enter_context(each.save(f"{self.folder / name}.{at}")) for at, each in paths]
            saving.enter_context(self.shared_weights())
            kept = copy.deepcopy(([local(param) for param in self.every_param()], self.optimizer_states()))
        return {"stamps": copy.deepcopy(stamps), "kept": kept}

    def read(self, name: str, facts: dict[str, Any]) -> None:
        values, states = copy.deepcopy(facts["kept"])
        for param, value in zip(self.every_param(), values, strict=True):
            local(param).copy_(value)
        stateful: list[Any] = [*self.optimizers, *([] if self.scaler is None else [self.scaler])]
        for at, each in enumerate(stateful):
            each.load_state_dict(states[at])
        for lookahead in self.lookaheads():
            lookahead.inner.load_state_dict(states.pop())
            lookahead.slow, lookahead.num_steps = states.pop(), states.pop()
        self.read_sessions(name, facts)

    def read_sessions(self, name: str, facts: dict[str, Any]) -> None:
        for at, session in enumerate(self.sessions):
            session.load(f"{self.folder / name}.{at}", facts["stamps"][at])
            session.resume()

    def take_over(self, facts: dict[str, Any]) -> None:
        """Go on from the checkpoint of another layout, without the optimizers' state."""
        self.num_passes, self.at = facts["num_passes"], facts["at"]
        for how in facts["renamed"]:
            self.rename(how)
        with torch.no_grad():
            for param, value in zip(self.every_param(), facts["values"], strict=True):
                placed = distribute_tensor(value, param.device_mesh, param.placements) if self.place.sharded else value  # type: ignore[attr-defined]
                local(param).copy_(local(placed))
        self.read_sessions("left", facts)

    def lookaheads(self) -> list[Lookahead]:
        return [each for each in self.optimizers if isinstance(each, Lookahead)]

    def optimizer_states(self) -> list[Any]:
        states: list[Any] = [each.state_dict() for each in self.optimizers]
        states += [] if self.scaler is None else [self.scaler.state_dict()]
        for each in reversed(self.lookaheads()):
            states += [each.num_steps, each.slow, each.inner.state_dict()]
        return states

    # -- the whole run --

    def run(self, *, glances: bool = False, until: int | None = None) -> list[float]:
        self.end, self.glances = until or len(self.program.actions), glances
        while self.at < self.end:
            self.act()
        if until is not None:
            return []
        self.finish()
        return [*self.losses, *self.sums()]

    def act(self) -> None:
        """The next action."""
        ACTIONS[self.program.actions[self.at]].run(self)
        self.at += 1
        if self.glances:
            self.glance()

    def finish(self) -> None:
        for session in self.sessions:
            session.finish()

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
                add_part_(mean, runs, unsent)
                dist.all_reduce(mean)
                whole += mean.view_as(whole) / session.sync.ranks.peers.world_size
            found.append(whole)
        return found


def local(param: Any) -> Tensor:
    """This rank's part, the same memory."""
    part: Tensor = (param.to_local() if hasattr(param, "to_local") else param).detach()
    return part
