"""The model of random programs: two networks, the second of which judges what the first makes."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from testing.training.random_loop.space import WIDTH


class Judge(nn.Module):
    """A body and two heads, one of which works at a time."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())
        self.heads = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))

    def forward(self, x: Tensor, head: int) -> Tensor:
        made: Tensor = self.heads[head](self.body(x))
        return made


class Maker(nn.Sequential):
    """Layers under a name by which frameworks shard them."""


class Two(nn.Module):
    """Two networks, the second of which judges what the first makes."""

    def __init__(self) -> None:
        super().__init__()
        self.first = Maker(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
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
