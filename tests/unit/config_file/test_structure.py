"""Controllers and the monitor as files write them: what they become, and the errors about those that are wrong."""

from __future__ import annotations

from typing import Any

import pytest
import yaml

from lowbit_strategy import PRESETS, LoCo, TopK
from lowbit_strategy.accelerate import LowBitPlugin, MonitorOptions
from lowbit_strategy.config_file.section import plugin_from_section, read_section
from lowbit_strategy.control import (
    Accordion,
    AccordionBatch,
    AdaQS,
    Bounds,
    Controller,
    GraVAC,
    Guard,
    Phase,
    Schedule,
    Static,
)
from lowbit_strategy.options.conversion import convert

LOCO2 = PRESETS["loco2"]
EIGHT = LoCo(bits=8)


@pytest.mark.parametrize(
    ("text", "controller"),
    [
        (
            "{name: accordion, light: {compressor: loco, bits: 8}, heavy: loco2, interval: 5, unit: steps, eta: 0.3}",
            Accordion(light=EIGHT, heavy=LOCO2, interval=5, unit="steps", eta=0.3),
        ),
        ("{name: AccordionBatch, large: 4}", AccordionBatch(large=4)),
        ("{name: accordion-batch, large: 4}", AccordionBatch(large=4)),
        ("{name: adaqs, ladder: [loco, loco2]}", AdaQS(ladder=(LoCo(), LOCO2))),
        (
            "{name: gravac, candidates: [{compressor: topk, density: 0.1}, {compressor: topk, density: 0.01}]}",
            GraVAC(candidates=(TopK(density=0.1), TopK(density=0.01))),
        ),
        (
            "{name: guard, inner: {name: static, level: loco2}, bounds: {max_error: 0.6}, fallback: loco}",
            Guard(inner=Static(LOCO2), bounds=Bounds(max_error=0.6), fallback=LoCo()),
        ),
        (
            "{name: schedule, phases: [{compressor: loco}, {compressor: loco2, start: 0.5, unit: fraction}]}",
            Schedule([Phase(compressor=LoCo()), Phase(compressor=LOCO2, start=0.5, unit="fraction")]),
        ),
    ],
)
def test_every_controller_can_be_written(text: str, controller: Controller) -> None:
    assert convert(yaml.safe_load(text), Controller, "controller") == controller  # type: ignore[type-abstract]


def test_the_monitor() -> None:
    assert convert(True, MonitorOptions, "monitor") == MonitorOptions()
    assert plugin_from_section({"compressor": "loco", "monitor": False}).monitor is None
    bounds = {"every_n_steps": 20, "group_by": "module", "bounds": {"max_residual": 3}}
    expected = MonitorOptions(every_n_steps=20, group_by="module", bounds=Bounds(max_residual=3))
    assert convert(bounds, MonitorOptions, "monitor") == expected


def test_in_a_section() -> None:
    controller = {"name": "static", "level": "loco2"}
    more = {"controller": controller, "monitor": {}, "record": "runs/1", "num_steps": 9, "steps_per_epoch": 3}
    plugin = plugin_from_section({"compressor": "loco", "bits": 8, **more})
    expected: dict[str, Any] = {"controller": Static(LOCO2), "monitor": MonitorOptions()}
    assert plugin == LowBitPlugin(EIGHT, record="runs/1", num_steps=9, steps_per_epoch=3, **expected)
    assert plugin_from_section(more).compressor == LOCO2  # the controller's lightest level
    assert read_section("{controller: {name: static, level: loco2}}") == {"controller": controller}


