"""GraVAC: searches for the best product of throughput and compression gain, with a lower bound on the gain."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import field

from lowbit_strategy.collectives.layout import TensorSpec
from lowbit_strategy.control.base import Controller, Decision, Probe, State, Telemetry, check_order
from lowbit_strategy.methods._base.compressor import Compressor
from lowbit_strategy.methods.dense import Dense
from lowbit_strategy.options.checks import check_positive
from lowbit_strategy.options.configuration import configuration

_DENSE = 0  # index of the uncompressed level; candidates follow
_FORGOTTEN = 3.0  # time constants, after which e**-3 = 5 % of the earlier residual is left
_SLOWEST_AVERAGE = 5  # steps: LoCo's residual is a moving average with a weight of 0.8


@configuration
class GraVAC(Controller):
    """Searches the candidates from light to heavy for the best throughput that keeps the gradient's information.

    The compression gain is a moving average of 1 - ||h - C(h)||^2 / ||h||^2 with h = g + e, over all parameters and
    ranks. For sparsifiers that is the published ||C(h)||^2 / ||h||^2. It covers only the uplink, because the downlink's
    error (DDP) can only be measured for the current level. To watch the downlink, put a `Guard` with ``max_end_to_end``
    around this controller.

    In every step, using the measurement of the last step:

    1. ``compression_gain(candidate) >= epsilon``: send the candidate;
    2. else ``compression_gain(lightest) >= epsilon``: send the lightest candidate;
    3. else: send dense.

    During a search each candidate is tried for `settle` and then `window` steps:

    4. its score is compression gain x steps per second over the `window`. A candidate that falls below `epsilon` gets
       no score, and is not sent again in this trial;
    5. if the two best scores differ by less than `omega`, settle on the one that sends less;
    6. else try the next heavier candidate; after the last, or one below `epsilon`, settle on the best score.

    Rules 1 to 3 continue after the search. Gradients change during training, so the search is repeated `search_every`
    steps after it ended.

    `settle` is needed because right after a switch the residual is still the lighter candidate's, and the compression
    gain looks too good. With a gain c, ``|e|^2 <- (1 - c) |g + e|^2`` per step, so the old residual decays with a time
    constant of at most ``1 / c <= 1 / epsilon`` steps.

    Args:
        candidates: At least two, from light to heavy, such as ``GraVAC.geometric(TopK(), "density", 0.1, 0.001)``.
        dense: Sent when no candidate is good enough.
        epsilon: Smallest compression gain, in (0, 1]. Larger: more information, less compression.
        omega: Scores with a smaller relative difference count as equal. Larger: the search ends earlier.
        window: Steps over which a candidate is judged. Longer: less noise, a longer search.
        settle: Steps before the window, in which the residual adapts to the candidate. None: three time constants,
            ``3 / epsilon`` steps, and at least 15 for moving averages like LoCo's.
        ewma: Weight of a new compression gain in the average.
        measure_every: Steps between two measurements. Each costs an encode and a decode of what is tried.
        search_every: Steps from the end of a search to the next search; None: search once. A search takes ``settle +
            window`` steps per candidate, most of them with more bytes than the best candidate sends.

    Raises:
        ValueError: A field is out of range or the candidates are not in order.

    References:
        Tyagi & Swany, "GraVAC: Adaptive Compression for Communication-Efficient Distributed DL Training", 2023,
        arXiv 2305.12201.
    """

    candidates: tuple[Compressor, ...]
    dense: Compressor = field(default_factory=Dense)
    epsilon: float = 0.75
    omega: float = 0.05
    window: int = 25
    settle: int | None = None
    ewma: float = 0.05
    measure_every: int = 1
    search_every: int | None = 5000

    def __post_init__(self) -> None:
        if len(self.candidates) < 2:
            raise ValueError("candidates must have at least two configurations, from light to heavy")
        for name in ("epsilon", "ewma"):
            if not 0 < getattr(self, name) <= 1:
                raise ValueError(f"{name} must be in (0, 1], got {getattr(self, name)!r}")
        if not 0 <= self.omega < 1:
            raise ValueError(f"omega must be in [0, 1), got {self.omega!r}")
        for name in ("window", "measure_every"):
            check_positive(name, getattr(self, name))
        if self.measure_every > self.window:
            raise ValueError(f"measure_every ({self.measure_every}) must not be longer than window ({self.window})")
        if self.settle is not None and self.settle < 0:
            raise ValueError(f"settle must be a number of steps, 0 or more, or None, got {self.settle!r}")
        if self.search_every is not None and self.search_every < 1:
            raise ValueError(f"search_every must be a positive integer or None, got {self.search_every!r}")
        check_order(self.levels, ("dense", *(f"candidates[{at}]" for at in range(len(self.candidates)))))

    @staticmethod
    def geometric(base: Compressor, option: str, first: float, last: float, num: int = 4) -> tuple[Compressor, ...]:
        """`num` configurations in which `option` goes from `first` to `last` in equal ratios.

        Raises:
            ValueError: `base` has no such option, or the range is empty.
        """
        if option not in {entry.name for entry in dataclasses.fields(base)}:
            raise ValueError(f"{base.name} has no option {option!r}")
        if num < 2 or not 0 < last < first:
            raise ValueError(f"0 < last < first and num >= 2 must hold, got {first!r}, {last!r}, {num!r}")
        ratio = (last / first) ** (1 / (num - 1))
        return tuple(dataclasses.replace(base, **{option: first * ratio**at}) for at in range(num))

    @property
    def levels(self) -> tuple[Compressor, ...]:
        return (self.dense, *self.candidates)

    @property
    def settle_steps(self) -> int:
        """`settle`, or its default."""
        if self.settle is not None:
            return self.settle
        return math.ceil(_FORGOTTEN * max(1 / self.epsilon, _SLOWEST_AVERAGE))

    def init(self, specs: Sequence[TensorSpec], world_size: int) -> State:
        return {
            "names": [spec.name for spec in specs],
            "candidate": 1,
            "in_force": 1,
            "settled": False,
            "settled_step": 0,
            "turn_start": 0,
            "compression_gains": {},
            "own_compression_gains": [],  # gains of the candidate in its window
            "seconds": [],  # its step times
            "fresh": True,  # the first step after a switch is slower
            "refused": False,  # the candidate fell below epsilon in this trial
            "scores": {},
            "started": False,
        }

    def decide(self, telemetry: Telemetry, state: State) -> Decision:
        step = telemetry.progress.step
        new = dict(state, compression_gains=dict(state["compression_gains"]))
        if not state["started"]:
            new["turn_start"] = step
        self._add_measurements(telemetry, new)
        reason = self._search_again(new, step)
        if not new["settled"] and step - new["turn_start"] >= self.settle_steps + self.window:
            reason = self._end_turn(new, step)
        new["in_force"], why = self._admissible(new)
        new["refused"] = not new["settled"] and (new["refused"] or new["in_force"] != new["candidate"])
        new["fresh"] = new["in_force"] != state["in_force"] or not state["started"]
        new["started"] = True
        names = new["names"]
        levels = dict.fromkeys(names, new["in_force"])
        before = {name: int(state["in_force"]) for name in names} if state["started"] else {}
        reasons = dict.fromkeys(names, "; ".join(filter(None, (reason, why))))
        return Decision(
            state=new,
            levels=levels,
            probe=Probe(levels=self._probed(new, step), seconds=not new["settled"]),
            switches=self.switches(before, levels, reasons),
        )

    def _add_measurements(self, telemetry: Telemetry, new: State) -> None:
        """Add the measurements of the last step to `new`."""
        searched = not new["settled"] and new["in_force"] == new["candidate"]
        judged = searched and telemetry.progress.step - new["turn_start"] > self.settle_steps
        for level, energies in telemetry.energy.items():
            compensated = sum(energy.compensated for energy in energies.values())
            if compensated <= 0:
                continue
            measured = max(0.0, 1 - sum(energy.error for energy in energies.values()) / compensated)
            is_own = searched and level == new["candidate"]
            old = new["compression_gains"].get(str(level))
            if is_own and not new["own_compression_gains"]:
                old = None  # measured with a different candidate's residual: not comparable
            averaged = measured if old is None else (1 - self.ewma) * old + self.ewma * measured
            new["compression_gains"][str(level)] = averaged
            if is_own and judged:
                new["own_compression_gains"] = [*new["own_compression_gains"], measured]
        if telemetry.step_seconds is not None and judged and not new["fresh"]:
            new["seconds"] = [*new["seconds"], telemetry.step_seconds]

    def _search_again(self, new: State, step: int) -> str:
        """Restart the search in `new` if it is due. Return the reason, for the log."""
        if self.search_every is None or not new["settled"] or step - new.get("settled_step", 0) < self.search_every:
            return ""
        new.update(candidate=1, settled=False, turn_start=step, refused=False)
        new.update(compression_gains={}, own_compression_gains=[], seconds=[], scores={})  # they are out of date
        return f"searches again after {self.search_every} steps"

    def _end_turn(self, new: State, step: int) -> str:
        """Score the candidate, then try the next one or settle, in `new`. Return the reason, for the log."""
        candidate, scores = new["candidate"], dict(new["scores"])
        compression_gains, seconds = new["own_compression_gains"], new["seconds"]
        mean = sum(compression_gains) / len(compression_gains) if compression_gains else 0.0
        good = not new["refused"] and bool(seconds) and mean >= self.epsilon
        if good:
            scores[str(candidate)] = mean / statistics.median_high(seconds)
        new.update(scores=scores, own_compression_gains=[], seconds=[], refused=False, turn_start=step)
        best, saturated = self._best(scores)
        if good and not saturated and candidate < len(self.candidates):
            new["candidate"] = candidate + 1
            return "next candidate"
        new.update(settled=True, settled_step=step, candidate=best)
        if saturated:
            return f"settled: two best within {self.omega:g}"
        return f"settled: {'best of all candidates' if good else 'the compression gain of a heavier one is too small'}"

    def _best(self, scores: Mapping[str, float]) -> tuple[int, bool]:
        """The best candidate, and whether the two best are about equal (then the one that sends less)."""
        if not scores:
            return 1, False
        ranked = sorted((int(level) for level in scores), key=lambda level: -scores[str(level)])
        if len(ranked) > 1:
            first, second = scores[str(ranked[0])], scores[str(ranked[1])]
            if (first - second) / first < self.omega:
                return max(ranked[:2]), True
        return ranked[0], False

    def _admissible(self, state: State) -> tuple[int, str]:
        candidate, compression_gains = state["candidate"], state["compression_gains"]
        own = compression_gains.get(str(candidate), math.inf)  # infinite: unknown
        if not state["refused"] and own >= self.epsilon:
            return candidate, "to be measured" if own == math.inf else f"compression gain at least {self.epsilon:g}"
        if candidate != 1 and compression_gains.get("1", math.inf) >= self.epsilon:
            return 1, f"compression gain of the candidate below {self.epsilon:g}"
        return _DENSE, f"compression gain of the lightest candidate below {self.epsilon:g}"

    def _probed(self, state: State, step: int) -> tuple[int, ...]:
        """The levels to measure: the candidate, and the lightest one while the candidate is below epsilon."""
        candidate = state["candidate"]
        levels = (candidate,) if state["in_force"] == candidate else tuple(sorted({1, candidate}))
        due = step % self.measure_every == 0 or any(str(level) not in state["compression_gains"] for level in levels)
        return levels if due else ()
