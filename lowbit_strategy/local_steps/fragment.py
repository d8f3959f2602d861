"""A fragment of a model: parameters that synchronize together, their messages, and the optimizers of the anchor."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from lowbit_strategy.collectives.comm import Pending, wait_for_all
from lowbit_strategy.collectives.layout import TensorSpec
from lowbit_strategy.engine.bucket import BucketLayout
from lowbit_strategy.engine.bucket_schedule import BucketSchedule, Stages
from lowbit_strategy.kernels.reference.rng import sample_positions
from lowbit_strategy.local_steps.cutting import NUM_FACTS, SAMPLE_NUMEL, buckets_of
from lowbit_strategy.local_steps.rule import OuterRule
from lowbit_strategy.model.parameters import local_part, shaped


class Fragment:
    """Args:
        specs: Specs of the fragment's parameters, for each of `GradientSync.all_ranks`.
        params: All parameters by name; of a sharded parameter the local shard is synchronized.

    Attributes:
        anchors: The weights that all ranks share: float32, by name, views of one flat tensor.
        sample: Positions of the elements from which the drift of ranks is measured.
        buckets: The buckets, at least one: each has the index in `GradientSync.all_ranks` of the ranks that reduce it,
            its layout, and its slice of the pseudo-gradient.
    """

    def __init__(self, specs: Sequence[Sequence[TensorSpec]], params: Mapping[str, Tensor]) -> None:
        self._specs = [spec for part in specs for spec in part]
        self._params = {spec.name: params[spec.name] for spec in self._specs}
        self.numel = sum(spec.numel for spec in self._specs)
        self.buckets = _buckets(specs)
        device = next(iter(self.params.values())).device
        self.sample = sample_positions(self.numel, min(self.numel, SAMPLE_NUMEL), 0, device)
        self._anchor = torch.empty(self.numel, dtype=torch.float32, device=device)
        self.anchors = self.views(self._anchor)
        self.rebase()

    @property
    @torch.no_grad()
    def params(self) -> dict[str, Tensor]:
        """The weights as this rank holds them, by name."""
        return {name: local_part(param) for name, param in self._params.items()}

    def views(self, flat_N: Tensor) -> dict[str, Tensor]:
        """Views of a flat tensor by name, in the shape and memory order of the parameters."""
        parts = flat_N.split([spec.numel for spec in self._specs])
        return {spec.name: shaped(part, spec) for part, spec in zip(parts, self._specs, strict=True)}

    @torch.no_grad()
    def rebase(self) -> None:
        """Set the anchor to the current weights."""
        torch._foreach_copy_(list(self.anchors.values()), list(self.params.values()))

    @torch.no_grad()
    def pseudo_gradient(self) -> Tensor:
        """The anchor, rounded to the weights' dtype, minus the weights: float32 ``[numel]``."""
        x_N = torch.empty_like(self._anchor)
        weights = self.params
        for name, part in self.views(x_N).items():
            weight, anchor = weights[name], self.anchors[name]
            if weight.dtype == torch.float32:
                torch.sub(anchor, weight, out=part)
            else:
                part.copy_(anchor.to(weight.dtype)).sub_(weight)
        return x_N

    @torch.no_grad()
    def pull_(self, mix: float) -> None:
        """``weights = mix * weights + (1 - mix) * anchor``."""
        weights, anchors = list(self.params.values()), list(self.anchors.values())
        if mix == 0.0:
            torch._foreach_copy_(weights, anchors)
            return
        for weight, anchor in zip(weights, anchors, strict=True):
            weight.copy_(torch.lerp(anchor, weight.float(), mix))


def _buckets(specs: Sequence[Sequence[TensorSpec]]) -> list[tuple[int, BucketLayout, slice]]:
    buckets = [(place, bucket) for place, part in enumerate(specs) for bucket in buckets_of(part)]
    found, at = [], 0
    for number, (place, bucket) in enumerate(buckets, 1):
        entries, start = [], at
        for spec in bucket:
            if spec.numel:  # under HSDP this rank may have an empty shard
                entries.append((spec.name, at - start))
            at += spec.numel
        found.append((place, BucketLayout(tuple(entries), last=number == len(buckets)), slice(start, at)))
    return found