TWO_LEVELS = {"light": "loco", "heavy": "loco2"}


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"compressor": "loco", "seed": "abc"}, "lowbit_config.seed must be an integer, got 'abc'"),
        ({"compressor": "loco", "seed": True}, "lowbit_config.seed must be an integer, got True"),
        ({"compressor": "loco", "num_steps": 1e3}, "lowbit_config.num_steps must be an integer, got 1000.0"),
        ({"compressor": "loco", "bits": 4.0}, "lowbit_config: bits must be an integer, got 4.0"),
        ({"compressor": "loco", "beta": "high"}, "lowbit_config: beta must be a number, got 'high'"),
        (
            {"compressor": "warmup", "options": {"compressor": {"compressor": "loco", "bits": 4.0}}},
            "compressor: bits must",
        ),
        (
            {"compressor": "partition", "rules": [["*.gate", "loca"]]},
            r"rules\[0\]\[1\]: unknown compressor 'loca'; did you mean 'loco'",
        ),
        ({"compressor": "partition", "rules": [["*.gate"]]}, r"rules\[0\] must be a list of 2"),
        ({"controller": {"name": "accordion", "light": "loco", "heavy": "loco7"}}, "did you mean 'loco"),
        ({"controller": "accordion"}, r"or a mapping with a name \(accordion,"),
        ({"controller": {"name": "acordion"}}, r"unknown controller 'acordion'; did you mean 'accordion'\?"),
        ({"controller": {"name": "accordion", **TWO_LEVELS, "intervall": 3}}, r"did you mean 'interval'\?"),
        ({"controller": {"name": "accordion", **TWO_LEVELS, "interval": 0}}, "interval must be a positive integer"),
        (
            {"controller": {"name": "accordion", **TWO_LEVELS, "interval": "ten"}},
            "interval must be an integer, got 'ten'",
        ),
        ({"controller": {"name": "accordion", **TWO_LEVELS, "eta": "much"}}, "eta must be a number, got 'much'"),
        ({"controller": {"name": "accordion", **TWO_LEVELS, "unit": "step"}}, "unit must be 'epochs' or 'steps'"),
        ({"controller": {"name": "accordion", "light": "loco2", "heavy": "loco"}}, "heavy must compress more than"),
        ({"controller": {"name": "accordion", "light": "loco"}}, "controller.heavy is missing"),
        ({"controller": {"name": "accordion", "light": 8, "heavy": "loco2"}}, "light must be a compressor such as"),
        ({"controller": {"name": "accordion", "light": "loca", "heavy": "loco2"}}, r"did you mean 'loco'\?"),
        (
            {"controller": {"name": "adaqs", "ladder": "loco"}},
            "ladder must be a list, each element a compressor",
        ),
        ({"controller": {"name": "guard", "inner": {"name": "statics"}, "bounds": {}}}, r"did you mean 'static'\?"),
        (
            {"controller": {"name": "schedule", "phases": [{"compressor": "loco", "begin": 0}]}},
            r"phases\[0\]: unknown key \'begin\'\. Known: compressor, start",
        ),
        (
            {"controller": {"name": "schedule", "phases": ["loco"]}},
            r"phases\[0\] must be an instance of Phase or a",
        ),
        ({"controller": {"name": "accordion_batch"}}, "compressor is missing"),
        ({"controler": {"name": "static"}}, r"unknown key 'controler'; did you mean 'controller'\?"),
        ({"compressor": "loco", "controler": {}}, r"unknown key 'controler'; did you mean 'controller'\?"),
        ({"compressor": "loco", "monitor": 50}, "or a mapping such as {every_n_steps"),
        ({"compressor": "loco", "monitor": {"every_n_step": 5}}, r"did you mean 'every_n_steps'\?"),
        ({"compressor": "loco", "monitor": {"every_n_steps": 0}}, "every_n_steps must be a positive integer"),
        ({"compressor": "loco", "monitor": {"group_by": "kinds"}}, "group_by must be"),
        ({"compressor": "loco", "monitor": {"bounds": {"max_err": 1}}}, r"did you mean 'max_error'\?"),
        ({"compressor": "loco", "monitor": {"bounds": {}}}, "give at least one of max_error"),
        ({"compressor": "loco", "num_steps": 0}, "num_steps must be a positive integer"),
        ({"compressor": "loco", "record": 3}, "record must be true or false or a string or a path, got 3"),
    ],
)
def test_what_is_wrong_is_named(section: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        plugin_from_section(section)
