"""Many small trainings in one launch of real processes.

    def accumulation(folder, kind):              # runs on every rank, in its own process group
        ...
        return {"calls": calls}                  # facts: anything that can be pickled

    @scenarios(accumulation, kind=("ddp", "fsdp"))
    def test_accumulation(facts):                # what every rank returned, in rank order
        assert facts[0]["calls"] == 3

All selected tests of a file with the same world size share one launch, in which their scenarios run one after the
other. A scenario that raises fails its own tests only.
"""

from __future__ import annotations

import itertools
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

Facts = dict[str, Any]


def none(**_: Any) -> bool:
    """`slow` of scenarios that are all quick."""
    return False


def all_but(**quick: Any) -> Callable[..., bool]:
    """`slow` of all scenarios but those of these choices, each one value or a tuple of them."""
    kept = {name: value if isinstance(value, tuple) else (value,) for name, value in quick.items()}
    return lambda **chosen: any(chosen[name] not in values for name, values in kept.items())


GROUP_TIMEOUT = timedelta(seconds=25)  # a rank that waits for one that has failed gives up after this long


@dataclass(frozen=True, kw_only=True, slots=True)
class Scenario:
    """A function, its arguments and the number of ranks it runs on."""

    run: Callable[..., Facts]
    arguments: tuple[tuple[str, Any], ...]
    world_size: int

    @property
    def name(self) -> str:
        return "-".join([self.run.__name__, *(str(value) for _, value in self.arguments)])


def scenarios(
    run: Callable[..., Facts],
    *,
    world_size: int | Sequence[int] = 2,
    slow: Callable[..., bool] | None = None,
    **choices: Sequence[Any],
) -> pytest.MarkDecorator:
    """Give a test the `facts` of `run`, once for every number of ranks and combination of `choices`.

    Slow are those that `slow` says so of, by the choices and the `world_size`; without it, all but as few as have every
    choice once.
    """
    sizes = [world_size] if isinstance(world_size, int) else world_size
    combinations = [tuple(zip(choices, values, strict=True)) for values in itertools.product(*choices.values())]
    longest = max(map(len, choices.values()), default=1)
    each_once = [tuple((name, list(each)[i % len(each)]) for name, each in choices.items()) for i in range(longest)]
    params, names = [], []
    for size, arguments in itertools.product(sizes, combinations):
        chosen = Scenario(run=run, arguments=arguments, world_size=size)
        is_slow = slow(**dict(arguments), world_size=size) if slow else arguments not in each_once
        params.append(pytest.param(chosen, marks=[pytest.mark.slow] if is_slow else []))
        of_ranks = [f"{size} ranks"] if len(sizes) > 1 else []
        names.append("-".join([*(str(value) for _, value in arguments), *of_ranks]) or "run")
    return pytest.mark.parametrize("facts", params, indirect=True, ids=names)


def run_scenarios(rank: int, world_size: int, chosen: Sequence[Scenario], folder: Path) -> dict[str, Facts | str]:
    """On every rank: the facts of each scenario, or the traceback of what it raised.

    Ranks start each scenario together. After one that raised anywhere they get a fresh process group.
    """
    outcomes: dict[str, Facts | str] = {}
    store = dist.FileStore(str(folder / f"ranks-{world_size}"), world_size)
    store.set_timeout(4 * GROUP_TIMEOUT)
    for number, scenario in enumerate(chosen):
        if not dist.is_initialized():
            dist.init_process_group(
                "gloo",
                store=dist.PrefixStore(str(number), store),
                timeout=GROUP_TIMEOUT,
                rank=rank,
                world_size=world_size,
            )
        own = folder / scenario.name
        own.mkdir(exist_ok=True)
        torch.manual_seed(0)
        start = time.perf_counter()
        try:
            outcomes[scenario.name] = scenario.run(own, **dict(scenario.arguments))
        except Exception:
            outcomes[scenario.name] = traceback.format_exc(limit=-8)  # frameworks pile up dozens of frames
        print(f"--- {scenario.name} took {time.perf_counter() - start:.1f} s", flush=True)
        store.set(f"{scenario.name}/{rank}", "raised" if isinstance(outcomes[scenario.name], str) else "returned")
        if b"raised" in [store.get(f"{scenario.name}/{other}") for other in range(world_size)]:
            dist.destroy_process_group()
    return outcomes


def raised(call: Callable[[], object]) -> str:
    """What `call` raises, as ``Type: message``; empty if it does not."""
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""
