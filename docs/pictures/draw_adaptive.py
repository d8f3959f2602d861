"""The picture of the pages on adaptive compression and monitoring: what `adaptive_run.py` recorded."""

from __future__ import annotations

from typing import Any

from style import BLUE, GRAY, GREEN, HERE, ORANGE, plt, save

from lowbit_strategy.report.run import Run, read_run


def draw_levels(axes: Any, run: Run) -> None:
    """Share of the elements that is compressed lightly."""
    steps = [line["step"] for line in run.levels] + [run.last_step]
    light = run.levels[0]["labels"][0]
    shares = [100 * line["shares"].get(light, 0.0) for line in run.levels]
    axes.fill_between(steps, [*shares, shares[-1]], step="post", color=BLUE, alpha=0.35)
    axes.set(ylabel="% at 8 bits", ylim=(0, 105))


def draw_total(axes: Any, run: Run, key: str, label: str, color: str) -> None:
    series = run.total(key)
    axes.plot(series.steps, series.values, color=color)
    axes.set(ylabel=label)
    axes.set_ylim(bottom=0)


def draw_groups(run: Run) -> None:
    """What the monitor measured, by group of layers: the largest six."""
    figure, (error, residual) = plt.subplots(1, 2, figsize=(9, 3.2), layout="constrained")
    for name in run.groups[:6]:
        errors, residuals, norms = (
            run.group(name, key) for key in ("relative_error", "residual_norm", "compensated_norm")
        )
        error.plot(errors.steps, errors.values, lw=1.3, label=name)
        residual.plot(residuals.steps, [of / h for of, h in zip(residuals.values, norms.values, strict=True)], lw=1.3)
    error.set(xlabel="optimizer step", ylabel="relative error", ylim=(0, None))
    residual.set(xlabel="optimizer step", ylabel="residual / (gradient + residual)", ylim=(0, None))
    figure.legend(*error.get_legend_handles_labels(), loc="outside lower center", ncols=3, frameon=False, fontsize=8)
    save(figure, "monitor")


def main() -> None:
    run = read_run(HERE / "runs" / "adaptive")
    draw_groups(run)
    figure, (loss, levels, bits, error) = plt.subplots(4, 1, figsize=(8, 6.6), sharex=True, layout="constrained")
    for name, series in run.losses().items():
        validation = "val" in name
        label = "validation" if validation else "training"
        loss.plot(
            series.steps, series.values, "o" if validation else "-", color=ORANGE if validation else GRAY, label=label
        )
    loss.set(ylabel="loss", title="Accordion between 8 and 2 bits: the demo's GPT, two processes")
    loss.legend(frameon=False)
    draw_levels(levels, run)
    draw_total(bits, run, "bits_per_element", "bits per element", GREEN)
    draw_total(error, run, "relative_error", "relative error", ORANGE)
    error.set(xlabel="optimizer step")
    save(figure, "adaptive")


if __name__ == "__main__":
    main()
