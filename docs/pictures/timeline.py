"""Two drawings of `docs/architecture.md`: the timeline of two overlapping buckets, and where a parameter lies.

They are schematic: lengths of bars are not measured.
"""

from __future__ import annotations

from typing import Any

from style import BLUE, GRAY, GREEN, ORANGE, RED, arrow, box, canvas, save

BACKWARD, WORKER, WIRE = 74, 47, 20  # rows, from below
FIRST, SECOND = BLUE, ORANGE
WORK = (  # start, end, text, bucket
    (21, 28, "encode", FIRST),
    (42, 49, "encode", SECOND),
    (49, 58, "decode,\nencode", FIRST),
    (69, 76, "decode", FIRST),
    (76, 84, "decode,\nencode", SECOND),
    (92, 98, "decode", SECOND),
)
TRAVEL = (
    (28, 46, "uplink\n(all-to-all)", FIRST),
    (49, 60, "uplink", SECOND),
    (60, 69, "downlink\n(all-gather)", FIRST),
    (84, 92, "downlink", SECOND),
)


def bar(axes: Any, row: float, start: float, end: float, text: str, color: str) -> None:
    box(axes, start, row, end - start, 15, text, color, fontsize=7.5)


def draw_timeline() -> None:
    figure, axes = canvas(10.5, 3.9)
    for row, name in ((BACKWARD, "backward\n(autograd)"), (WORKER, "worker\nthread"), (WIRE, "network")):
        axes.text(9, row + 7.5, name, ha="right", va="center", weight="bold", fontsize=9)
        axes.axhline(row - 4, color="#e2e8f0", lw=0.8)
    bar(axes, BACKWARD, 11, 21, "layers 4, 3", FIRST)
    bar(axes, BACKWARD, 21, 42, "layers 2, 1", SECOND)
    bar(axes, BACKWARD, 42, 98, "done; waits for the futures of both buckets", GRAY)
    for start, end, text, color in WORK:
        bar(axes, WORKER, start, end, text, color)
    for start, end, text, color in TRAVEL:
        bar(axes, WIRE, start, end, text, color)
    for at in (21, 42):
        arrow(axes, (at, BACKWARD), (at + 1, WORKER + 15), lw=1, mutation_scale=8)
    axes.text(21, 94, "bucket 1 is full", ha="center", fontsize=8, color=BLUE)
    axes.text(42, 94, "bucket 2 is full, the last one", ha="center", fontsize=8, color=ORANGE)
    arrow(axes, (11, 8), (98, 8), lw=1)
    axes.text(
        54, 3, "time; while one bucket travels, another is encoded or decoded (not to scale)", ha="center", fontsize=8
    )
    save(figure, "timeline")


def draw_layout() -> None:
    """One parameter of 1,000 elements on 3 ranks, blocks of 128: shares of 384."""
    figure, axes = canvas(10.5, 5.6)
    rows = (
        (83, "parameter", "layers.0.weight, N = 1,000 elements, flat"),
        (62, "cut", "W = 3 shares of 3 whole blocks (384 elements); rank r owns share r"),
        (41, "bucket", "an entry: name and offset; with its cut it is a slot"),
        (20, "arena", "residuals of all parameters of one codec, whole blocks"),
        (0, "message", "bytes to one owner: header, then codes and scales of each parameter"),
    )
    for y, name, text in rows:
        axes.text(1, y + 9, name, weight="bold", va="center", fontsize=9)
        axes.text(13, y + 14.5, text, fontsize=7.5, va="bottom", color=GRAY)
    box(axes, 38, 86, 30, 8, "1,000 elements", GRAY, fontsize=8)
    shares = ((38, 11.5, "share 0: 384"), (49.5, 11.5, "share 1: 384"), (61, 7, "2: 232"))
    for (x, width, text), color in zip(shares, (BLUE, GREEN, ORANGE), strict=True):
        box(axes, x, 65, width, 8, text, color, fontsize=7.5)
        box(axes, x, 44, width, 8, "", color)
    box(axes, 13, 44, 25, 8, "other parameters", GRAY, fontsize=7.5)
    box(axes, 68, 44, 20, 8, "others", GRAY, fontsize=7.5)
    axes.annotate("x_offset", (38, 44), (38, 39.5), ha="center", fontsize=7.5)
    box(axes, 22, 23, 22, 8, "others", GRAY, fontsize=7.5)
    for x, color in ((44, BLUE), (55.5, GREEN), (67, ORANGE)):
        box(axes, x, 23, 11.5, 8, "3 blocks", color, fontsize=7.5)
    axes.text(44, 18.5, "state_offset", ha="center", fontsize=7.5)
    box(axes, 13, 3, 8, 8, "header", RED, fontsize=7.5)
    box(axes, 21, 3, 22, 8, "others", GRAY, fontsize=7.5)
    box(axes, 43, 3, 17, 8, "codes of 3 blocks", GREEN, fontsize=7.5)
    box(axes, 60, 3, 10, 8, "3 scales", GREEN, fontsize=7.5)
    box(axes, 70, 3, 18, 8, "others", GRAY, fontsize=7.5)
    axes.text(43, -1.2, "wire_offset", ha="center", fontsize=7.5)
    for start, end in (((55, 65), (55, 52)), ((55, 44), (61, 31)), ((61, 23), (52, 11))):
        arrow(axes, start, end, lw=1, mutation_scale=8, color=GREEN)
    axes.text(89, 40, "a segment joins\nthe places of one\nshare: x_offset,\nnumel, state_offset,\nwire_offset",
              fontsize=7.5, color=GREEN, va="top")  # fmt: skip
    axes.set_ylim(-4, 100)
    save(figure, "layout")


if __name__ == "__main__":
    draw_timeline()
    draw_layout()
