"""`lowbit doctor`: what this machine will use, and what would not work here."""

from __future__ import annotations

import platform
import re
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from typing import Annotated, NamedTuple

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from lowbit_strategy.version import __version__

_REQUIRED = {"torch": (2, 11), "lightning": (2, 6), "accelerate": (1, 15), "torchmetrics": (1, 5)}
_OPTIONAL = {  # what they are for
    "triton": "needed on GPUs: pip install triton",
    "pytorch-lightning": "only for scripts that import pytorch_lightning",
    "transformers": "only for the Hugging Face Trainer",
    "matplotlib": "only for lowbit report: pip install 'lowbit-strategy[report]'",
    "jinja2": "only for lowbit report: pip install 'lowbit-strategy[report]'",
}


class Finding(NamedTuple):
    """One thing looked at: ``ok`` serves, ``note`` works with a limit, ``problem`` does not work."""

    level: str
    what: str
    found: str
    advice: str = ""


def doctor(
    strict: Annotated[bool, typer.Option(help="Exit with status 1 if there is a problem.")] = False,
) -> None:
    """Say what this machine will use, and what would not work."""
    findings = list(examine())
    console = Console()
    table = Table(title="lowbit doctor", title_justify="left")
    for column in ("", "what", "found", "advice"):
        table.add_column(column, overflow="fold")
    marks = {"ok": "[green]ok[/]", "note": "[yellow]note[/]", "problem": "[red]problem[/]"}
    for finding in findings:
        table.add_row(marks[finding.level], finding.what, escape(finding.found), escape(finding.advice))
    console.print(table)
    problems = sum(finding.level == "problem" for finding in findings)
    console.print(f"{problems} problem{'' if problems == 1 else 's'}")
    if strict and problems:
        raise typer.Exit(1)


def examine() -> Iterator[Finding]:
    """Look at packages, kernels, backends and strategy names, in that order."""
    yield Finding("ok", "lowbit-strategy", __version__)
    yield Finding("ok", "Python", platform.python_version())
    yield from _packages()
    yield from _cpu_kernels()
    yield from _gpu_kernels()
    yield from _backends()
    yield from _compiler()
    yield from _strategies()


def _packages() -> Iterator[Finding]:
    for name, least in _REQUIRED.items():
        found = _version(name)
        if found is None:
            yield Finding("problem", name, "missing", f"pip install {name}")
        elif _numbers(found) < least:
            yield Finding("problem", name, found, f"needs {least[0]}.{least[1]} or newer")
        else:
            yield Finding("ok", name, found)
    for name, purpose in _OPTIONAL.items():
        found = _version(name)
        yield Finding("ok" if found else "note", name, found or "not installed", "" if found else purpose)


def _numbers(found: str) -> tuple[int, ...]:
    """The first two of a version."""
    return tuple(int(number) for number in re.findall(r"\d+", found)[:2])


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _cpu_kernels() -> Iterator[Finding]:
    import torch

    from lowbit_strategy.kernels import backends

    try:
        found = backends.describe(torch.device("cpu"))
    except RuntimeError as error:
        yield Finding("problem", "CPU kernels", str(error), f"change or unset {backends.OVERRIDE}")
        return
    yield Finding("ok" if backends.native_available() else "note", "CPU kernels", found)


def _gpu_kernels() -> Iterator[Finding]:
    import torch

    from lowbit_strategy.kernels import backends

    if not torch.cuda.is_available():
        yield Finding("note", "GPU", "none visible to torch", "training runs on CPU")
        return
    name = torch.cuda.get_device_name()
    if not backends.triton_available():
        yield Finding("problem", "GPU kernels", f"{name}, no Triton", "pip install triton")
        return
    yield Finding("ok", "GPU kernels", f"{name}, Triton")


def _backends() -> Iterator[Finding]:
    import torch.distributed as dist

    if not dist.is_available():
        yield Finding("problem", "torch.distributed", "not in this build of torch", "install another build of torch")
        return
    for name, there in (("gloo", dist.is_gloo_available()), ("nccl", dist.is_nccl_available())):
        yield Finding("ok" if there else "note", name, "available" if there else "not in this build of torch")


def _compiler() -> Iterator[Finding]:
    import torch._dynamo

    if torch._dynamo.config.optimize_ddp == "python_reducer":
        yield Finding(
            "problem",
            "torch.compile",
            'optimize_ddp="python_reducer"',
            "compiled autograd bypasses communication hooks: set it to True",
        )


def _strategies() -> Iterator[Finding]:
    from lowbit_strategy.methods.registry import PRESETS

    names = ", ".join(sorted(PRESETS))
    yield Finding("ok", "compressors", names, "strategy names: loco_ddp, loco_fsdp and so on")