@dataclass(slots=True)
class FragmentSync:
    """One synchronization of a fragment: what this rank has sent and, once it has arrived, the result for all ranks.

    A header is sent before the pseudo-gradient and summed over ranks without compression: ``[done?, asks?, loss,
    ||s||^2, finite? of each rank, s, changes of buffers]``, with s a sample of the pseudo-gradient. Reading it waits
    for the device.

    Args:
        place: The fragment's place among all fragments.
        fragment: The fragment that is synchronized.
        x: The pseudo-gradient; once it has arrived, the mean.
        header: float32, flat.
        world_size: Number of ranks that synchronize.
        delay: Optimizer steps after which it is applied.
        age: Optimizer steps since it was sent.
        weights: Each rank's weight, 1 on average; empty: all 1.
        arrivals: Arrivals of the header and of the buckets.
    """

    place: int
    fragment: Fragment
    x: Tensor
    header: Tensor
    world_size: int
    delay: int
    age: int = 0
    weights: tuple[float, ...] = ()
    arrivals: Sequence[Pending] = ()

    def wait(self) -> None:
        """Wait until all of it has arrived."""
        wait_for_all(self.arrivals)

    @property
    def all_done(self) -> bool:
        """Whether all ranks have stopped training."""
        return int(self.header[0]) == self.world_size

    @property
    def asked(self) -> bool:
        """Whether any rank wants all ranks to do something together afterwards."""
        return bool(self.header[1])

    @property
    def loss(self) -> float | None:
        """The mean of all ranks' losses; None if a rank does not know its loss, or it is not finite."""
        loss = float(self.header[2]) / self.world_size
        return loss if math.isfinite(loss) else None

    @property
    def left_out(self) -> list[int]:
        """Ranks whose weights were not finite, which sent zeros."""
        finite_W = self.header[NUM_FACTS : NUM_FACTS + self.world_size]
        return [rank for rank, finite in enumerate(finite_W.tolist()) if not finite]

    def share_without(self, left_out: Sequence[int]) -> float:
        """The sum of the other ranks' weights."""
        weights = self.weights or (1.0,) * self.world_size
        return sum(weight for rank, weight in enumerate(weights) if rank not in left_out)

    def means(self, share: float) -> tuple[Tensor, Tensor, Tensor]:
        """Means of ``||s||^2``, ``s`` and the changes of buffers, over ranks whose weights sum to `share`."""
        means, at = self.header / (share or 1.0), NUM_FACTS + self.world_size
        sample_numel = len(self.fragment.sample)
        return means[3], means[at : at + sample_numel], means[at + sample_numel :]

    def state_dict(self) -> dict[str, Any]:
        """The fragment's state; to be called after `wait`."""
        return {
            "means": self.fragment.views(self.x),
            "header": {"flat": self.header, "world_size": self.world_size},
            "delay": self.delay,
            "age": self.age,
        }

    @classmethod
    def from_state(cls, saved: Mapping[str, Any] | None, fragments: Sequence[Fragment]) -> FragmentSync | None:
        """None if nothing was in flight, or the fragments have other parameters now."""
        for place, fragment in enumerate(fragments if saved is not None else ()):
            if saved is not None and fragment.anchors.keys() == saved["means"].keys():
                x_N = torch.empty(fragment.numel, dtype=torch.float32, device=fragment.sample.device)
                for name, view in fragment.views(x_N).items():
                    view.copy_(saved["means"][name])
                header, world_size = saved["header"]["flat"].to(x_N.device), saved["header"]["world_size"]
                return cls(place, fragment, x_N, header, world_size, saved["delay"], saved["age"])
        return None


