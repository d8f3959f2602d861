"""ScaleCom: options."""

from __future__ import annotations

import pytest

from lowbit_strategy.methods.zoo.scalecom import ScaleCom


def test_bad_options_of_scalecom_are_refused() -> None:
    with pytest.raises(ValueError, match="beta must be in"):
        ScaleCom(beta=0.0)
