"""A controller of the user's own has a name in configuration files."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import pytest

from lowbit_strategy import Compressor, LoCo
from lowbit_strategy.accelerate import LowBitPlugin
from lowbit_strategy.collectives.layout import TensorSpec
from lowbit_strategy.control import CONTROLLERS, Accordion, Controller, Decision, State, Telemetry, register_controller
from lowbit_strategy.options.conversion import convert

LIGHT, HEAVY = LoCo(bits=8), LoCo(bits=2)


@dataclass(frozen=True, kw_only=True)
class Alternating(Controller):
    """Light in even steps, heavy in odd ones."""

    light: Compressor = LIGHT
    heavy: Compressor = HEAVY

    @property
    def levels(self) -> tuple[Compressor, ...]:
        return (self.light, self.heavy)

    def init(self, specs: Sequence[TensorSpec], world_size: int) -> State:
        return {"names": [spec.name for spec in specs]}

    def decide(self, telemetry: Telemetry, state: State) -> Decision:
        return Decision(state=state, levels=dict.fromkeys(state["names"], telemetry.progress.step % 2))


@pytest.fixture
def registered() -> Iterator[None]:
    register_controller("alternating", Alternating)
    yield
    del CONTROLLERS["alternating"]


@pytest.mark.usefixtures("registered")
def test_a_file_names_a_registered_controller() -> None:
    section = {"name": "alternating", "heavy": {"compressor": "loco", "bits": 3}}
    assert convert(section, Controller, "controller") == Alternating(heavy=LoCo(bits=3))
    assert LowBitPlugin(controller={"name": "alternating"}).controller == Alternating()  # type: ignore[arg-type]
    register_controller("alternating", Alternating)  # again, as when a module is imported twice


@pytest.mark.parametrize("name", ["accordion", "Accordion", "ada_qs"])  # files may write them so
def test_a_name_is_taken_once(name: str) -> None:
    with pytest.raises(ValueError, match=f"there is a controller called '{name}' already"):
        register_controller(name, Alternating)
    assert CONTROLLERS["accordion"] is Accordion
