"""What must hold of a program's runs: with compression and without, told in several ways, looked at, and resumed."""

from __future__ import annotations

import gc
import logging
import random
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist

from lowbit_strategy import Dense
from testing.processes.ranks import join_group, run_ranks
from testing.training.comparing import close, full
from testing.training.random_loop import actions  # noqa: F401  they register themselves
from testing.training.random_loop.loop import Loop
from testing.training.random_loop.models import Two
from testing.training.random_loop.space import COMPRESSORS, CONSERVING, Program
from testing.training.random_loop.ways import (
    ByHand,
    NeverEnded,
    OneCall,
    WithAccelerate,
    WithFabric,
    WithLightning,
    can_tell,
)

WAYS: dict[str, type[Loop]] = {
    "by hand": ByHand,
    "never ended": NeverEnded,
    "fabric": WithFabric,
    "accelerate": WithAccelerate,
    "lightning": WithLightning,
}


def way_of(program: Program) -> str:
    """How the program is told, in addition to the one call."""
    possible = [name for name, way in WAYS.items() if can_tell(way, program)]
    return program.way or random.Random(f"{program.layout} {program.seed}").choice(possible)


def compared(program: Program, folder: Path) -> list[str]:
    """What is not as it has to be in runs of one program; on all ranks."""
    wrong: list[str] = []
    compressor = COMPRESSORS[program.seed % len(COMPRESSORS)]
    is_sharded, is_local = program.place.sharded, program.place.is_local

    def run(way: type[Loop], what: Any = compressor, **options: Any) -> list[float]:
        gc.collect()  # groups of gloo keep their threads as long as anything refers to them
        loop = way(program, what, folder)
        found = loop.run(**options)
        wrong.extend(f"{way.__name__}: {text}" for text in loop.wrong)
        loop.close()
        return found

    expected = run(OneCall)
    values = expected[len(expected) - len(list(Two().parameters())) :]
    alike: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(alike, values)
    if not is_sharded and any(each != alike[0] for each in alike):
        wrong.append("ranks differ")
    if not all(value == value for value in values):
        wrong.append("not finite")
    told = way_of(program)
    if run(WAYS[told]) != expected:
        wrong.append(f"{told} is not one call")
    for way in OneCall, WAYS[told]:
        if run(way, glances=True) != expected:
            wrong.append(f"{way.__name__}: glances matter")
    resumes = WithFabric if told == "fabric" and resumes_in_fabric(program) else OneCall
    measures_time = program.controller == "gravac"  # which a first step has not
    if not measures_time and resumed(program, resumes, compressor, folder) != values:
        wrong.append(f"{resumes.__name__}: resumed differs")
    if is_local:
        return wrong
    dense, stock = run(OneCall, Dense()) if program.controller is None else None, run(Loop, None)
    if dense is not None and not close(dense, stock, 1e-5):
        wrong.append("dense is not stock")
    if program.controller is None and "prune" not in program.actions:
        pair = [
            loop.conserved()
            for way, what in ((OneCall, CONSERVING[program.seed % len(CONSERVING)]), (Loop, None))
            if [loop := way(program, what, folder, still=True)]
        ]
        if not all(torch.allclose(one, other, rtol=1e-3, atol=1e-3) for one, other in zip(*pair, strict=True)):
            wrong.append("gradients are not conserved")
    return wrong


def left(program: Program, folder: Path) -> None:
    """Run until the checkpoint, which any layout may load: `taken_over`."""
    loop = OneCall(program, COMPRESSORS[program.seed % len(COMPRESSORS)], folder)
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
    loop = OneCall(program, COMPRESSORS[program.seed % len(COMPRESSORS)], folder)
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


def resumed(program: Program, way: type[Loop], compressor: Any, folder: Path) -> list[float]:
    """The weights of a run that ended in the middle, and went on as another."""
    first = way(program, compressor, folder)
    first.run(until=program.saved_after)
    facts = first.save("middle")
    first.close()
    dist.barrier()
    second = way(program, compressor, folder)
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
