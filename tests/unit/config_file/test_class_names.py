"""Classes by their short names, as command lines find them: each has one home."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import pytest

import lowbit_strategy
from lowbit_strategy import Compressor, LoCo
from lowbit_strategy.control import Controller


def _below(base: type) -> Iterator[type]:
    for kind in base.__subclasses__():
        yield kind
        yield from _below(kind)


@pytest.mark.parametrize("base", [Compressor, Controller])
def test_every_class_is_there_once(base: type) -> None:
    ours = Counter(f"{kind.__module__}.{kind.__qualname__}" for kind in _below(base) if "lowbit" in kind.__module__)
    assert len(ours) > 5
    assert [name for name, times in ours.items() if times > 1] == []


def test_a_compressor_by_its_short_name_on_a_command_line() -> None:
    jsonargparse = pytest.importorskip("jsonargparse")
    parser = jsonargparse.ArgumentParser(exit_on_error=False)
    parser.add_argument("--compressor", type=lowbit_strategy.Compressor)
    made = parser.instantiate_classes(parser.parse_args(["--compressor=LoCo", "--compressor.bits=8"]))
    assert made.compressor == LoCo(bits=8)
