"""`lowbit doctor`: reports what this machine will use, and what would not work here."""

from __future__ import annotations

import platform
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, requires, version
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, NamedTuple

import typer
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import Version
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from lowbit_strategy import autoload
from lowbit_strategy.private_names import PRIVATE_NAMES, problems
from lowbit_strategy.version import __version__

_OPTIONAL = {  # what they are for
    "triton": "needed on GPUs: comes with PyTorch's builds for CUDA",
    "pytorch-lightning": "only for scripts that import pytorch_lightning",
    "transformers": "only for the Hugging Face Trainer",
    "matplotlib": "only for lowbit report: pip install 'lowbit-strategy[report]'",
    "jinja2": "only for lowbit report: pip install 'lowbit-strategy[report]'",
}
TRITON_ADVICE = (
    "install PyTorch's build for CUDA (https://pytorch.org/get-started/locally), which brings the Triton that fits it"
)
# Releases that steal credentials when they are imported. The same code is distributed under several names.
_MALICIOUS = SpecifierSet("!=2.6.2,!=2.6.3")
_LIGHTNING = ("lightning", "pytorch-lightning", "lightning-fabric")
_ADVISORY = (
    "malicious release (GHSA-w37p-236h-pfx3): uninstall it, install 2.6.4 or newer, and replace every credential that"
    " this machine holds"
)


class Finding(NamedTuple):
    """One thing looked at: ``ok`` serves, ``note`` works with a limit, ``problem`` does not work."""

    level: str
    what: str
    found: str
    advice: str = ""


def doctor(strict: Annotated[bool, typer.Option(help="Exit with status 1 if there is a problem.")] = False) -> None:
    """Report what this machine will use, and what would not work."""
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
    yield from _private_names()
    yield from _cpu_kernels()
    yield from _gpu_kernels()
    yield from _backends()
    yield from examine_far_links()
    yield from _compiler()
    yield from _strategies()
    yield _autoloading()


def _packages() -> Iterator[Finding]:
    bounds = _bounds()
    if not bounds:
        yield Finding("note", "requirements", "unknown: lowbit-strategy is not installed", "pip install .")
    for name in dict.fromkeys((*bounds, *_OPTIONAL, *_LIGHTNING)):
        found, bound = _version(name), bounds.get(name, SpecifierSet())
        if found is not None and name in _LIGHTNING and not _MALICIOUS.contains(found, prereleases=True):
            yield Finding("problem", name, found, _ADVISORY)
        elif found is not None and not bound.contains(found, prereleases=True):
            yield Finding("problem", name, found, f"needs {name}{bound}")
        elif found is not None:
            yield Finding("ok", name, found)
        elif name in _OPTIONAL:
            yield Finding("note", name, "not installed", _OPTIONAL[name])
        elif name in bounds:
            yield Finding("problem", name, "missing", f"pip install '{name}{bound}'")


def _private_names() -> Iterator[Finding]:
    """What this package relies on in others beyond their documented interface."""
    for name, listed in PRIVATE_NAMES.items():
        if find_spec(name) is None:
            continue  # an optional framework that is not installed
        for text in problems(listed):
            yield Finding("problem", f"{name}: private name", text, "install a version that constraints.txt names")
        found, newest = _version(name), listed[0].seen.split()[-1]
        if found is not None and Version(found).release[:2] > Version(newest).release[:2]:
            yield Finding("note", name, f"{found}, tested up to {newest}", "compare some steps with uncompressed ones")


def _bounds() -> dict[str, SpecifierSet]:
    """What this package was installed with as its requirements, those of the extras in `_OPTIONAL` included."""
    try:
        texts = requires("lowbit-strategy") or ()
    except PackageNotFoundError:
        return {}
    bounds = {}
    for each in map(Requirement, texts):
        name = canonicalize_name(each.name)
        if name in _OPTIONAL or each.marker is None or each.marker.evaluate({"extra": ""}):
            bounds[str(name)] = each.specifier
    return bounds


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _cpu_kernels() -> Iterator[Finding]:
    import torch

    from lowbit_strategy.kernels import backends, native

    try:
        found = backends.describe(torch.device("cpu"))
    except RuntimeError as error:
        yield Finding("problem", "CPU kernels", str(error), f"change or unset {backends.OVERRIDE}")
        return
    yield Finding("ok" if native.available() else "note", "CPU kernels", found)


