"""What becomes of reduced gradients: an optimizer steps on them, or they are cleared without a step."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from lowbit_strategy.attach.checks import check_keeps_weights, check_synchronizes
from lowbit_strategy.collectives.layout import TensorSpec
from lowbit_strategy.engine.engine import GradientSync
from lowbit_strategy.model.fsdp_sharding import check_held, sharded_groups, sharded_parameters
from lowbit_strategy.model.mean_moment import has_stepped
from lowbit_strategy.model.parameters import (
    canonical_name,
    describe_parameters,
    local_part,
    localized_parameters,
    trainable_parameters,
)
from lowbit_strategy.rounds.outer import STATE_KEY


class Frozen:
    """Compares a model's parameters with those at set-up: others in their place must not train unsynchronized.

    Args:
        module: The model.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._frozen = {canonical_name(n): param for n, param in module.named_parameters() if not param.requires_grad}
        self._expected = trainable_parameters(module)  # whose gradients DDP waits for
        self._localized = localized_parameters(module)
        self._look_up()

    def _look_up(self) -> None:
        self._by_name = self._localized | sharded_parameters(self._module)
        self._ids = self._identities()

    def _identities(self) -> list[tuple[int, ...]]:
        """Identities of modules and parameters, found in a fraction of a millisecond."""
        modules = list(self._module.modules())
        shards = [param for each in sharded_groups(self._module) for param in each.param_group.fsdp_params]
        found = [tuple(map(id, child._modules.values())) for child in modules]
        if not shards:
            return found + [tuple(map(id, child._parameters.values())) for child in modules]
        return [*found, tuple(id(param.sharded_param) for param in shards)]

    def follow(self, *, is_served: bool) -> dict[str, nn.Parameter] | None:
        """All parameters by name (of sharded ones the shards) if they are others than before; otherwise None.

        Args:
            is_served: Anything that FSDP2 shards is synchronized.

        Raises:
            RuntimeError: One is trained and nothing synchronizes it.
            ValueError: FSDP2 shards one that the model no longer has.
        """
        if self._identities() == self._ids:
            return None
        check_held(self._module, sharded_groups(self._module))
        known = {id(param) for param in self._by_name.values()}
        self._look_up()
        params = self._by_name
        if is_served:
            known |= {id(p.sharded_param) for g in sharded_groups(self._module) for p in g.param_group.fsdp_params}
        for name, param in params.items():
            if param.requires_grad and id(param) not in known:
                raise RuntimeError(
                    f"{name} is another parameter than when the model was set up, and nothing synchronizes its"
                    " gradients: it was loaded with assign=True, or its layer was replaced or added. Load without"
                    " assign=True, and change the model before it is set up, or set it up anew"
                )
        new = params.keys() - self._frozen.keys() - self._expected.keys()
        self._frozen = {name: param for name, param in params.items() if name in self._frozen or name in new}
        self._expected = {name: param for name, param in params.items() if name in self._expected}
        return params

    def describe(self, names: Iterable[str]) -> list[TensorSpec]:
        """Those of `names` that are frozen: their residuals are kept until they are trained again."""
        also = {name for name in names if name in self._frozen}
        return [spec for spec in describe_parameters(self._module, also) if spec.name in also]

    def newly_trainable(self) -> list[str]:
        """Parameters that were frozen at set-up and no longer are."""
        return [name for name, param in self._frozen.items() if param.requires_grad]

    def newly_frozen(self) -> list[str]:
        """Parameters that DDP waits for and that are frozen now."""
        return [name for name, param in self._expected.items() if not param.requires_grad]

    def take_newly_trainable(self) -> tuple[list[TensorSpec], dict[str, nn.Parameter]]:
        """Those parameters, which count as trained from now on."""
        names = set(self.newly_trainable())
        self._frozen = {name: param for name, param in self._frozen.items() if name not in names}
        specs = [spec for spec in describe_parameters(self._module) if spec.name in names]
        return specs, {n: p for n, p in trainable_parameters(self._module).items() if n in names}

    def wrapped_anew(self) -> None:
        """DDP waits for what is trainable now."""
        self._frozen |= {name: self._expected[name] for name in self.newly_frozen()}
        self._expected = trainable_parameters(self._module)


