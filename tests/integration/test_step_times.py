"""What a step takes and sends is reported once, and that changes nothing of the training."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any
from unittest import mock

import lightning as L
import pytest

from lowbit_strategy import Dense
from lowbit_strategy.plan import step_line
from testing.log import listen
from testing.processes.node_size import nodes_of
from testing.processes.scenarios import Facts, all_but, scenarios
from testing.training.comparing import fingerprint, random_numbers
from testing.training.regression import BATCH, Kind, Regression, loader, strategy, trainer

SETUPS: dict[str, tuple[Kind, dict[str, Any]]] = {
    "ddp": ("ddp", {}),
    "ddp, far": ("ddp", {"far_links": True}),
    "fsdp": ("fsdp", {}),
    "fsdp, exact weights": ("fsdp", {"weights": "exact"}),
    "fsdp, far": ("fsdp", {"far_links": True}),
    "hsdp": ("hsdp", {}),
}
STEPS = 12
LINE = re.compile(
    r"a step takes (\S+) s, (\S+) s of it waiting for (gradients|gradients and weights) \(median of steps 5 to 7 on"
    r" rank 0\), and a rank sends ([\d.]+ \w+); float32 would send ([\d.]+ \w+), bfloat16 ([\d.]+ \w+)$"
)


def reports(folder: Path, setup: str) -> Facts:
    return with_and_without(*SETUPS[setup]) | {"setup": setup}


def with_and_without(kind: Kind, options: dict[str, Any]) -> Facts:
    found: Facts = {}
    for name, steps in {"with": 4, "without": 10 * STEPS}.items():
        L.seed_everything(0, verbose=False)
        model = Regression()
        shorter = mock.patch.multiple(step_line, WARM_STEPS=steps, TIMED_STEPS=3)
        with shorter, listen() as lines:
            made = trainer(strategy(kind, **options), max_steps=STEPS)
            made.fit(model, loader(2 * BATCH * STEPS))
        sync = made.strategy.sync
        found[name] = {
            "lines": [line for line in lines if "a step takes" in line],
            "weights": fingerprint(model),
            "sent": sync.ranks.peers.sent_nbytes,
            "random": random_numbers(),
        }
    return found


@scenarios(reports, setup=SETUPS, slow=all_but(setup=("ddp", "fsdp")))
def test_it_is_reported_once_and_changes_nothing(facts: list[Facts]) -> None:
    check(facts, 1)
    found = LINE.search(facts[0]["with"]["lines"][0])
    assert found is not None, facts[0]["with"]["lines"]
    assert 0 < float(found[2]) <= float(found[1])
    assert found[3] == ("gradients and weights" if facts[0]["setup"] in ("fsdp", "fsdp, far") else "gradients")
    sent, fp32, bf16 = (nbytes(found[at]) for at in (4, 5, 6))
    assert sent < (fp32 if facts[0]["setup"] == "fsdp, exact weights" else bf16)
    assert bf16 == pytest.approx(fp32 / 2, rel=0.02)


def nbytes(text: str) -> float:
    number, unit = text.split()
    return float(number) * {"B": 1, "KB": 1e3, "MB": 1e6}[unit]


def uncompressed(folder: Path) -> Facts:
    return with_and_without("ddp", {"compressor": Dense()})


@scenarios(uncompressed)
def test_what_float32_would_send_is_what_it_sends(facts: list[Facts]) -> None:
    found = LINE.search(facts[0]["with"]["lines"][0])
    assert found is not None
    assert nbytes(found[4]) == pytest.approx(nbytes(found[5]), rel=0.05)


def two_levels(folder: Path) -> Facts:
    with nodes_of(2):
        return with_and_without("ddp", {"two_level": True})


@pytest.mark.slow
@scenarios(two_levels, world_size=4)
def test_with_two_levels(facts: list[Facts]) -> None:
    check(facts, 1)


def local_steps(folder: Path) -> Facts:
    return with_and_without("ddp", {"outer": "diloco"})


@scenarios(local_steps)
def test_nothing_is_said_of_local_steps(facts: list[Facts]) -> None:
    check(facts, 0)


def check(facts: list[Facts], count: int) -> None:
    for rank, each in enumerate(facts):
        assert len(each["with"]["lines"]) == (count if rank == 0 else 0)
        assert not each["without"]["lines"]
        assert each["with"]["weights"] == each["without"]["weights"]
        assert each["with"]["sent"] == each["without"]["sent"]
        assert each["with"]["random"] == each["without"]["random"]
