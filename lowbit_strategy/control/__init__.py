"""Controllers decide which compressor each parameter gets. They are pure functions of telemetry."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from lowbit_strategy import leaves
from lowbit_strategy.control.accordion import Accordion as Accordion
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
)
from lowbit_strategy.control.bounds import Bounds as Bounds
from lowbit_strategy.control.grouping import group_of
from lowbit_strategy.options.conversion import Mismatch, call, named, plain, register_conversion

if TYPE_CHECKING:
    from lowbit_strategy.control.zoo.accordion_batch import AccordionBatch as AccordionBatch
    from lowbit_strategy.control.zoo.adaqs import AdaQS as AdaQS
    from lowbit_strategy.control.zoo.gravac import GraVAC as GraVAC
    from lowbit_strategy.control.zoo.guard import Guard as Guard
    from lowbit_strategy.control.zoo.schedule import Phase as Phase
    from lowbit_strategy.control.zoo.schedule import Schedule as Schedule
    from lowbit_strategy.control.zoo.static import Static as Static

CONTROLLERS: dict[str, Callable[..., Controller]] = {"accordion": Accordion}
_ZOO = {  # one line each; a controller that was deleted is not imported
    "accordion_batch": "lowbit_strategy.control.zoo.accordion_batch:AccordionBatch",
    "adaqs": "lowbit_strategy.control.zoo.adaqs:AdaQS",
    "gravac": "lowbit_strategy.control.zoo.gravac:GraVAC",
    "guard": "lowbit_strategy.control.zoo.guard:Guard",
    "schedule": "lowbit_strategy.control.zoo.schedule:Schedule",
    "static": "lowbit_strategy.control.zoo.static:Static",
}
CONTROLLERS |= {name: leaves.load(target, name) for name, target in _ZOO.items() if leaves.is_present(target)}
_TARGETS = {each.rpartition(":")[2]: each for each in (*_ZOO.values(), "lowbit_strategy.control.zoo.schedule:Phase")}
__all__ = [
    "CONTROLLERS",
    "Accordion",
    "Bounds",
    "Controller",
    "Decision",
    "EndToEnd",
    "Energy",
    "Probe",
    "Progress",
    "State",
    "Switch",
    "Telemetry",
    "group_of",
    "register_controller",
    *(name for name, target in _TARGETS.items() if leaves.is_present(target)),
]


def __getattr__(name: str) -> Any:
    """Load a controller of the zoo by name."""
    if name not in _TARGETS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return leaves.load(_TARGETS[name], name)


def register_controller(name: str, controller: Callable[..., Controller]) -> None:
    """Let configuration files name a controller: ``controller: {name: NAME, option: value}``.

    Call it at the end of the controller's module, so that every process does. ``accelerate launch`` reads a file before
    the script starts, so there a package of yours must register it through an entry point in the group
    ``torch.backends``, which ``import torch`` calls.

    Args:
        name: Any text; case, hyphens and underscores do not matter.
        controller: The class, or a function of its options.

    Raises:
        ValueError: The name is taken.
    """
    taken = {plain(each): made for each, made in _known().items()}
    if taken.get(plain(name), controller) is not controller:
        raise ValueError(f"there is a controller called {name!r} already: choose another name")
    CONTROLLERS[name] = controller


def _known() -> dict[str, str | Callable[..., Controller]]:
    """Controllers by name; text stands for one whose file may be missing."""
    return {**_ZOO, **CONTROLLERS}


def _make(value: Any) -> Controller:
    """Make a controller from ``{name: accordion, option: value, ...}``, as written in configuration files."""
    if not isinstance(value, Mapping):
        raise Mismatch
    make, options = named(value, _known(), "controller")
    return call(leaves.load(make, value["name"]) if isinstance(make, str) else make, options)


_MAPPING = f"a mapping with a name ({', '.join(CONTROLLERS)}) and the controller's options"

register_conversion(Controller, _make, f"one of lowbit_strategy.control or {_MAPPING}")
