"""What travels in some steps only: for which compressors, by which property."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from lowbit_strategy import EDEN, EF21, QSGD, ChunkTopK, ErrorFeedback, LoCo, OneBitSGD, Rotate, TernGrad
from lowbit_strategy.methods._base.compressor import Compressor
from lowbit_strategy.methods.registry import PRESETS
from lowbit_strategy.second_moment.few_bits import needs_squares
from testing.counting.operations import CORRECTED
from testing.worlds.single import SPECS

PAGE = Path(__file__).resolve().parents[3] / "docs" / "compressors.md"


def test_the_second_moment_is_corrected_by_default_for_these_and_the_page_says_so() -> None:
    assert {name for name, preset in PRESETS.items() if needs_squares(preset, SPECS)} == set(CORRECTED)
    sentence = re.search(r"corrected by default where.*?\((.*?)\)", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    assert sentence is not None
    assert set(re.findall(r"`(\w+)`", sentence[1])) == set(CORRECTED)


@pytest.mark.parametrize(
    ("compressor", "needs"),
    [
        (Rotate(compressor=LoCo(bits=1, codebook="fitted", reset_steps=None)), True),
        (ErrorFeedback(compressor=QSGD(bits=2)), True),
        (EDEN(bits=2), True),
        (EDEN(bits=3), False),
        (EDEN(beta=None), False),  # keeps nothing
        (EF21(compressor=OneBitSGD()), True),
        (EF21(compressor=LoCo()), False),
        (QSGD(bits=2), False),
        (ChunkTopK(cosines=64), False),  # few elements, with all their bits
        (TernGrad(), False),
    ],
    ids=repr,
)
def test_it_is_a_matter_of_bits_and_of_feedback(compressor: Compressor, needs: bool) -> None:
    assert needs_squares(compressor, SPECS) == needs
