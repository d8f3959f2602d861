"""The grid of predicted steps that the documentation shows: its predictions are those of today's model of a step."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import pytest

from benchmarks.predicted_again import answers, predicted, wrong

RESULTS = Path(__file__).parents[3] / "benchmarks" / "results" / "predicted_steps.json"


def test_stored_predictions_are_todays() -> None:
    """Where this fails: ``python -m benchmarks.predicted_again``."""
    for name, report in json.loads(RESULTS.read_text())["runs"].items():
        for variant, time in predicted(name, report).items():
            cell = report["cells"][variant]
            assert asdict(time) == pytest.approx({field: cell[field] for field in asdict(time)}), (name, variant)


def test_no_plain_answer_is_wrong_where_it_was_measured() -> None:
    """Where the likely figure alone decides, 8 of 18 noes are wrong."""
    found = answers(json.loads(RESULTS.read_text())["runs"])
    assert wrong(found) == []
    assert sum(answer == "use" for _, answer, _ in found) > 50
