"""``lowbit advise`` and ``lowbit estimate``: what a set-up would cost, from numbers alone."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich import box
from rich.console import Console
from rich.table import Table

from lowbit_strategy.launch import units
from lowbit_strategy.launch.commands import errors_of

_ENCODED_PER_S, _BUCKET_S = 1e11, 4e-4  # elements per hop, and per bucket; of a GPU: an H100 was measured at 2.3e11
_ENCODED_PER_S_ON_CPU = 1e9  # a core or two
_INTRA_LATENCY_S, _INTRA_NBYTES_PER_S = 5e-6, 50e9  # assumed, of links inside a node

STEPS_MEAN = (
    "steps: per cent more to the same loss, measured at the best learning rate and\n"
    "below; the advice counts them. *: with second_moment=True, for Adam and AdamW."
)
_LINK, _LATENCY, _COMPUTE = "10gbit", "0.1ms", "1s"  # where nobody says

Params = Annotated[str | None, typer.Option(help="Parameters of a transformer, such as 7e9 or 7B.")]
Model = Annotated[str | None, typer.Option(help="package:Class, called without arguments on the meta device.")]
HFConfig = Annotated[Path | None, typer.Option(help="A folder with the config.json of a Hugging Face model.")]
Nodes = Annotated[int | None, typer.Option(min=1, help="Machines. Default: 2, or as measured.")]
RanksPerNode = Annotated[int | None, typer.Option(min=1, help="Processes on each. Default: 8, or as measured.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def advise(
    params: Params = None,
    model: Model = None,
    hf_config: HFConfig = None,
    nodes: Nodes = None,
    ranks_per_node: RanksPerNode = None,
    link: Annotated[
        str | None, typer.Option(help="Bandwidth of a node, measured, not nominal. Default: 10gbit.")
    ] = None,
    latency: Annotated[str | None, typer.Option(help="Between nodes, one way. Default: 0.1ms.")] = None,
    compute: Annotated[str | None, typer.Option(help="A step without communication. Default: 1s.")] = None,
    bench: Annotated[Path | None, typer.Option(help="Links and coding speed as lowbit bench has written them.")] = None,
    cpu: Annotated[
        bool, typer.Option("--cpu", help="Ranks compute on CPUs, with gloo; so measured, although there is a GPU.")
    ] = False,
    memory: Annotated[str | None, typer.Option(help="Of a device, such as 80GB: what does not fit is marked.")] = None,
    close: Annotated[bool, typer.Option("--close", help="Recommend what is a little worse in loss, too.")] = False,
    html: Annotated[Path | None, typer.Option(help="Write a page with curves over bandwidth and latency.")] = None,
    as_json: AsJson = False,
) -> None:
    """Predict the step time of every sensible set-up, and say which to use, or that none helps.

    Without a model, in a terminal, it asks.
    """
    from lowbit_strategy.plan import advice

    if (params, model, hf_config) == (None, None, None) and _is_terminal():
        params, nodes, ranks_per_node, link, latency, compute = _ask()
    with errors_of("advise"):
        measured = None if bench is None else _measurements(bench, cpu=cpu)
        wanted = _wanted(params, model, hf_config, *_shape(nodes, ranks_per_node, measured))
        if on_cpu := cpu or (measured is not None and measured.backend == "gloo"):
            far = measured.far if measured is not None and latency is None else is_far(latency)
            wanted = replace(wanted, device_type="cpu", far=far)
        cluster = cluster_of(link, latency, measured, on_cpu=on_cpu)
        compute_s = units.duration(compute or _COMPUTE)
        limit = None if memory is None else units.size(memory)
        found = advice.choices(wanted, cluster, compute_s)
    best = advice.advised(found, wanted, limit, "close" if close else "same")
    if as_json:
        chosen = None if best is None else best.line
        print(json.dumps({"choices": [_as_dict(each, wanted) for each in found], "advice": chosen}, indent=1))
        return
    far = cluster.inter_node
    title = (
        f"{wanted.numel:.3g} parameters, {wanted.nodes} x {wanted.ranks_per_node} ranks,"
        f" {far.nbytes_per_s * 8 / 1e9:.3g} Gbit/s and {1e3 * far.latency_s:.3g} ms between nodes"
    )
    sources = _sources(bench, link, latency, compute, cluster)
    answer = (
        "Do not use this package here: nothing that keeps the loss is 5 % faster than the framework's own."
        if best is None
        else f"Use: {best.line}"
    )
    Console().print(_table(found, wanted, limit, title))
    print(STEPS_MEAN)
    print(sources)
    print(answer)
    if html is not None:
        from lowbit_strategy.report.advice_page import write_advice

        print(f"written to {write_advice(html, found, wanted, cluster, compute_s, (title, sources, answer))}")


def _is_terminal() -> bool:
    return sys.stdin.isatty()


def _ask() -> tuple[str, int, int, str, str, str]:
    """What a prediction needs, of whom it helps to ask."""
    return (
        typer.prompt("How many parameters has the model (7e9, 350M)?"),
        typer.prompt("How many machines?", default=2, type=int),
        typer.prompt("How many GPUs has each?", default=8, type=int),
        typer.prompt("How fast is the link of a machine, measured (10gbit, 200mbit)?", default=_LINK),
        typer.prompt("How far are the machines, one way (0.1ms, 75ms)?", default=_LATENCY),
        typer.prompt("How long is a step on one machine alone (0.9s)?", default=_COMPUTE),
    )


def _measurements(path: Path, *, cpu: bool) -> Any:
    from lowbit_strategy.launch.bench import this_machine
    from lowbit_strategy.plan.bench import read_bench

    measured = read_bench(path, this_machine(cpu=cpu))
    for sentence in measured.wild_pairs():
        print(f"lowbit advise: {sentence}", file=sys.stderr)
    return measured


def _shape(nodes: int | None, ranks_per_node: int | None, measured: Any) -> tuple[int, int]:
    if measured is None or not measured.levels:
        return nodes or 2, ranks_per_node or 8
    return nodes or measured.nodes, ranks_per_node or measured.ranks_per_node


def cluster_of(link: str | None, latency: str | None, measured: Any = None, *, on_cpu: bool = False) -> Any:
    """What was given goes before what was measured, and that before what is assumed.

    Raises:
        ValueError: A quantity is none.
    """
    from lowbit_strategy.plan.cluster import Cluster, Link

    inside, coded = Link(_INTRA_LATENCY_S, _INTRA_NBYTES_PER_S), _ENCODED_PER_S_ON_CPU if on_cpu else _ENCODED_PER_S
    bucket_s = 0.0 if on_cpu else _BUCKET_S
    ways = 2 if on_cpu else 1  # of gloo's: a sender first hears that the receiver waits
    far = Link(units.duration(latency or _LATENCY), units.rate(link or _LINK))
    if measured is None:
        links = Cluster(inter_node=far, intra_node=inside, encoded_per_s=coded, bucket_s=bucket_s, ways=ways)
        return replace(links, trees=not on_cpu, prefetches=not on_cpu, scatters=not on_cpu)
    found = measured.levels.get("inter-node", far)
    given = found
    if link is not None or latency is not None:
        given = Link(
            far.latency_s if latency is not None else found.latency_s,
            far.nbytes_per_s if link is not None else found.nbytes_per_s,
        )
    cluster = measured.cluster()
    near = measured.levels.get("intra-node", inside)
    return replace(
        cluster,
        inter_node=replace(given, work=cluster.inter_node.work),
        intra_node=replace(near, work=cluster.intra_node.work),
        encoded_per_s=cluster.encoded_per_s or coded,
        rings=cluster.rings if given == found else None,  # those of other links
        ways=1 if latency is None else ways,  # measured as what a message takes
    )


def coding_of(cluster: Any) -> str:
    """How fast devices code, in words."""
    each = f" and {1e3 * cluster.bucket_s:.2g} ms per bucket" if cluster.bucket_s else ""
    return f"{cluster.encoded_per_s:.2g} elements/s encoded{each}"


def is_far(latency: str | None) -> bool:
    """Whether messages of ranks on CPUs all travel at once."""
    from lowbit_strategy.ranks.shape import FAR_S

    return 2 * units.duration(latency or _LATENCY) >= FAR_S


def _sources(bench: Path | None, link: str | None, latency: str | None, compute: str | None, cluster: Any) -> str:
    """Which figures were given, measured and assumed."""
    of = {f"link {link or _LINK}": link, f"latency {latency or _LATENCY}": latency}
    given = [what for what, value in {**of, f"compute {compute or _COMPUTE}": compute}.items() if value is not None]
    assumed = [] if compute else [f"compute {_COMPUTE}"]
    if bench is None:
        assumed += [what for what, value in of.items() if value is None]
        assumed += ["50 GB/s inside a node", coding_of(cluster)]
        measured = ""
    else:
        measured = f"; measured, in {bench}: the rest"
    return f"given: {', '.join(given) or 'nothing'}{measured}; assumed: {', '.join(assumed) or 'nothing'}"


def estimate(
    params: Params = None,
    model: Model = None,
    hf_config: HFConfig = None,
    nodes: Nodes = None,
    ranks_per_node: RanksPerNode = None,
    as_json: AsJson = False,
) -> None:
    """Memory and bytes of every sensible set-up; no link needed."""
    from lowbit_strategy.plan import advice

    with errors_of("estimate"):
        wanted = _wanted(params, model, hf_config, nodes or 2, ranks_per_node or 8)
        found = advice.choices(wanted)
    if as_json:
        ways = [asdict(each.memory) | {"differs": each.differs, "costs": each.costs} for each in advice.kept(wanted)]
        print(json.dumps({"choices": [_as_dict(each, wanted) for each in found], "loco_fsdp_keeps": ways}, indent=1))
        return
    Console().print(
        _table(found, wanted, None, f"{wanted.numel:.3g} parameters, {wanted.nodes} x {wanted.ranks_per_node} ranks")
    )
    print(STEPS_MEAN)
    print("What loco_fsdp keeps on a rank, chosen when the model is set up by the room that there is (memory=):")
    for each in advice.kept(wanted):
        print(f"  {each.differs or 'by default'}: {each.arithmetic()}{'; cost: ' + each.costs if each.costs else ''}")


def _wanted(params: str | None, model: str | None, hf_config: Path | None, nodes: int, ranks_per_node: int) -> Any:
    """Raises:
    ValueError: Not one of the three is given, or it cannot be built.
    """
    from lowbit_strategy.plan.advice import Wanted
    from lowbit_strategy.plan.models import transformer

    if sum(each is not None for each in (params, model, hf_config)) != 1:
        raise ValueError("give one of --params, --model and --hf-config")
    if params is not None:
        return Wanted(transformer(units.count(params)), nodes, ranks_per_node, itemsize=2)
    from lowbit_strategy.model.parameters import describe_parameters

    module = _on_meta(_maker(model) if model is not None else _from_hf(hf_config))
    specs = describe_parameters(module)
    if not specs:
        raise ValueError("the model has no parameter that requires a gradient")
    itemsizes = {param.element_size() for param in module.parameters()}
    return Wanted(specs, nodes, ranks_per_node, itemsize=4 if 4 in itemsizes else 2)


def _maker(name: str) -> Callable[[], Any]:
    package, _, attribute = name.partition(":")
    sys.path.insert(0, ".")
    try:
        found: Any = getattr(importlib.import_module(package), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(f"--model {name}: {error}; give it as package.module:Class") from error
    return found


def _from_hf(folder: Path | None) -> Callable[[], Any]:
    assert folder is not None
    if not (folder / "config.json").is_file():
        raise ValueError(f"{folder} has no config.json")
    try:
        from transformers import AutoConfig, AutoModelForCausalLM
    except ImportError as error:
        raise ValueError("--hf-config needs transformers: pip install 'lowbit-strategy[transformers]'") from error
    return lambda: AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder, local_files_only=True))


def _on_meta(make: Callable[[], Any]) -> Any:
    import torch

    try:
        with torch.device("meta"):
            return make()
    except Exception as error:
        raise ValueError(f"the model cannot be built on the meta device: {type(error).__name__}: {error}") from error


def _as_dict(choice: Any, wanted: Any) -> dict[str, Any]:
    return {
        "name": choice.name,
        "line": choice.line,
        "quality": choice.quality if choice.line else None,
        "loss": None if choice.loss is None else asdict(choice.loss),
        "more_steps_percent": None if choice.steps is None else choice.steps.worst,
        "step": None if choice.time is None else asdict(choice.time),
        "between_nbytes": round(choice.between_nbytes),
        "sent_nbytes": choice.plan.sent_nbytes,
        "in_series": choice.plan.in_series,
        "memory_nbytes": choice.held_nbytes(wanted),
        "kept_nbytes": asdict(choice.plan.memory),
        "break_even_nbytes_per_s": choice.break_even,
    }


def _table(found: Sequence[Any], wanted: Any, limit: float | None, title: str) -> Table:
    timed = found[0].time is not None
    table = Table(title=title, box=box.SIMPLE, padding=(0, 0), show_edge=False)  # fits into 80 columns
    table.add_column("set-up", no_wrap=True)
    columns = ["step, s", "x fp32", "x bf16", "pays to\nGbit/s"] if timed else []
    for name in [*columns, "sent\nGB", "memory\nGB", "loss, %\nmeasured", "steps\n%"]:
        table.add_column(name, justify="right", no_wrap=True)
    own: dict[str, float] = {}
    for each in found:
        row = []
        layout = each.plan.layout
        if each.time is not None:
            if not each.line:
                own[f"{layout} {each.name[-4:]}"] = each.time.seconds
            ratios = [own.get(f"{layout} {kind}", 0.0) / each.time.seconds for kind in ("at32", "bf16")]
            low, high = (f"{bound:.{3 if bound >= 1 else 2}g}" for bound in (each.time.low, each.time.high))
            row = [f"{each.time.seconds:.3g} ({low}-{high})"]
            row += [f"{ratio:.3g}" if ratio else "" for ratio in ratios] + [_rate(each)]
        held = each.held_nbytes(wanted)
        too_much = "!" if limit is not None and held > limit else ""
        costs = ["" if not each.line else "?" if known is None else str(known) for known in (each.loss, each.steps)]
        table.add_row(each.name, *row, f"{each.between_nbytes / 1e9:.2f}", f"{held / 1e9:.1f}{too_much}", *costs)
    return table


def _rate(choice: Any) -> str:
    from lowbit_strategy.plan.cluster import ANY_RATE

    if not choice.line:
        return ""
    if choice.break_even is None:
        return "never"
    return "always" if choice.break_even >= ANY_RATE else f"{choice.break_even * 8 / 1e9:,.0f}"
