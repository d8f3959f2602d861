"""Random training loops, over every layout: `testing/training/random_loop/` says what is done and what must hold.

More seeds: ``python -m benchmarks.random_programs``.
"""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest

from testing.training.random_loop import CONTROLLERS, LAYOUTS, Program, launched

ONCE_WRONG = [  # what random seeds have found, made short
    Program(0, "ddp", ("together", "together", "together", "together", "surgery", "together"), 2, scaled=True),
    Program(2, "ddp", ("together", "taken_away", "at_two_rates"), 1, ("sgd", "adamw"), False, scaled=True, sessions=2),
    Program(1, "fsdp", ("together", "rests", "added", "together"), 2, ("adamw", "sgd"), way="never ended"),
    Program(5, "fsdp", ("together", "spiked", "added", "together"), 2, way="fabric"),
    Program(4, "hsdp", ("together", "spiked", "together", "together"), 1, ("adamw", "sgd"), way="lightning"),
    Program(6, "local hsdp", (*3 * ("together", "rests"), "together"), 4, rule=2, way="by hand"),
    Program(4, "fsdp", ("thrown_away", *6 * ("together",)), controller="accordion, mean", way="never ended"),
    Program(1, "fsdp", ("together", "taken_away", *10 * ("together",)), 2, ("adamw", "adamw"), way="fabric"),
    Program(1, "ddp", ("together", "taken_away", *4 * ("together",)), 2, sessions=2, way="never ended"),
    Program(0, "local", ("together", "taken_away", *3 * ("together",)), 2, sessions=2, rule=1, way="never ended"),
]


DRAWN = {"ddp": {3: "accelerate"}, "fsdp": {9: "lightning"}, "local": {2: "fabric"}}


@pytest.mark.parametrize("layout", ["ddp", "fsdp", "local", "hsdp", "local hsdp"])
def test_a_loop_means_what_it_means_without_compression(tmp_path: Path, layout: str) -> None:
    known = [program for program in ONCE_WRONG if program.layout == layout]
    drawn = [replace(Program.draw(layout, seed), way=way) for seed, way in DRAWN.get(layout, {}).items()]
    assert launched(tmp_path, [*known, *drawn]) == []


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["ddp", "fsdp"])
def test_ranks_whose_sets_have_other_orders(tmp_path: Path, layout: str) -> None:
    actions = ("together", "surgery", "thrown_away", "rests", "taken_away", "renamed", "spiked", "together")
    programs = [Program(seed, layout, actions, 5, ("adamw", "sgd"), sessions=1 + seed % 2) for seed in range(3)]
    assert launched(tmp_path, programs, env={"PYTHONHASHSEED": "random"}) == []


@pytest.mark.slow
@pytest.mark.parametrize("part", range(5))
@pytest.mark.parametrize("layout", LAYOUTS)
def test_fresh_loops_mean_what_they_mean_without_compression(tmp_path: Path, layout: str, part: int) -> None:
    """Half of the seeds are new in each run."""
    seeds = [*range(100 + 4 * part, 104 + 4 * part), *(random.randrange(10**6, 10**9) for _ in range(4))]
    print(f"seeds of {layout}: {seeds}")
    assert launched(tmp_path, [Program.draw(layout, seed) for seed in seeds]) == []


@pytest.mark.slow
@pytest.mark.parametrize("controller", [None, *CONTROLLERS])
@pytest.mark.parametrize("layout", [name for name, place in LAYOUTS.items() if not place.is_local])
def test_a_checkpoint_goes_on_in_another_layout(tmp_path: Path, layout: str, controller: str | None) -> None:
    others = [name for name, place in LAYOUTS.items() if name != layout and not place.is_local]
    other = random.Random(f"{layout} {controller}").choice(others)
    assert launched(tmp_path, [Program.draw(layout, seed, controller) for seed in range(2)], onto=other) == []
