"""Reads the record that a run has written (`report/writing.py`)."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

FILE_NAME = "lowbit.jsonl"


def read_runs(folder: str | Path) -> list[list[dict[str, Any]]]:
    """The runs that were written into the record in `folder`, one after the other, each with its lines in order.

    A resumed run counts as one run; of steps that it repeated, the first occurrence is left out.

    Raises:
        FileNotFoundError: There is no record; the message names the ways to get one.
    """
    path = Path(folder) / FILE_NAME
    if not path.is_file():
        raise FileNotFoundError(
            f"{path} does not exist: give the folder of a run with CompressionMonitor or AdaptiveCompression in its"
            " callbacks (the logger's folder, such as lightning_logs/version_0); with Accelerate and the HF Trainer, of"
            " one with a controller or a monitor (the folder given as record, or the output_dir)"
        )
    runs: list[list[dict[str, Any]]] = [[]]
    for line in _parse(path):
        lines = runs[-1]
        if line["kind"] == "start" and lines:
            restarts = line["step"] <= lines[0]["step"] and any(each["kind"] != "start" for each in lines)
            if restarts:
                runs.append([])
            else:
                runs[-1] = [each for each in lines if each["step"] < line["step"] or each["kind"] == "start"]
        runs[-1].append(line)
    return runs


def _parse(path: Path) -> Iterator[dict[str, Any]]:
    for number, text in enumerate(path.read_text().splitlines(keepends=True), start=1):
        if not text.endswith("\n"):
            return  # the last line of a running job may be half written
        try:
            line = json.loads(text)
        except json.JSONDecodeError as error:
            raise ValueError(f"{path}, line {number}: not a line of a record ({error})") from error
        if not isinstance(line, dict) or not isinstance(line.get("kind"), str) or not isinstance(line.get("step"), int):
            raise ValueError(f"{path}, line {number}: not a line of a record (it needs a kind and a step)")
        yield line
