"""The house of `docs/architecture.md`: groups of packages in their layers, and who imports whom, by the sources.

Every floor stands on those below it. Arrows are drawn inside floors; one that follows from others is left out.
"""

from __future__ import annotations

import ast
import textwrap
from collections.abc import Iterator
from typing import Any

from style import BLUE, GRAY, GREEN, HERE, ORANGE, PALE, arrow, box, canvas, save

REPOSITORY = HERE.parents[1]
ROOT = REPOSITORY / "lowbit_strategy"
Graph = dict[str, set[str]]
# A box: column, row, what it is, and what lives there, as rows of the page's table go together. A package that is
# missing here makes the script fail.
ROOMS = {
    "command": (0, 0, "the command lowbit", "cli doctor exports"),
    "files": (1, 0, "configuration files", "run config_file"),
    "advisor": (2, 0, "does it pay?", "advisor"),
    "leaves": (
        1,
        1,
        "options",
        "elastic local_steps second_moment auto fitting far_links node_codes divergence residual_rules",
    ),
    "hf": (0, 2.4, "Hugging Face", "accelerate transformers"),
    "lightning": (1, 2.4, "Lightning, Fabric", "lightning fabric pytorch_lightning lightning_fabric"),
    "loops": (2, 2.4, "plain PyTorch", "custom_loop"),
    "report": (0, 3.8, "the page about a run", "report"),
    "attach": (1, 3.8, "the session of a model", "attach"),
    "plan": (2, 3.8, "bytes, planned and checked", "plan"),
    "hooks": (1, 4.8, "where DDP and FSDP2 hand over", "hooks"),
    "observing": (0, 4.8, "controllers at work, figures", "adaptation telemetry"),
    "engine": (0, 5.8, "buckets, state, files", "checkpoint engine"),
    "model": (1, 5.8, "parameters, ranks", "model ranks"),
    "doors": (2, 5.8, "names, your own methods", "extend register"),
    "control": (0, 7.2, "controllers, metrics", "control metrics"),
    "methods": (1, 7.2, "LoCo, DGC, PowerSGD ...", "methods"),
    "functional": (2, 7.2, "collectives of any tensor", "functional"),
    "collectives": (1, 8.2, "bytes over the wire", "collectives codecs lost_ranks"),
    "kernels": (2, 8.2, "PyTorch, C, Triton", "kernels"),
    "ground": (1, 9.2, "for all others", "options inform autoload leaves version"),
}
FLOORS = (  # title, first and last row, color
    ("started,\nchosen", 0, 1, GRAY),
    ("frameworks", 2.4, 2.4, BLUE),
    ("one run: modules, threads, files", 3.8, 5.8, ORANGE),
    ("tensors and numbers", 7.2, 9.2, GREEN),
)
GROUND = "ground"  # all others stand on it: without arrows
COLUMN, WIDTH, HEIGHT, TOP = 31.5, 27, 0.72, 10.1
WIDE = {"leaves", "ground"}


def packages() -> set[str]:
    """Packages and modules directly under the root."""
    found = {path.name for path in ROOT.iterdir() if (path / "__init__.py").exists()}
    return found | {path.stem for path in ROOT.glob("*.py") if path.stem != "__init__"}


def imports(name: str) -> Iterator[str]:
    """Packages that `name` imports."""
    paths = (ROOT / name).rglob("*.py") if (ROOT / name).is_dir() else [ROOT / f"{name}.py"]
    for path in paths:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("lowbit_strategy"):
                yield from [part[1] for part in [node.module.split(".")] if len(part) > 1]
            elif isinstance(node, ast.Import):
                yield from (
                    alias.name.split(".")[1] for alias in node.names if alias.name.startswith("lowbit_strategy.")
                )


def graph() -> Graph:
    """Who imports whom, by boxes."""
    home = {package: room for room, (*_, inside) in ROOMS.items() for package in inside.split()}
    assert home.keys() == packages(), f"not in both: {home.keys() ^ packages()}"
    edges: Graph = {room: set() for room in ROOMS if room != GROUND}
    for package, room in home.items():
        if room != GROUND:
            edges[room] |= {home[other] for other in imports(package) if other in home} - {room, GROUND}
    return edges


def reduced(edges: Graph) -> Graph:
    """Without the arrows that follow from others."""

    def reachable(start: str) -> set[str]:
        seen: set[str] = set()
        stack = list(edges[start])
        while stack:
            if (at := stack.pop()) not in seen:
                seen.add(at)
                stack.extend(edges[at])
        return seen

    below = {name: reachable(name) for name in edges}
    return {name: {to for to in tos if not any(to in below[via] for via in tos - {to})} for name, tos in edges.items()}


def center(name: str) -> tuple[float, float]:
    column, row, *_ = ROOMS[name]
    return 20 + column * COLUMN, TOP - row - HEIGHT / 2


def color(name: str) -> str:
    return next(color for _, first, last, color in FLOORS if first <= ROOMS[name][1] <= last)


def draw(axes: Any, edges: Graph) -> None:
    for title, first, last, floor in FLOORS:
        axes.axhspan(TOP - last - HEIGHT - 0.15, TOP - first + 0.15, color=PALE[floor], zorder=0)
        middle = TOP - (first + last + HEIGHT) / 2
        axes.text(1.8, middle, title, ha="center", va="center", rotation=90, fontsize=8, color=floor)
    for name, tos in edges.items():
        for to in sorted(other for other in tos if color(other) == color(name)):
            (x0, y0), (x1, y1) = center(name), center(to)
            if y0 == y1:  # neighbors
                side = WIDTH / 2 if x1 > x0 else -WIDTH / 2
                arrow(axes, (x0 + side, y0), (x1 - side, y1), zorder=1)
            else:
                arrow(axes, (x0, y0 - HEIGHT / 2), (x1, y1 + HEIGHT / 2), zorder=1)
    for name, (_, _, title, inside) in ROOMS.items():
        x, y = center(name)
        label = textwrap.fill(inside.replace(" ", ", "), 100 if name in WIDE else 38)
        width = WIDTH + (2 * COLUMN if name in WIDE else 0)
        box(axes, x - width / 2, y - HEIGHT / 2, width, HEIGHT, "", color(name), face="white", zorder=3)
        axes.text(x, y + 0.17, title, ha="center", va="center", fontsize=9.5, zorder=4)
        axes.text(x, y - 0.12, label, ha="center", va="center", fontsize=7.5, color=GRAY, zorder=4)


if __name__ == "__main__":
    figure, axes = canvas(9, 8.5, units=(100, TOP + 0.3))
    draw(axes, reduced(graph()))
    save(figure, "house")