class GradientUse:
    """Commits and rolls back the reductions of one model's parameters, by their ``.grad``.

    A gradient that is gone when the next backward pass begins was cleared: its reduction is set aside until an
    optimizer steps the parameter. If it does on what the last pass delivered, scaled or clipped, those before were
    thrown away. If it does on something else, that was made of all of them (`DeliveredSigns`).

    Args:
        module: The model.
        sync: Reduces.

    Attributes:
        stepped: Parameters that optimizers have stepped since the last step ended.
        ddp_of: Gives DDP around the model, if it is wrapped in it.
    """

    def __init__(self, module: nn.Module, sync: GradientSync) -> None:
        self.stepped: set[str] = set()
        self.ddp_of: Callable[[], DistributedDataParallel | None] = lambda: None
        self._sync = sync
        self._name({canonical_name(name): param for name, param in module.named_parameters()})
        self._optimizers: weakref.WeakKeyDictionary[Optimizer, None] = weakref.WeakKeyDictionary()  # have stepped
        self._delivered = DeliveredSigns(sync)

    def follow(self, frozen: Frozen, *, is_served: bool) -> None:
        """Look parameters up anew if the model has others; raises, and takes, what `Frozen.follow` does."""
        if self._sync.ranks.alone or (params := frozen.follow(is_served=is_served)) is None:
            return
        self._name(params)
        if self._sync.second_moment is not None:
            self._sync.second_moment.name_parameters()

    def _name(self, params: Mapping[str, nn.Parameter]) -> None:
        self._params = params
        self._names = {id(param): name for name, param in params.items()}

    def owned_by(self, optimizer: Optimizer) -> dict[str, nn.Parameter]:
        """This model's parameters that `optimizer` steps."""
        params = (param for group in optimizer.param_groups for param in group["params"])
        return {self._names[id(param)]: param for param in params if id(param) in self._names}

    def any_owner(self, optimizer: Optimizer) -> bool:
        """Whether `optimizer`, or one that has stepped before, steps a parameter of this model."""
        return bool(self._optimizers) or bool(self.owned_by(optimizer))

    @property
    def param_ids(self) -> set[int]:
        """The identities of the parameters."""
        return set(self._names)

    def serves(self, module: nn.Module) -> bool:
        """Whether a parameter of `module` is one of this model's."""
        return any(id(param) in self._names for param in module.parameters())

    def on_optimizer_step(self, optimizer: Optimizer) -> None:
        """Commit what it has stepped. An optimizer inside another one has stepped for both.

        Raises:
            ValueError: Steps are local, and it exchanges weights itself.
            RuntimeError: DDP was told not to synchronize the gradients.
        """
        owned = self.owned_by(optimizer)
        if not owned:
            return
        if STATE_KEY in self._sync.rank_state:
            check_keeps_weights(optimizer)
        if (model := self.ddp_of()) is not None and self._sync.outer is None and not self._sync.ranks.alone:
            check_synchronizes(model)
        self._optimizers[optimizer] = None
        sync = self._sync
        stepped = [name for name, param in owned.items() if param.grad is not None and name not in self.stepped]
        self.stepped.update(stepped)
        if sync.outer is None:
            open_ones = sync.transactions.prepared | set(sync.transactions.undecided)
            sync.roll_back([name for name in owned if name in open_ones and name not in self.stepped])
        if not stepped:
            return
        reduced = sync.outer is not None or not sync.transactions.prepared.isdisjoint(stepped)
        if sync.second_moment is not None and reduced and has_stepped(optimizer):
            sync.second_moment.correct_(optimizer)
        if sync.outer is None:
            self._settle({name: owned[name] for name in stepped})
            sync.commit(stepped)

    def _settle(self, stepped: Mapping[str, nn.Parameter]) -> None:
        """Decide about reductions of these parameters that were set aside."""
        transactions = self._sync.transactions
        if undecided := {name: param for name, param in stepped.items() if name in transactions.undecided}:
            transactions.settle(undecided, used=self._delivered.differ_from(undecided))

    def settle_all(self) -> None:
        """An optimizer that is not torch's has stepped."""
        self._settle({name: param for name, param in self._params.items() if param.grad is not None})

    def take_stepped(self, optimizer: Optimizer | None) -> set[str] | None:
        """A step ends: the parameters that have been stepped in it, or that `optimizer` would have stepped, had a loss
        scaler not skipped it. None: all, by an optimizer that is not torch's.
        """
        stepped, self.stepped = self.stepped, set()
        return stepped or (None if optimizer is None else set(self.owned_by(optimizer))) or None

    def roll_back_cleared(self) -> None:
        """A backward pass begins: gradients that were reduced before it and are gone have been thrown away."""
        prepared = self._sync.transactions.prepared
        if not prepared or self._sync.outer is not None:  # which reduces movements of weights
            return
        cleared = [name for name in prepared if self._params[name].grad is None]
        cleared += self._zeroed([name for name in prepared if self._params[name].grad is not None])
        if cleared:
            self._sync.set_aside(cleared)

    def note_delivered(self) -> None:
        """A backward pass is about to reduce: if gradients have been cleared without a step, note what it delivers."""
        if undecided := self._sync.transactions.undecided:
            self._delivered.note_after_backward({name: self._params[name] for name in undecided})

    def _zeroed(self, names: Iterable[str]) -> list[str]:
        """What ``zero_grad(set_to_none=False)`` has cleared: all gradients of an optimizer are zero.

        One parameter's zeros prove nothing: under FSDP2 this rank may have rows of an embedding that no batch used.
        """
        left = set(names)
        found: list[str] = []
        groups = [self.owned_by(optimizer).keys() for optimizer in self._optimizers]
        for group in [*groups, self._params.keys()]:
            members = left & group
            left -= members
            grads = [local_part(grad) for name in members if (grad := self._params[name].grad) is not None]
            if any(grad.numel() for grad in grads) and not any(bool(grad.any()) for grad in grads):
                found += members
        return found