class AnchorOptimizer:
    """The outer optimizer of named tensors.

    Args:
        rule: The rule that makes the optimizer.
        tensors: The tensors that it steps, by name.
    """

    def __init__(self, rule: OuterRule, tensors: Mapping[str, Tensor]) -> None:
        self._tensors = dict(tensors)
        self._optimizer = rule.optimizer(list(self._tensors.values()))

    @property
    def kind(self) -> str:
        """The name of its class."""
        return type(self._optimizer).__name__

    @torch.no_grad()
    def step(self, gradients: Mapping[str, Tensor]) -> None:
        """Step the tensors that `gradients` names."""
        for name, gradient in gradients.items():
            self._tensors[name].grad = gradient
        self._optimizer.step()
        for name in gradients:
            self._tensors[name].grad = None

    def restart(self) -> None:
        """Forget all moments."""
        self._optimizer.state.clear()

    def state_dict(self) -> dict[str, Any]:
        """The state by name; tensors are the live ones."""
        return {name: dict(self._optimizer.state.get(tensor, {})) for name, tensor in self._tensors.items()}

    def load(self, name: str, kept: Mapping[str, Any]) -> None:
        """One tensor's entry of `state_dict`."""
        tensor = self._tensors[name]
        self._optimizer.state[tensor] = {key: _like(value, tensor) for key, value in kept.items()}


def _like(value: Any, tensor: Tensor) -> Any:
    if not isinstance(value, Tensor):
        return value
    return value.to(tensor.device, copy=True) if value.dim() else value.clone()


class EagerUpdate:
    """Applies this rank's contribution before the all-reduce completes, and tracks how far its weights are ahead of the
    anchors.

    The outer optimizer is linear in its gradients, so the published step with ``own(t) / W + mean(t - 1) - own(t - 1) /
    W`` from each rank's own point is a sum of two: the anchor, which all ranks move by the means that have arrived, and
    an offset, which is the last step of a second optimizer that sees only this rank's ``own / W``. The anchors stay the
    same on all ranks.

    Args:
        rule: The rule that makes the second optimizer.
        fragments: Fragments of the model.
        world_size: W, the ranks of the mean.
    """

    def __init__(self, rule: OuterRule, fragments: Sequence[Fragment], world_size: int) -> None:
        self._world_size = world_size
        self._offsets = {name: torch.zeros_like(a) for fragment in fragments for name, a in fragment.anchors.items()}
        self._optimizer = AnchorOptimizer(rule, self._offsets)

    @torch.no_grad()
    def restart(self) -> None:
        """Start again: weights are the anchors, and nothing has been sent yet."""
        self._optimizer.restart()
        torch._foreach_zero_(list(self._offsets.values()))

    @torch.no_grad()
    def before_sending(self, fragment: Fragment, x_N: Tensor) -> None:
        """Continue from the anchor plus this rank's share of the pseudo-gradient `x_N`."""
        self._optimizer.step(fragment.views(x_N / self._world_size))
        weights = fragment.params
        for name, anchor in fragment.anchors.items():
            weights[name].copy_(anchor + self._offsets[name])

    @contextlib.contextmanager
    def moving_with(self, fragment: Fragment) -> Iterator[None]:
        """A context in which the anchor moves. What this rank trained since sending continues from the new anchor."""
        for name, anchor in fragment.anchors.items():
            self._offsets[name].add_(anchor)  # where its weights started
        yield
        weights = fragment.params
        for name, anchor in fragment.anchors.items():
            start = self._offsets[name]
            weights[name].copy_(weights[name].float() + (anchor - start))
            start.zero_()

    def state_dict(self) -> dict[str, Any]:
        """Tensors are the live ones."""
        return {"offsets": self._offsets, "optimizer": self._optimizer.state_dict()}

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for name, offset in self._offsets.items():
            if name in state["offsets"]:
                offset.copy_(state["offsets"][name])
                self._optimizer.load(name, state["optimizer"].get(name, {}))


class AsyncReducer(Protocol):
    """Reduces while its caller continues."""

    def submit(self, *buckets: Stages, result: Tensor, last: bool) -> Pending: ...


class BlockingReducer:
    """All results have arrived when `submit` of the last one returns."""

    def __init__(self) -> None:
        self._schedule = BucketSchedule()

    def submit(self, *buckets: Stages, result: Tensor, last: bool) -> Pending:
        future: torch.futures.Future[Tensor] = torch.futures.Future(devices=[result.device] if result.is_cuda else None)
        try:
            self._schedule.start(buckets, result, future, last=last)
        except Exception as error:
            self._schedule.fail(error)
            raise
        return future
