"""Controllers: which compressor each parameter gets, and when. Pure functions of telemetry; they know no ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from lowbit_strategy import leaves
from lowbit_strategy.control.accordion import Accordion as Accordion
from lowbit_strategy.control.accordion import AccordionBatch as AccordionBatch
from lowbit_strategy.control.base import (
    Controller,
    Decision,
    EndToEnd,
    Energy,
    Probe,
    Progress,
    State,
    Switch,
    Telemetry,
    group_of,
)
from lowbit_strategy.control.guard import Bounds as Bounds
from lowbit_strategy.control.guard import Guard as Guard
from lowbit_strategy.control.schedule import Phase as Phase
from lowbit_strategy.control.schedule import Schedule as Schedule
from lowbit_strategy.control.static import Static as Static
from lowbit_strategy.options.conversion import Conversion, Mismatch, Source, call, named, register_conversion

if TYPE_CHECKING:
    from lowbit_strategy.control.zoo.adaqs import AdaQS as AdaQS
    from lowbit_strategy.control.zoo.gravac import GraVAC as GraVAC

# One import and one line here for each; of the zoo the line alone.
CONTROLLERS: dict[str, Callable[..., Controller]] = {
    "accordion": Accordion,
    "accordion_batch": AccordionBatch,
    "guard": Guard,
    "schedule": Schedule,
    "static": Static,
}
_ZOO = {
    "adaqs": "lowbit_strategy.control.zoo.adaqs:AdaQS",
    "gravac": "lowbit_strategy.control.zoo.gravac:GraVAC",
}
CONTROLLERS |= {name: leaves.load(target, name) for name, target in _ZOO.items() if leaves.is_present(target)}
__all__ = [
    "CONTROLLERS",
    "Bounds",
    "Controller",
    "Decision",
    "EndToEnd",
    "Energy",
    "Phase",
    "Probe",
    "Progress",
    "State",
    "Switch",
    "Telemetry",
    "group_of",
    "register_controller",
    *(controller.__name__ for controller in CONTROLLERS.values()),
]


def __getattr__(name: str) -> Any:
    """A controller of the zoo."""
    target = next((each for each in _ZOO.values() if each.endswith(f":{name}")), None)
    if target is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return leaves.load(target, name)


def register_controller(name: str, controller: Callable[..., Controller]) -> None:
    """Let configuration files name a controller: ``controller: {name: NAME, option: value}``.

    Call it at the end of the controller's module, so that every process does.

    Args:
        name: Letters, digits and underscores.
        controller: The class, or a function of its options.

    Raises:
        ValueError: The name is taken.
    """
    if CONTROLLERS.setdefault(name, controller) is not controller:
        raise ValueError(f"there is a controller called {name!r} already: choose another name")


def _make(value: Any, source: Source) -> Controller:
    """Make one from ``{name: accordion, option: value, ...}``, as configuration files write it."""
    if not isinstance(value, Mapping):
        raise Mismatch
    known: dict[str, str | Callable[..., Controller]] = {**_ZOO, **CONTROLLERS}
    make, options = named(value, known, "controller")
    return call(leaves.load(make, value["name"]) if isinstance(make, str) else make, options, source)


_MAPPING = f"a mapping with a name ({', '.join(CONTROLLERS)}) and the controller's options"

register_conversion(Controller, Conversion(_make, f"one of lowbit_strategy.control or {_MAPPING}", _MAPPING))
