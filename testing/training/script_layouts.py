"""The layouts in which scripts are run as without this package, in Accelerate's loops and in the HF Trainer's."""

from __future__ import annotations

from typing import Any, NamedTuple

from lowbit_strategy import Dense, DiLoCo, LocalSGD, LoCo, WeightCode
from testing.processes.scenarios import Facts
from testing.training.accelerated import Kind

TOLERANCE = 1e-6
LOCO = LoCo(block_size=32)


class Layout(NamedTuple):
    """How a model is spread, ``ddp`` or ``fsdp``, and the plugin's options; None: the framework by itself."""

    kind: Kind
    options: dict[str, Any] | None


STOCK = Layout("ddp", None)
OFF = {
    "ddp": Layout("ddp", {"compressor": Dense()}),
    "local": Layout("ddp", {"compressor": Dense(), "outer": LocalSGD(every=1)}),
    "fsdp": Layout("fsdp", {"compressor": Dense(), "weights": "exact"}),
}
ON = {
    "ddp": Layout("ddp", {"compressor": LOCO}),
    "diloco": Layout("ddp", {"compressor": LOCO, "outer": DiLoCo(every=3)}),
    "fsdp": Layout("fsdp", {"compressor": LOCO, "weights": WeightCode(block_size=32)}),
}


def distances(runs: dict[str, Any], reference: dict[str, Any]) -> Facts:
    """How far each run's weights are from those of the reference, at most."""
    return {
        name: max(float((run[key] - value).abs().max()) for key, value in reference.items() if value.numel())
        for name, run in runs.items()
    }


def check_close(facts: list[Facts]) -> None:
    assert all(rank and all(far <= TOLERANCE for far in rank.values()) for rank in facts), facts
