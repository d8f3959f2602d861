"""A run as the report sees it: series by step, from the record and, if there is one, the logger's CSV."""

from __future__ import annotations

import csv
import math
import statistics
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lowbit_strategy.report.record import FILE_NAME, read_runs

Line = dict[str, Any]

# Figures of an observation: bytes that one rank sends in a step, and what it would send without compression.
GRADIENTS, WEIGHTS = "sent_nbytes", "weights_nbytes"
DENSE_GRADIENTS, DENSE_WEIGHTS = "dense_nbytes", "weights_nbytes"  # weights travel uncompressed
MANY = 60  # points of a curve that are drawn and compared as a moving mean


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

    def smooth(self) -> Series:
        """The moving mean over a fortieth of a long series; short ones are unchanged."""
        width = len(self.steps) // 40 if len(self.steps) > MANY else 1
        means = [statistics.fmean(self.values[max(0, at - width + 1) : at + 1]) for at in range(len(self.values))]
        return Series(self.steps, means)


@dataclass(frozen=True, slots=True)
class Run:
    """One run's record by kind of line; everything in the order of steps."""

    folder: Path
    starts: list[Line]
    observations: list[Line]
    levels: list[Line]
    switches: list[Line]
    members: list[Line]  # changes of replicas that come and go
    warnings: list[Line]
    validations: list[Line]
    logged: dict[str, Series]  # columns of the CSV logger that are losses

    @property
    def last_step(self) -> int:
        lines = [*self.observations, *self.levels, *self.validations, *self.starts]
        logged = [series.steps[-1] for series in self.logged.values()]
        return max((*(line["step"] for line in lines), *logged), default=0)

    @property
    def start(self) -> Line:
        return self.starts[-1] if self.starts else {}

    def total(self, key: str) -> Series:
        """A figure of all parameters, such as ``relative_error``."""
        return Series.of([(line["step"], line["total"][key]) for line in self.observations])

    def of_step(self, key: str) -> Series:
        """A figure of the whole step, such as ``codec_ms``; not every framework gives the loss."""
        return Series.of([(line["step"], line.get(key)) for line in self.observations])

    def group(self, name: str, key: str) -> Series:
        return Series.of([(line["step"], line["groups"].get(name, {}).get(key)) for line in self.observations])

    @property
    def timed(self) -> list[Line]:
        """Observations that know how long their step took: all but those of first steps."""
        return [line for line in self.observations if line["step_ms"] is not None]

    @property
    def groups(self) -> list[str]:
        """Compressed groups, largest first."""
        if not self.observations:
            return []
        last = self.observations[-1]["groups"]
        compressed = [name for name, figures in last.items() if figures["compressed"]]
        return sorted(compressed, key=lambda name: -last[name]["numel"])

    def losses(self) -> dict[str, Series]:
        """The known losses: logged columns, or else the training loss at observed steps; and validation losses."""
        curves = dict(self.logged)
        if all("val" in name for name in curves) and (observed := self.of_step("loss")):
            curves["training loss"] = observed
        if not any("val" in name for name in curves):
            names = {name for line in self.validations for name in line["metrics"] if "loss" in name and "val" in name}
            for name in sorted(names):
                curves[name] = Series.of([(line["step"], line["metrics"].get(name)) for line in self.validations])
        return curves

    def bytes_so_far(self, *keys: str) -> Series:
        """The sum of these figures over all steps so far; between observations, the last values are used."""
        pairs, total = [], 0.0
        for line, following in zip(self.observations, self.observations[1:], strict=False):
            steps = following["step"] - line["step"]
            total += steps * sum(line.get(key) or 0.0 for key in keys)
            pairs.append((following["step"], total))
        return Series.of(pairs)

    @property
    def counts_weights(self) -> bool:
        """Whether the record has the bytes of weights as well as those of gradients."""
        return any(line.get(WEIGHTS) for line in self.observations)


def runs_in(folder: Path) -> list[Path]:
    """`folder`, or the runs in it, one or two levels down, the newest first.

    Raises:
        FileNotFoundError: There is no run; the message says how to get one.
    """
    if (folder / FILE_NAME).is_file():
        return [folder]
    found = [path for depth in ("", "*/", "*/*/") for path in folder.glob(f"{depth}{FILE_NAME}") if path.is_file()]
    if not found:
        read_runs(folder)  # its error says how to get a record
    return [path.parent for path in sorted(found, key=lambda path: path.stat().st_mtime, reverse=True)]


def read_run(folder: str | Path) -> Run:
    """The last run in the record in `folder`.

    Raises:
        FileNotFoundError: There is no record in `folder`.
        ValueError: The record has no line, or an invalid one.
    """
    folder = Path(folder)
    *_, last = read_runs(folder)
    if not last:
        raise ValueError(f"the record in {folder} is empty: the run has not begun to train yet")
    by_kind: defaultdict[str, list[Line]] = defaultdict(list)
    for line in last:
        by_kind[line["kind"]].append(line)
    return Run(
        folder=folder,
        starts=by_kind["start"],
        observations=by_kind["observation"],
        levels=by_kind["levels"],
        switches=by_kind["switch"],
        members=by_kind["members"],
        warnings=by_kind["warning"],
        validations=by_kind["validation"],
        logged=_logged(folder / "metrics.csv"),
    )


def _logged(path: Path) -> dict[str, Series]:
    """Losses from a CSVLogger's file; if a metric was logged per step and per epoch, the values of steps."""
    if not path.is_file():
        return {}
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    names = [name for name in (rows[0] if rows else {}) if "loss" in name and not name.startswith("lowbit/")]
    names = [name for name in names if not (name.endswith("_epoch") and f"{name.removesuffix('_epoch')}_step" in names)]
    curves = {}
    for name in names:
        curve = Series.of([(int(row["step"]), _finite(row[name])) for row in rows if row[name] and row["step"]])
        if curve:
            curves[name] = curve
    return curves


def _finite(text: str) -> float | None:
    value = float(text)
    return value if math.isfinite(value) else None
