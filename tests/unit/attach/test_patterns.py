"""A pattern that matches no parameter is said."""

from __future__ import annotations

from torch import nn

from lowbit_strategy import Dense, LoCo, Partition
from lowbit_strategy.attach.patterns import unmatched_patterns


def test_patterns_that_match_nothing() -> None:
    module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    module[1].requires_grad_(False)
    assert unmatched_patterns(LoCo(), module) == []
    assert (
        unmatched_patterns(LoCo(exempt=("@head", "0.*", lambda spec: False), high_precision=("1.weight",)), module)
        == []
    )
    (sentence,) = unmatched_patterns(LoCo(exempt=("@vector", "o.*")), module)
    assert sentence == (
        "exempt: 'o.*' matches no parameter of the model. Its parameters are 0.weight, 0.bias, 1.weight, 1.bias"
    )


def test_patterns_inside_of_other_configurations() -> None:
    inner = LoCo(high_precision=("embedd.*",))
    compressor = Partition(rules=(("0.*", Dense()), ("lm_heat.*", inner)), default=inner)
    module = nn.Sequential(*[nn.Linear(4, 4) for _ in range(3)])
    found = unmatched_patterns(compressor, module)
    assert [sentence.split(" matches")[0] for sentence in found] == ["rules: 'lm_heat.*'", "high_precision: 'embedd.*'"]
    assert found[0].endswith("Its parameters are 0.weight, 0.bias, 1.weight, 1.bias and 2 more")
