"""Adam's second moment without compression's noise, from squares that ranks exchange in some steps.

Adam divides by the root of ``v``, the average of squared gradients. The noise of few bits adds its square to ``v`` and
makes all elements of a block equal, so all steps are too small. Measurements show that one bit with the ``v`` of exact
gradients needs no more steps than uncompressed training. This approximates that ``v``:

1. ranks add up the squares of their own exact gradients over a few steps
2. they exchange the roots in 4 bits per element, in every step at first and at last in one of 32
3. one ratio per parameter, from sketches of 64 numbers, gives the size of the ranks' mean gradient relative to their
   own gradients
4. in between, the decoded gradient's mean square per block of 128, which the optimizer has anyway, carries ``v`` from
   step to step
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer

from lowbit_strategy import leaves
from lowbit_strategy.codecs.base import StepContext
from lowbit_strategy.collectives.comm import Comm
from lowbit_strategy.collectives.layout import ParamView, TensorSpec, salt_of
from lowbit_strategy.engine.bucket import Bucket, BucketContext, BucketLayout, BucketObserver
from lowbit_strategy.engine.bucket_schedule import Stages
from lowbit_strategy.engine.carry_over import CarryOver
from lowbit_strategy.engine.engine import GradientSync
from lowbit_strategy.engine.listeners import StepListener, StepPhase
from lowbit_strategy.kernels.reference.rng import hash32
from lowbit_strategy.methods._base.method import Method, MethodStore
from lowbit_strategy.model.parameters import local_part, shaped, sharded_parameters
from lowbit_strategy.second_moment.correction import Correction
from lowbit_strategy.second_moment.exchange_steps import WINDOW, steps_until_due, turns
from lowbit_strategy.second_moment.mean_moment import NotExchanged
from lowbit_strategy.second_moment.optimizers import unsuitable
from lowbit_strategy.second_moment.param_squares import BLOCK, ParamSquares, blocks_of, mean_squares
from lowbit_strategy.second_moment.served import ROOTS, SKETCH_NUMEL, served

_KEY = "exp_avg_sq"

_log = logging.getLogger("lowbit_strategy")


@dataclass(frozen=True, slots=True)
class _Served:
    """Parameters that the same ranks reduce together, as they were when methods changed.

    Args:
        context: How their gradients travel.
        inner: How their squares travel.
        turns: When each parameter is exchanged.
        buckets: The buckets of squares.
    """

    context: BucketContext
    inner: BucketContext
    turns: dict[str, int]
    buckets: dict[BucketLayout, Bucket]


class SecondMoment(Correction, BucketObserver, StepListener):
    """Observes gradients before and after they are reduced, and writes ``exp_avg_sq`` after the optimizer's step.

    Args:
        sync: The engine.
        module: The trained module, wrapped or sharded.
    """

    name = "second_moment"

    def __init__(self, sync: GradientSync, module: nn.Module) -> None:
        self._sync = sync
        self._module = module
        self._served: dict[Comm, _Served] = {}
        self._names: dict[int, str] = {}
        self.name_parameters()
        self._kept: dict[str, ParamSquares] = {}  # statistics before reductions that may be rolled back
        self._known: dict[str, ParamSquares] = {}
        self.has_left = False
        sync.transactions.follow(self)
        sync.listeners.add(self, StepPhase.OBSERVE)
        sync.save_per_rank(self.name, self)

    @property
    def extra(self) -> Any:
        """Exchanges and memory, for plans."""
        return leaves.load("lowbit_strategy.second_moment.planned:Squares", "a plan")()

    def name_parameters(self) -> None:
        """Look up parameters again, because the model may have changed."""
        self._names |= {id(param): name for name, param in sharded_parameters(self._module).items()}

    def leave(self) -> None:
        """Stop correcting, on all ranks and after a resume."""
        self.has_left = True
        self.forget()
        self._sync.transactions.follow(NotExchanged())
        self._sync.listeners.remove(self)

    def begin_step(self) -> SecondMoment:
        return self

    def _bind_context(self, context: BucketContext) -> _Served:
        """Follow a change of methods or ranks."""
        names, state = served(self._sync.state.assignments), self._sync.state
        specs = {name: context.specs[name] for name in names if state.ranks_of(name).peers is context.comm}
        methods: dict[str, Method] = dict.fromkeys(specs, ROOTS)
        stores: dict[Method, MethodStore] = {}
        if specs:
            stores[ROOTS] = ROOTS.make_store(specs, context.comm, context.device)
        no_leftover = CarryOver(context.device)  # the engine's is for gradients
        inner = replace(
            context, specs=specs, methods=methods, stores=stores, carryover=no_leftover, notes_overflow=False
        )
        found = _Served(context, inner, turns(list(specs)), {})
        self._served[context.comm] = found
        self._known = {name: known for name, known in self._known.items() if name in names}
        return found

    # -- gradients ------------------------------------------------------------------------------------------------

    def observe(self, bucket: Bucket, x: Tensor, out: Tensor, stages: Stages) -> Stages:
        """Yield from `stages`, which reduce `x` into `out`, and in some steps exchange squares after them."""
        comm, own = bucket.context.comm, self._served.get(bucket.context.comm)
        if own is None or own.context is not bucket.context:
            own = self._bind_context(bucket.context)
        step = self._sync.step_context()
        added, sketches = list[tuple[ParamView, ParamSquares, bool]](), dict[str, Tensor]()
        for param in bucket.params if comm.world_size > 1 else ():
            if (turn := own.turns.get(param.name)) is None:
                continue
            known = self._known.setdefault(param.name, ParamSquares())
            is_first = known.begin_pass(step.index)
            if (left := steps_until_due(known.age, turn)) >= WINDOW:
                continue
            view = param.within(x, out)
            squares = view.x.float().square()
            known.sums = squares.bfloat16() if known.sums is None else known.sums.add_(squares)
            added.append((view, known, is_first))
            if left == 0:  # in every pass of the step: one may have zeros on all ranks
                sketches[param.name] = _sketch(view, step)
        yield from stages
        divisor = comm.world_size if self._sync.sharded else 1  # under FSDP2 a result is a sum
        for view, known, is_first in added:
            decoded = mean_squares(_own(view, view.out, comm.rank)).div_(divisor**2)
            known.decoded_sums = decoded if known.decoded_sums is None else known.decoded_sums.add_(decoded)
            known.num_sums += is_first or known.num_sums == 0
        if sketches:
            yield from self._exchange(own, bucket, x, sketches, step)

    def _exchange(
        self, own: _Served, bucket: Bucket, x: Tensor, sketches: Mapping[str, Tensor], step: StepContext
    ) -> Stages:
        """Exchange roots of some parameters' mean squares in a separate bucket, then sums and `sketches` of each."""
        comm = own.context.comm
        entries = tuple(each for each in bucket.layout.entries if each[0] in sketches)
        layout = replace(bucket.layout, entries=entries, num_marked=0)
        if layout not in own.buckets:
            own.buckets[layout] = Bucket(own.inner, layout)
        inner = own.buckets[layout]
        roots = torch.zeros_like(x, dtype=torch.float32)
        mean = torch.zeros(layout.row_numel, device=x.device) if layout.row_numel is not None else roots
        totals = []
        for param in inner.params:
            known = self._known[param.name]
            assert known.sums is not None
            squares = known.sums.float().div_(known.num_sums)
            totals.append(squares.sum())
            param.within(roots, mean).x.copy_(squares.sqrt_())
        yield from inner.run(roots, mean, step, self._sync.bucket_observers)
        found = [_own(view := param.within(roots, mean), view.out, comm.rank).square() for param in inner.params]
        sketched = torch.stack([sketches[param.name] for param in inner.params])
        numbers = torch.cat([sketched, torch.stack(totals)[:, None], torch.stack([x.sum() for x in found])[:, None]], 1)
        yield comm.all_reduce(numbers)
        for param, squares, sums in zip(inner.params, found, numbers / comm.world_size, strict=True):
            exact, (mean_energy, total, found_total) = sums[:SKETCH_NUMEL].square().sum(), sums[SKETCH_NUMEL:]
            if self._sync.sharded:  # only one rank knows it for each element
                found_total = found_total * comm.world_size
            scale = torch.where(found_total > 0, total / found_total, 0.0)  # a mean of roots is too small
            known = self._known[param.name]
            assert known.decoded_sums is not None
            energies = torch.stack([exact, mean_energy])
            if known.pending is not None and known.exchanged == step.index:
                energies += known.pending[2]
            known.pending = squares * scale, known.decoded_sums / known.num_sums, energies, known.gap
            known.exchanged = step.index

    # -- the optimizer --------------------------------------------------------------------------------------------

    @torch.no_grad()
    def correct_(self, optimizer: Optimizer) -> None:
        """Correct the second moment after the optimizer has stepped on reduced gradients.

        Raises:
            ValueError: It is not of Adam's kind.
        """
        if not self._known.keys() <= set(self._names.values()):  # parameters have been unfrozen
            self.name_parameters()
        for group in optimizer.param_groups:
            for param in group["params"]:
                known = self._known.get(self._names.get(id(param), ""))
                state = optimizer.state.get(param)
                if known is None or param.grad is None or not (state or "betas" not in group):
                    continue  # no state: an optimizer inside this one, or a different rank, steps it
                if not state or _KEY not in state:
                    raise ValueError(unsuitable(optimizer))
                beta2 = group["betas"][1]
                known.update(beta2)
                self._correct_(known, param, state[_KEY], beta2)

    def _correct_(self, known: ParamSquares, param: nn.Parameter, second_moment: Tensor, beta2: float) -> None:
        name = self._names[id(param)]
        spec, num_ranks = self._sync.specs[name], self._sync.state.ranks_of(name).peers.world_size
        v_N = _flat_part(second_moment, spec)
        if known.average is None or known.average.numel() != -(-v_N.numel() // BLOCK):
            known.average = blocks_of(v_N.float()).mean(1)
        else:
            assert param.grad is not None
            known.average.lerp_(mean_squares(_flat_part(param.grad, spec)), 1 - beta2)
        if known.squares is None or known.decoded is None or known.energies is None:
            return
        exact, own = known.energies
        share = torch.where(own > 0, exact / own, 1.0).clamp(0.5 / num_ranks, 1.0)
        ratio = torch.where(known.decoded > 0, share * known.average / known.decoded, 0.0)
        without = torch.where(known.decoded > 0, 0.0, known.average)  # unknown blocks: the same for all elements
        blocks = torch.addcmul(without[:, None], blocks_of(known.squares).float(), ratio[:, None])
        part = local_part(second_moment)
        part.copy_(shaped(blocks.view(-1)[: v_N.numel()], replace(spec, shape=tuple(part.shape))))

    # -- state ----------------------------------------------------------------------------------------------------

    def keep(self, names: Collection[str]) -> None:
        self._kept = {
            name: replace(known, sums=_copy(known.sums), decoded_sums=_copy(known.decoded_sums))
            for name in names
            if (known := self._known.get(name)) is not None
        } | {name: kept for name, kept in self._kept.items() if name not in names}

    def roll_back(self, names: Collection[str]) -> None:
        for name in names:
            self._known.pop(name, None)
        self._known |= {name: self._kept.pop(name) for name in names if name in self._kept}

    @contextmanager
    def taken_back(self, names: Collection[str]) -> Iterator[None]:
        known = self._known
        before = {name: self._kept[name] for name in names if name in self._kept}
        self._known = {name: each for name, each in known.items() if name not in names} | before
        try:
            yield
        finally:
            self._known = known

    def forget(self) -> None:
        """Start over: until squares have been exchanged, the optimizer's second moment is used."""
        self._known, self._kept = {}, {}

    def state_dict(self) -> dict[str, Any]:
        fields = [field for field in ParamSquares.__slots__ if field != "pending"]  # it is for the current step
        known = {name: {field: getattr(each, field) for field in fields} for name, each in self._known.items()}
        return {"known": known, "layout": self._layout(), "has_left": self.has_left}

    def _layout(self) -> dict[str, Any]:
        """The layout of the elements of the statistics."""
        orders = {name: spec.memory_order for name, spec in self._sync.specs.items() if spec.memory_order is not None}
        return {"scatter": self._sync.sharded, "memory_orders": orders}

    def load_state_dict(self, states: Iterable[Mapping[str, Any]], *, own: bool) -> None:
        state = next(iter(states))
        self.forget()
        if state.get("has_left"):
            self.leave()
        if not own or state.get("layout", self._layout()) != self._layout():
            if state["known"] and self._sync.ranks.logs:
                _log.warning("squares were kept for shards with a different layout: second_moment starts over")
            return
        device = self._sync.device
        for name, kept in state["known"].items():
            known: dict[str, Any] = {k: v.to(device) if isinstance(v, Tensor) else v for k, v in kept.items()}
            self._known[name] = ParamSquares(**known)


def _own(view: ParamView, values: Tensor, rank: int) -> Tensor:
    """The elements that this rank's optimizer steps, out of ``[numel]`` or of a padded row."""
    return values[: view.row_length(rank)] if view.spec.sharded else values


def _flat_part(tensor: Tensor, spec: TensorSpec) -> Tensor:
    """This rank's part, flat, in the element order of gradients and residuals."""
    part = local_part(tensor)
    return (part if spec.memory_order is None else part.permute(spec.memory_order)).reshape(-1)


def _sketch(view: ParamView, step: StepContext) -> Tensor:
    """Sums of elements with random signs, and the sum of squares, float32 ``[SKETCH_NUMEL + 1]``.

    The former are linear, so that ranks can add theirs, and on average have the same square.
    """
    values = view.flat().float()
    generator = torch.Generator(values.device).manual_seed(hash32(step.shared_seed + salt_of(view.spec.name, 1)))
    signs = torch.randint(0, 2, (values.numel(),), generator=generator, device=values.device, dtype=torch.int8)
    signed = F.pad(values * signs.mul_(2).sub_(1), (0, -values.numel() % SKETCH_NUMEL))
    return torch.cat([signed.view(-1, SKETCH_NUMEL).sum(0), values.square().sum().view(1)])


def _copy(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.clone()
