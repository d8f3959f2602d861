"""The house of `docs/architecture.md`: packages in their layers, and who imports whom. Read from the sources.

The number after a name is that of its Python files. An arrow that follows from others is left out.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from typing import Any

from style import BLUE, GRAY, GREEN, HERE, ORANGE, PALE, arrow, box, canvas, save

REPOSITORY = HERE.parents[1]
ROOT = REPOSITORY / "lowbit_strategy"
Graph = dict[str, set[str]]
# Column, row and what lives there; a package that is missing here makes the script fail.
ROOMS = {
    "cli": (0, 0, "the command lowbit"),
    "run": (2, 0, "python -m lowbit_strategy.run"),
    "advisor": (1, 1, "predicts steps, measures links"),
    "doctor": (1, 0, "checks installation and runs"),
    "config_file": (2, 1, "sections of configuration files"),
    "exports": (0, 1, "the public names"),
    "custom_loop": (2, 7.5, "for loops of your own"),
    "transformers": (0, 5.2, "the HF Trainer"),
    "accelerate": (0, 6.2, "plugin and binding"),
    "pytorch_lightning": (1, 5.2, "the same, other bases"),
    "lightning": (1, 6.2, "strategies, callbacks"),
    "lightning_fabric": (2, 5.2, "the same, other bases"),
    "fabric": (2, 6.2, "strategies"),
    "report": (0, 8.45, "the page about a run"),
    "attach": (1, 7.5, "the session of a model"),
    "extend": (2, 8.45, "for methods of your own"),
    "checkpoint": (1, 8.45, "residual files, resume"),
    "autoload": (0, 10.35, "names without an import"),
    "telemetry": (0, 9.4, "figures, records"),
    "adaptation": (1, 9.4, "controllers at work"),
    "elastic": (0, 2, "replicas come and go"),
    "local_steps": (1, 2, "outer=: rounds, anchors"),
    "second_moment": (2, 2, "corrects Adam's"),
    "auto": (0, 2.95, "times and chooses"),
    "fitting": (1, 2.95, "memory="),
    "far_links": (2, 2.95, "a transport"),
    "node_codes": (0, 3.9, "intra="),
    "hooks": (2, 9.4, "DDP and FSDP2 hand over"),
    "engine": (1, 10.35, "buckets, state, steps"),
    "register": (2, 10.35, "strategy names"),
    "plan": (1, 11.3, "messages, bytes, memory"),
    "model": (0, 11.3, "parameters, handshake"),
    "ranks": (2, 11.3, "nodes, groups, levels"),
    "control": (0, 12.55, "controllers"),
    "metrics": (0, 13.5, "torchmetrics"),
    "methods": (1, 13.5, "LoCo, DGC, PowerSGD ..."),
    "functional": (2, 13.5, "collectives of any tensor"),
    "collectives": (1, 14.45, "exchanges of bytes"),
    "codecs": (1, 15.35, "floats to bytes"),
    "kernels": (1, 16.25, "PyTorch, C, Triton"),
    "leaves": (2, 15.35, "parts by name"),
    "inform": (0, 15.35, "what everyone sees"),
    "options": (0, 16.25, "types, suggestions"),
    "version": (2, 16.25, "a number"),
}
FLOORS = (  # title, first and last row, color
    ("what people start", -0.1, 1.4, GRAY),
    ("options", 1.9, 4.3, GRAY),
    ("one framework each", 5.1, 6.6, BLUE),
    ("one run: torch modules, threads, files", 7.4, 11.7, ORANGE),
    ("arithmetic: tensors and numbers", 12.5, 16.65, GREEN),
)
WIDTH, HEIGHT, TOP = 28, 0.66, 17.1


def packages() -> dict[str, int]:
    """Packages and modules directly under the root, with the number of Python files in each."""
    found = {
        path.name: sum(1 for _ in path.rglob("*.py")) for path in ROOT.iterdir() if (path / "__init__.py").exists()
    }
    return found | {path.stem: 1 for path in ROOT.glob("*.py") if path.stem != "__init__"}


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
    names = packages()
    return {name: {other for other in imports(name) if other in names} - {name} for name in names}


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
    column, row, _ = ROOMS[name]
    return 19 + column * 32.5, TOP - row - HEIGHT / 2


def color(name: str) -> str:
    return next(color for _, first, last, color in FLOORS if first <= ROOMS[name][1] <= last)


def draw(axes: Any, edges: Mapping[str, set[str]], sizes: Mapping[str, int]) -> None:
    for title, first, last, floor in FLOORS:
        axes.axhspan(TOP - last - 0.42, TOP - first + 0.08, color=PALE[floor], zorder=0)
        axes.text(
            1.5, TOP - (first + last) / 2 - 0.17, title, ha="center", va="center", rotation=90, fontsize=8, color=floor
        )
    for name, tos in edges.items():
        for to in sorted(tos - {"inform", "options", "leaves", "version"}):
            (x0, y0), (x1, y1) = center(name), center(to)
            if y0 == y1:  # neighbors
                side = WIDTH / 2 if x1 > x0 else -WIDTH / 2
                arrow(axes, (x0 + side, y0), (x1 - side, y1), zorder=1)
                continue
            far = y0 - y1 > 1.6 and x0 == x1
            arrow(axes, (x0 + (WIDTH / 2 - 2) * far, y0 - HEIGHT / 2), (x1 + (WIDTH / 2 - 2) * far, y1 + HEIGHT / 2),
                  zorder=1, connectionstyle=f"arc3,rad={-0.35 * far}")  # fmt: skip
    for name, (_, _, text) in ROOMS.items():
        x, y = center(name)
        label = f"{name} ({sizes[name]})\n{text}"
        box(
            axes, x - WIDTH / 2, y - HEIGHT / 2, WIDTH, HEIGHT, label, color(name), face="white", fontsize=8.5, zorder=3
        )


if __name__ == "__main__":
    sizes = packages()
    assert sizes.keys() == ROOMS.keys(), f"not in both: {sizes.keys() ^ ROOMS.keys()}"
    figure, axes = canvas(9, 12, units=(100, TOP + 0.3))
    draw(axes, reduced(graph()), sizes)
    save(figure, "house")
