"""Controllers: what to compress how strongly, and when. Pure functions of telemetry; they know no ranks."""

from lowbit_strategy.control.accordion import Accordion, AccordionBatch
from lowbit_strategy.control.adaqs import AdaQS
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
from lowbit_strategy.control.gravac import GraVAC
from lowbit_strategy.control.guard import Bounds, Guard
from lowbit_strategy.control.registry import CONTROLLERS
from lowbit_strategy.control.schedule import Phase, Schedule, Static

__all__ = [
    "CONTROLLERS",
    "Accordion",
    "AccordionBatch",
    "AdaQS",
    "Bounds",
    "Controller",
    "Decision",
    "EndToEnd",
    "Energy",
    "GraVAC",
    "Guard",
    "Phase",
    "Probe",
    "Progress",
    "Schedule",
    "State",
    "Static",
    "Switch",
    "Telemetry",
    "group_of",
]
