"""A rank's optimizers and gradient scaler, whose state differs between ranks that take local steps."""

from __future__ import annotations

from collections.abc import Callable, Mapping, MutableMapping, Sequence
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer


class OwnOptimizers:
    """The optimizers of a rank's weights. A step ends when all have stepped; their state is saved with the weights."""

    def __init__(self) -> None:
        self._bound: tuple[Callable[[], Sequence[Optimizer]], Callable[[], Any]] = list, lambda: None
        self._seen: list[Optimizer] = []  # optimizers that have stepped in this process
        self._stepped: set[int] = set()  # those that have stepped since the last step ended

    def bind(self, optimizers: Callable[[], Sequence[Optimizer]], scaler: Callable[[], Any]) -> None:
        """Set the functions that return them. Without them, as in a custom loop, those that have stepped count."""
        self._bound = optimizers, scaler

    def _parts(self) -> dict[str, Any]:
        """The optimizers and the scaler that are known, by name."""
        optimizers, scaler = self._bound
        parts: dict[str, Any] = {f"optimizer {at}": each for at, each in enumerate(optimizers())}
        return parts if scaler() is None else parts | {"scaler": scaler()}

    def all_have_stepped(self, optimizer: Optimizer) -> bool:
        """Note that `optimizer` has stepped, or a scaler has skipped its step. Return whether all have since
        `begin_step`.
        """
        if not any(optimizer is each for each in self._seen):
            self._seen.append(optimizer)
        self._stepped.add(id(optimizer))
        bound = [each for each in self._parts().values() if isinstance(each, Optimizer)]
        return self._stepped >= {id(each) for each in (*self._seen, *bound)}

    @property
    def has_stepped(self) -> bool:
        """Whether one of them has stepped since `begin_step`."""
        return bool(self._stepped)

    def begin_step(self) -> None:
        """Begin a step."""
        self._stepped = set()

    def forget_moments(self) -> None:
        """Reset the optimizers' moments, which are not finite because this rank's weights were not."""
        for part in self._parts().values():
            if isinstance(state := getattr(part, "state", None), MutableMapping):
                state.clear()

    def state_dict(self) -> dict[str, Any]:
        parts = self._parts()
        return {
            "own": {name: each.state_dict() for name, each in parts.items()},
            "stepped": [name for name, each in parts.items() if id(each) in self._stepped],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        parts = self._parts()
        for name, saved in state["own"].items():
            if name in parts:
                parts[name].load_state_dict(_resharded(parts[name], saved))
        self._stepped = {id(parts[name]) for name in state.get("stepped", ()) if name in parts}


def _resharded(part: Any, saved: Mapping[str, Any]) -> dict[str, Any]:
    """An optimizer's saved state, with its tensors sharded like their parameters."""
    groups = getattr(part, "param_groups", None)
    if groups is None:  # a gradient scaler
        return dict(saved)
    params = [param for group in groups for param in group["params"]]
    state = {at: {key: _like(params[at], value) for key, value in kept.items()} for at, kept in saved["state"].items()}
    return {**saved, "state": state}


def _like(param: Tensor, value: Any) -> Any:
    if not isinstance(param, DTensor) or not isinstance(value, Tensor) or value.shape != param.to_local().shape:
        return value
    return DTensor.from_local(
        value.to(param.device),
        param.device_mesh,
        param.placements,
        run_check=False,
        shape=param.shape,
        stride=param.stride(),
    )
