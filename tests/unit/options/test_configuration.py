"""Types of options are checked once, when a configuration is made."""

from __future__ import annotations

import dataclasses
import inspect
import pickle
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Literal

import numpy as np
import pytest

from lowbit_strategy import QSGD, Compressor, LoCo, WarmUp, preset
from lowbit_strategy.control import Bounds, Guard, Static
from lowbit_strategy.options.configuration import configuration
from lowbit_strategy.options.conversion import did_you_mean


@configuration
class Everything:
    whole: int = 1
    number: float = 1.0
    flag: bool = True
    text: str = ""
    maybe: int | None = None
    choice: Literal["a", "b"] = "a"
    many: tuple[float, ...] = ()
    pairs: tuple[tuple[str, int], ...] = ()
    sequence: Sequence[int] = ()
    function: Callable[[int], int] | Literal["none"] = "none"
    other: Plain | None = None


class Plain:
    pass


@configuration
class Positional:
    values: Sequence[int] = dataclasses.field(kw_only=False)


@pytest.mark.parametrize(
    ("option", "value", "held"),
    [
        ("whole", np.int64(3), 3),
        ("number", 3, 3.0),
        ("number", np.float32(0.5), 0.5),
        ("maybe", None, None),
        ("maybe", 4, 4),
        ("choice", "b", "b"),
        ("many", [1, 2.5], (1.0, 2.5)),
        ("pairs", [["a", 1]], (("a", 1),)),
        ("sequence", [1, 2], (1, 2)),
        ("function", abs, abs),
    ],
)
def test_values_of_the_right_type_are_held_in_one_form(option: str, value: Any, held: Any) -> None:
    made = getattr(Everything(**{option: value}), option)
    assert made == held
    assert type(made) is type(held)


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("whole", 4.0, "whole must be an integer, got 4.0"),
        ("whole", True, "whole must be an integer, got True"),
        ("number", "high", "number must be a number, got 'high'"),
        ("number", True, "number must be a number, got True"),
        ("flag", 1, "flag must be true or false, got 1"),
        ("text", 3, "text must be a string, got 3"),
        ("maybe", "1M", "maybe must be an integer, got '1M'"),
        ("choice", "c", "choice must be 'a' or 'b', got 'c'"),
        ("many", "abc", "many must be a list, each element a number, got 'abc'"),
        ("many", (1, "x"), r"many\[1\] must be a number, got 'x'"),
        ("pairs", (("a",),), r"pairs\[0\] must be a list of 2: a string; an integer, got"),
        ("function", 3, "function must be a function or 'none', got 3"),
        ("other", 0.5, "other must be an instance of Plain, got 0.5"),
    ],
)
def test_values_of_another_type_are_refused(option: str, value: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Everything(**{option: value})


def test_positional_options_are_checked_too() -> None:
    assert Positional([1, 2]).values == (1, 2)
    with pytest.raises(ValueError, match="values must be a list, each element an integer, got 3"):
        Positional(3)  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        Positional([1], 2)  # type: ignore[call-arg]
    with pytest.raises(TypeError):
        Everything(3)  # type: ignore[misc]


def test_presets_names_and_mappings_are_compressors() -> None:
    expected = WarmUp(compressor=preset("loco2"), first=QSGD(bits=3))
    assert WarmUp(compressor="loco2", first={"compressor": "qsgd", "bits": 3}) == expected  # type: ignore[arg-type]


def test_a_mapping_of_options_is_a_configuration() -> None:
    inner: Any = {"name": "static", "level": "loco2"}
    bounds: Any = {"max_error": 1}
    expected = Guard(inner=Static(preset("loco2")), bounds=Bounds(max_error=1.0))
    assert Guard(inner=inner, bounds=bounds) == expected
    bounds["max_eror"] = bounds.pop("max_error")
    with pytest.raises(ValueError, match=r"bounds: unknown key 'max_eror'; did you mean 'max_error'\?"):
        Guard(inner=inner, bounds=bounds)


def test_all_options_of_another_type_are_named() -> None:
    with pytest.raises(ValueError, match="whole must be an integer, got 'x'; many must be a list"):
        Everything(whole="x", text="right", many="abc")  # type: ignore[arg-type]


def test_configurations_are_plain_values() -> None:
    made = dataclasses.replace(LoCo(bits=2, codebook="fitted", high_precision=()), high_precision_bits=6)
    assert pickle.loads(pickle.dumps(made)) == made
    assert hash(made) == hash(pickle.loads(pickle.dumps(made)))
    with pytest.raises(AttributeError, match="'LoCo' object has no attribute 'bit'"):
        made.bit  # type: ignore[attr-defined]  # noqa: B018


def test_the_signature_shows_the_options() -> None:
    """Command lines and configuration files are built from it."""
    parameters = inspect.signature(LoCo).parameters
    assert list(parameters) == [field.name for field in dataclasses.fields(LoCo)]
    assert all(parameter.kind is parameter.KEYWORD_ONLY for parameter in parameters.values())
    assert parameters["bits"].default == 4


def test_jsonargparse_builds_configurations() -> None:
    jsonargparse = pytest.importorskip("jsonargparse")

    parser = jsonargparse.ArgumentParser(exit_on_error=False)
    parser.add_argument("--compressor", type=Compressor)
    arguments = ["--compressor=lowbit_strategy.LoCo", "--compressor.bits=3", "--compressor.beta=0.5"]
    assert parser.instantiate(parser.parse_args(arguments)).compressor == LoCo(bits=3, beta=0.5)
    with pytest.raises(jsonargparse.ArgumentError, match="bits"):
        parser.parse_args(["--compressor=lowbit_strategy.LoCo", "--compressor.bits=many"])


def test_suggestions() -> None:
    assert did_you_mean("lco", ["loco", "qsgd"]) == "; did you mean 'loco'?"
    assert did_you_mean("xyz", ["loco", "qsgd"]) == "."


class Subclass(LoCo):
    """Not a configuration of its own: what it inherits goes on working."""

    name: ClassVar[str] = "subclass"


def test_subclasses_inherit_the_checks() -> None:
    with pytest.raises(ValueError, match="bits must be an integer"):
        Subclass(bits="4")  # type: ignore[arg-type]
