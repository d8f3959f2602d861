"""Predictions of `predicted_steps.py` made anew: what each run measured stays, the model of a step is today's.

    python -m benchmarks.predicted_again --json benchmarks/results/predicted_steps.json

Plans are those that the strategies have by default on the ranks of a run. The last line compares the answers that
follow from the ranges of the predicted gains with the gains that were measured.
"""

from __future__ import annotations

import argparse
import functools
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from benchmarks.predicted_steps import LAYOUTS, model_of, show
from lowbit_strategy import OUTER_RULES, PRESETS
from lowbit_strategy.advisor.advice import ADVISE_MIN_SPEEDUP, Answer, SetupOption, gain_of
from lowbit_strategy.advisor.cluster import Cluster
from lowbit_strategy.advisor.cost import StepTime
from lowbit_strategy.advisor.inputs import Figure, Situation, What, is_far
from lowbit_strategy.advisor.uncompressed import uncompressed
from lowbit_strategy.advisor.workload import Workload, plan_for
from lowbit_strategy.attach.prepare import Wrapper
from lowbit_strategy.model.parameters import describe_parameters
from lowbit_strategy.options.conversion import convert
from lowbit_strategy.plan.plan import StepPlan
from recipes.gpt import LanguageModel

_BYTES = {"ddp": 4, "fsdp2": 4, "fsdp2-bf16": 2}  # of an element, of what the framework sends by itself


def situation_of(report: Mapping[str, Any], cell: Mapping[str, Any], preset: str) -> Situation:
    """What was measured in a run, with the range that measured figures have."""
    cluster = convert(report["cluster"], Cluster, "cluster").coding_as(preset)
    far = is_far(cluster.inter_node.latency_s)
    values: dict[What, float] = {
        "link": cluster.inter_node.nbytes_per_s,
        "latency": cluster.inter_node.latency_s,
        "inside": cluster.intra_node.nbytes_per_s,
        "coding": 0.0 if cluster.coding is None else cluster.coding.numel_per_s,
        "compute": cell["compute_s"],
    }
    figures = [Figure.of(what, "", value, "measured", far=far) for what, value in values.items()]
    return Situation(cluster, cell["compute_s"], figures)


@functools.cache
def plans_of(wrapper: Wrapper, nodes: int, ranks_per_node: int, delay_ms: int) -> dict[str, StepPlan]:
    """Of each variant."""
    sizes = model_of(delay_ms, is_ddp=wrapper == "ddp")
    with torch.device("meta"):
        module = LanguageModel(sizes["width"], sizes["depth"], heads=4, context=sizes["context"])
    specs = describe_parameters(module)
    workload = Workload(specs, nodes, ranks_per_node, device_type="cpu", far=delay_ms > 0)
    basis = plan_for(workload, wrapper, PRESETS["loco"])
    plans = {}
    for variant in LAYOUTS[wrapper]:
        name = variant.rpartition("_")[0]
        if variant in _BYTES:
            plans[variant] = uncompressed(basis, _BYTES[variant], _BYTES[variant])
        elif name in OUTER_RULES:
            rule = OUTER_RULES[name]
            plans[variant] = plan_for(workload, wrapper, rule.compressor(), round_plan=rule.planned())
        else:
            plans[variant] = plan_for(workload, wrapper, PRESETS[name])
    return plans


def predicted(name: str, report: Mapping[str, Any]) -> dict[str, StepTime]:
    """Of each variant of a run, of what was measured in it.

    Args:
        name: Of the run, such as ``ddp 4x1 200mbit 50ms``.
        report: What is stored of it.
    """
    layout, shape, _, delay = name.split()
    nodes, ranks_per_node = map(int, shape.split("x"))
    plans = plans_of(layout, nodes, ranks_per_node, int(delay.removesuffix("ms")))  # type: ignore[arg-type]
    found = {}
    for variant, cell in report["cells"].items():
        preset = variant.rpartition("_")[0]
        coded = preset if preset in report["cluster"]["codings"] else "loco"
        found[variant] = situation_of(report, cell, coded).predicted(plans[variant])
    return found


def answers(runs: Mapping[str, Any]) -> list[tuple[str, Answer, float]]:
    """Of every variant with compression and every one of the framework's own, in each run: what they are, the answer to
    whether it pays, and the measured gain.
    """
    found = []
    for name, report in runs.items():
        layout, shape, _, delay = name.split()
        nodes, ranks_per_node = map(int, shape.split("x"))
        plans = plans_of(layout, nodes, ranks_per_node, int(delay.removesuffix("ms")))  # type: ignore[arg-type]
        cells = report["cells"]
        theirs = [each for each in cells if each in _BYTES or each.startswith("dense")]
        for variant in cells.keys() - set(theirs):
            if (preset := variant.rpartition("_")[0]) in OUTER_RULES:
                continue
            coded = preset if preset in report["cluster"]["codings"] else "loco"
            at = situation_of(report, cells[variant], coded)
            for own in theirs:
                gain = gain_of(SetupOption(variant, "", plans[variant], 0), [SetupOption(own, "", plans[own], 0)], at)
                measured = cells[own]["measured_s"] / cells[variant]["measured_s"]
                found.append((f"{name}: {variant} against {own}", gain.answer, measured))
    return found


def wrong(found: Sequence[tuple[str, Answer, float]]) -> list[tuple[str, Answer, float]]:
    """A plain yes that was no gain of at least 1.05, a plain no that was."""
    return [each for each in found if each[1] != "measure" and (each[1] == "use") != (each[2] > ADVISE_MIN_SPEEDUP)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, required=True)
    options = parser.parse_args()
    content = json.loads(options.json.read_text())
    for name, report in content["runs"].items():
        for variant, time in predicted(name, report).items():
            report["cells"][variant] |= asdict(time)
    options.json.write_text(json.dumps(content, indent=1) + "\n")
    show(content["runs"])
    found = answers(content["runs"])
    kinds = ", ".join(f"{sum(each[1] == kind for each in found)} {kind}" for kind in ("use", "measure", "no"))
    print(f"{len(found)} answers: {kinds}; wrong: {wrong(found) or 'none'}")


if __name__ == "__main__":
    main()
