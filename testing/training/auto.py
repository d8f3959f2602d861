"""What `Auto` decides, decided by the test; and whether anything of this package is in the framework's way."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any
from unittest import mock

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from lowbit_strategy import Auto, Dense, LoCo
from lowbit_strategy.auto import choice as running
from lowbit_strategy.auto.choice import OWN_STEPS, WARM_STEPS, WARM_TRIED_STEPS, Candidate, num_timed
from lowbit_strategy.auto.times import Timed, Verdict
from lowbit_strategy.hooks.ddp import hooked
from lowbit_strategy.methods.weight_codings import Exact
from lowbit_strategy.model.sharded import sharded_groups

OWN = WARM_STEPS + OWN_STEPS
TRIED = 2 * (WARM_TRIED_STEPS + num_timed(2))
STEPS = OWN + TRIED + 6  # one of them to empty residuals


@contextlib.contextmanager
def settled(
    choose: int | None, *, tries: int = 2, compressors: Sequence[Any] | None = None, weights: Sequence[Any] = ()
) -> Iterator[None]:
    """Measured times do not decide: `tries` candidates are tried, and number `choose` of them is taken.

    `weights`: of each, under FSDP2; exact ones if none are given.
    """

    def decide(own: Timed, tried: Sequence[Timed]) -> Verdict:
        assert len(tried) == tries
        assert all(seconds > 0 for each in (own, *tried) for seconds in each.seconds)
        return Verdict(choose, "the test says so")

    def candidates(auto: Auto, wrapper: str, _: Any) -> list[Candidate]:
        chosen = compressors or (LoCo(block_size=32), Dense(dtype="bfloat16"))
        codings = weights or [None if wrapper == "ddp" else Exact()] * len(chosen)
        return [
            Candidate(f"number {at}", each, coding)
            for at, (each, coding) in enumerate(zip(chosen, codings, strict=True))
        ][:tries]

    with (
        mock.patch.object(running, "decide", decide),
        mock.patch.object(running, "candidates", candidates),
        mock.patch.object(running, "TOO_SLOW", float("inf")),
    ):
        yield


def is_hooked(model: nn.Module) -> bool:
    """Whether anything of this package is between the framework and its communication."""
    if isinstance(model, DistributedDataParallel):
        return model in hooked
    for each in sharded_groups(model):
        group = each.param_group
        ours = [type(group._reduce_scatter_comm), type(group._all_gather_comm)]
        if any(kind.__module__.startswith("lowbit") for kind in ours) or group._all_reduce_hook is not None:
            return True
        if "pre_forward" in vars(group) or group.force_sum_reduction_for_comms or group.gradient_divide_factor:
            return True
    return False
