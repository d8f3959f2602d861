"""Adjusts the learning-rate schedule of a replica that has joined later."""

from __future__ import annotations

import warnings
from typing import Any


def advance_schedule(schedule: Any, num_steps: int) -> None:
    """Advance a learning-rate schedule to where the other replicas are."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the optimizer has not stepped before the schedule
        for _ in range(num_steps):
            schedule.step()