_SAMPLE = 512  # elements of a parameter
_MOST_DIFFERENT = 0.05  # of the signs, as rounding may change them


class DeliveredSigns:
    """The signs of some elements of what a backward pass has delivered: scaling and clipping keep them, and what is
    made of several passes has others.

    Args:
        sync: The engine.
    """

    def __init__(self, sync: GradientSync) -> None:
        self._sync = sync
        self._signs: dict[str, Tensor] = {}

    def note_after_backward(self, params: Mapping[str, nn.Parameter]) -> None:
        """Note these parameters' once the backward pass that reduces next has ended."""
        self._signs = {}

        def note() -> None:
            self._signs = {n: _signs(param.grad) for n, param in params.items() if param.grad is not None}

        self._sync.call_after_backward(note)

    def differ_from(self, params: Mapping[str, nn.Parameter]) -> bool:
        """Whether these parameters have other gradients than what was delivered; the same on all ranks."""
        pairs = [(_signs(p.grad), self._signs.get(name)) for name, p in params.items() if p.grad is not None]
        counts = torch.zeros(2, device=self._sync.device)
        for now, before in pairs:
            before = torch.zeros_like(now) if before is None or before.shape != now.shape else before
            counts += torch.stack([(now != before).sum(), ((now != 0) | (before != 0)).sum()])
        if self._sync.scatter:
            peers = self._sync.ranks.peers
            sent_before = peers.sent_nbytes
            self._sync.ranks.world.all_reduce(counts).wait()
            self._sync.transactions.byte_check.add_untracked(peers.sent_nbytes - sent_before)
        different, all_of_them = counts.tolist()
        return bool(different > _MOST_DIFFERENT * all_of_them)


def _signs(grad: Tensor) -> Tensor:
    """int8, of elements all over this rank's part of a gradient."""
    flat = local_part(grad).detach().reshape(-1)
    return flat[:: max(1, flat.numel() // _SAMPLE)].sign().to(torch.int8)


class LossScale:
    """The scale of the next gradients. Reading it waits for the device, so it is read once per step.

    Attributes:
        value: None without a scaler.
    """

    def __init__(self) -> None:
        self.value: float | None = None
        self._is_new = False  # it was read for the next step

    def read(self, scaler: Any) -> None:
        """A step has ended: read the scale of the next one, if there is a scaler."""
        self._is_new = scaler is not None and scaler.is_enabled()
        if self._is_new:
            self.value = float(scaler.get_scale())

    def of_step(self, scaler: Any, *, begins: bool) -> float | None:
        """Before a backward pass; read now if this `begins` a step and it was not read at the end of the last one."""
        if begins and not self._is_new:
            self.read(scaler)
        self._is_new = False
        return self.value

    def forget(self) -> None:
        """The scaler has another scale now."""
        self._is_new = False
