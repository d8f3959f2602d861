"""A run as the report sees it: series by step, put together from the record and, if there is one, the logger's CSV."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lowbit_strategy.telemetry.run_record import read_record

Line = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Series:
    """Values at steps; steps without a value are left out."""

    steps: list[int]
    values: list[float]

    @classmethod
    def of(cls, pairs: Sequence[tuple[int, float | None]]) -> Series:
        known = [(step, value) for step, value in pairs if value is not None]
        return cls([step for step, _ in known], [value for _, value in known])

    def __bool__(self) -> bool:
        return bool(self.steps)


@dataclass(frozen=True, slots=True)
class Run:
    """One run's record by kind of line; everything in the order of steps."""

    folder: Path
    starts: list[Line]
    observations: list[Line]
    levels: list[Line]
    switches: list[Line]
    warnings: list[Line]
    validations: list[Line]
    logged: dict[str, Series]  # columns of the CSV logger that are losses

    @property
    def last_step(self) -> int:
        lines = [*self.observations, *self.levels, *self.validations, *self.starts]
        return max((line["step"] for line in lines), default=0)

    @property
    def start(self) -> Line:
        return self.starts[-1] if self.starts else {}

    def total(self, key: str) -> Series:
        """A figure of all parameters, such as ``relative_error``."""
        return Series.of([(line["step"], line["total"][key]) for line in self.observations])

    def of_step(self, key: str) -> Series:
        """A figure of the whole step, such as ``codec_ms``."""
        return Series.of([(line["step"], line[key]) for line in self.observations])

    def group(self, name: str, key: str) -> Series:
        return Series.of([(line["step"], line["groups"].get(name, {}).get(key)) for line in self.observations])

    @property
    def groups(self) -> list[str]:
        """Compressed groups, largest first."""
        if not self.observations:
            return []
        last = self.observations[-1]["groups"]
        compressed = [name for name, figures in last.items() if figures["compressed"]]
        return sorted(compressed, key=lambda name: -last[name]["numel"])

    def losses(self) -> dict[str, Series]:
        """What is known of the loss: logged columns, else the training loss at observed steps; and validation's."""
        curves = dict(self.logged)
        if all("val" in name for name in curves) and (observed := self.of_step("loss")):
            curves["training loss"] = observed
        if not any("val" in name for name in curves):
            names = {name for line in self.validations for name in line["metrics"] if "loss" in name and "val" in name}
            for name in sorted(names):
                curves[name] = Series.of([(line["step"], line["metrics"].get(name)) for line in self.validations])
        return curves

    def bytes_so_far(self) -> tuple[Series, Series]:
        """Sent, and what uncompressed float32 would have sent; between observations as in the last one."""
        sent, dense, total_sent, total_dense = [], [], 0.0, 0.0
        for line, following in zip(self.observations, self.observations[1:], strict=False):
            steps = following["step"] - line["step"]
            total_sent += steps * (line["sent_nbytes"] or 0.0)
            total_dense += steps * line["dense_nbytes"]
            sent.append((following["step"], total_sent))
            dense.append((following["step"], total_dense))
        return Series.of(sent), Series.of(dense)


def read_run(folder: str | Path) -> Run:
    """Raises:
    FileNotFoundError: There is no record in `folder`.
    ValueError: The record has no line, or one that is none.
    """
    folder = Path(folder)
    lines = read_record(folder)
    if not lines:
        raise ValueError(f"the record in {folder} is empty: the run has not begun to train yet")
    by_kind: dict[str, list[Line]] = {}
    for line in lines:
        by_kind.setdefault(line["kind"], []).append(line)
    return Run(
        folder=folder,
        starts=by_kind.get("start", []),
        observations=by_kind.get("observation", []),
        levels=by_kind.get("levels", []),
        switches=by_kind.get("switch", []),
        warnings=by_kind.get("warning", []),
        validations=by_kind.get("validation", []),
        logged=_logged_losses(folder / "metrics.csv"),
    )


def _logged_losses(path: Path) -> dict[str, Series]:
    """Columns of a CSVLogger's file that are called a loss; of a metric logged twice, that of steps."""
    if not path.is_file():
        return {}
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    names = [name for name in (rows[0] if rows else {}) if "loss" in name and not name.startswith("lowbit/")]
    names = [name for name in names if not (name.endswith("_epoch") and f"{name.removesuffix('_epoch')}_step" in names)]
    curves = {}
    for name in names:
        curve = Series.of([(int(row["step"]), float(row[name])) for row in rows if row[name] and row["step"]])
        if curve:
            curves[name] = curve
    return curves
