"""Bytes on a real interface against what every method accounts for."""

from __future__ import annotations

import pytest

from benchmarks import wire_bytes
from lowbit_strategy.methods.registry import PRESETS

WORLD_SIZE = 2
NUMEL = 100_000
MESSAGE_NBYTES = 48  # gloo frames a message with so much
MAX_MESSAGES = 60  # of a rank in a step, announcements and a share of the barriers included


@pytest.mark.root
@pytest.mark.slow  # tests/integration/test_invariants.py counts what torch.distributed is given
def test_interfaces_carry_what_methods_account_for_and_nothing_else() -> None:
    rows = wire_bytes.measure(list(PRESETS), world_size=WORLD_SIZE, numel=NUMEL, steps=4, timeout=240)
    assert len(rows) == 2 * len(PRESETS)
    for row in rows:
        framing = row.payload_nbytes - row.accounted_nbytes
        assert 0 <= framing <= MAX_MESSAGES * MESSAGE_NBYTES + row.resent_nbytes, row