def _gpu_kernels() -> Iterator[Finding]:
    import torch

    from lowbit_strategy.kernels import backends

    if not torch.cuda.is_available():
        yield Finding("note", "GPU", "none visible to torch", "training runs on CPU")
        return
    name = torch.cuda.get_device_name()
    if not backends.triton_available():
        yield Finding("problem", "GPU kernels", f"{name}, no Triton", TRITON_ADVICE)
        return
    yield Finding("ok", "GPU kernels", f"{name}, Triton")


def _backends() -> Iterator[Finding]:
    import torch.distributed as dist

    if not dist.is_available():
        yield Finding("problem", "torch.distributed", "not in this build of torch", "install another build of torch")
        return
    for name, available in (("gloo", dist.is_gloo_available()), ("nccl", dist.is_nccl_available())):
        yield Finding("ok" if available else "note", name, "available" if available else "not in this build of torch")


_TCP = Path("/proc/sys/net/ipv4")
_FAR = 1e9 * 0.15 / 8  # bytes on the way at 1 Gbit/s and a round trip of 150 ms
_FAR_PAGE = "docs/far-links.md"


def examine_far_links(root: Path = _TCP) -> Iterator[Finding]:
    """Socket buffers and slow start after idle; nothing where the kernel does not say."""
    if (text := _read(root / "tcp_rmem")) is not None:
        largest = int(text.split()[-1])
        advice = f"on a link of R bit/s and a round trip of T seconds it has to be R * T / 8 bytes: {_FAR_PAGE}"
        yield _judged("net.ipv4.tcp_rmem", f"at most {largest / 1e6:.1f} MB", largest < _FAR, advice)
    if (text := _read(root / "tcp_slow_start_after_idle")) is not None:
        advice = f"far links: every step begins slowly; sysctl -w net.ipv4.tcp_slow_start_after_idle=0: {_FAR_PAGE}"
        yield _judged("slow start after idle", "off" if text == "0" else "on", text != "0", advice)


def _judged(what: str, found: str, noted: bool, advice: str) -> Finding:
    return Finding("note", what, found, advice) if noted else Finding("ok", what, found)


def _read(path: Path) -> str | None:
    try:
        return path.read_text().strip()
    except OSError:
        return None


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
    from lowbit_strategy.methods.outer.published import OUTER_RULES
    from lowbit_strategy.methods.registry import PRESETS

    names = ", ".join(sorted(PRESETS))
    yield Finding("ok", "compressors", names, "strategy names: loco_ddp, loco_fsdp, loco_hsdp and so on")
    rules = ", ".join(sorted(OUTER_RULES))
    yield Finding("ok", "local steps", rules, "strategy names: diloco_ddp, diloco_hsdp and so on")


def _autoloading() -> Finding:
    """Whether a script that never imports this package has its names, tried in a new process."""
    advice = "until then: import lowbit_strategy in the script, or python -m lowbit_strategy.run"
    if (why := autoload.problem()) is not None:
        return Finding("note", "autoloading", why, advice)
    code = "import sys, torch; print(sys.modules['lowbit_strategy'].__path__[0])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    if done.returncode:
        return Finding("problem", "autoloading", done.stderr.strip().splitlines()[-1], advice)
    found = Path(done.stdout.splitlines()[-1])
    if found.resolve() != Path(autoload.__file__).parent.resolve():
        return Finding("problem", "autoloading", f"finds another installation, {found}", "uninstall one of them")
    return Finding("ok", "autoloading", "import torch makes the names known", f"{autoload.SWITCH}=0 turns it off")
