"""`lowbit report`: what it reads, what it writes, and its errors when there is nothing to read."""

from __future__ import annotations

import html
import json
import math
import os
import re
import shutil
import subprocess
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from matplotlib.figure import Figure
from typer.testing import CliRunner

from lowbit_strategy.cli import app
from lowbit_strategy.elastic.members_change import MembersChange
from lowbit_strategy.report.charts import draw_all
from lowbit_strategy.report.record import FILE_NAME
from lowbit_strategy.report.run import read_run
from lowbit_strategy.report.writing import RunRecord
from testing.record import read_record

LABELS = ["loco(bits=8)", "loco(bits=2)"]


def figures(error: float, *, compressed: bool = True, numel: int = 1000) -> dict[str, Any]:
    return {
        "numel": numel,
        "relative_error": error,
        "end_to_end_error": 2 * error,
        "cosine": 1 - error,
        "residual_norm": 0.5,
        "compensated_norm": 2.0,
        "bits_per_element": 4.125,
        "wire_nbytes": 500.0,
        "method": "loco 4-bit, blocks of 128" if compressed else "float32",
        "compressed": compressed,
    }


def write_run(
    folder: Path,
    num_steps: int = 200,
    *,
    switches: int = 1,
    group: str = "blocks.*.weight",
    start: dict[str, Any] | None = None,
    observation: dict[str, Any] | None = None,
) -> RunRecord:
    """A run of 20 observations; `start` and `observation` replace or add fields."""
    record = RunRecord(folder)
    first = {"world_size": 4, "layout": "all-reduce", "strategy": "LowBitDDPStrategy", "num_steps": num_steps}
    record.write("start", 0, **(first | (start or {})))
    record.write("levels", 0, labels=LABELS, shares={LABELS[0]: 1.0, LABELS[1]: 0.0}, parameters={}, accumulation=None)
    for step in range(0, num_steps, 10):
        fields: dict[str, Any] = {
            "epoch": 0,
            "loss": 5 / (1 + step),
            "total": figures(0.1 + step / 1000),
            "groups": {group: figures(0.2), "norm.<weight>": figures(0.0, compressed=False, numel=8)},
            "sent_nbytes": 1000.0,
            "dense_nbytes": 8000.0,
            "codec_ms": 1.0,
            "comm_ms": 5.0,
            "step_ms": 20.0 if step else None,
            "nonfinite": [],
        }
        fields |= observation or {}
        record.write("observation", step, **{key: value for key, value in fields.items() if value is not ...})
    for at in range(switches):
        switch = {"what": "blocks.0.weight", "before": LABELS[0], "after": LABELS[1], "reason": f"reason {at} <b>"}
        record.write("switch", 50, epoch=0, **switch)
    record.write("levels", 50, labels=LABELS, shares={LABELS[0]: 0.2, LABELS[1]: 0.8}, parameters={}, accumulation=None)
    record.write("validation", 100, metrics={"val_loss": 1.5, "epoch": 0.0})
    record.write("warning", 60, text="blocks.*.weight: relative error 0.9 > 0.5")
    return record


@pytest.fixture
def drawn() -> None:
    """Charts become pictures, which takes a second per report; other tests look at the text around them."""


@pytest.fixture(autouse=True)
def _pictures(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if "drawn" not in request.fixturenames:
        monkeypatch.setattr(Figure, "savefig", lambda _, path, **__: path.write_bytes(b""))


def run_report(*arguments: object) -> Any:
    return CliRunner().invoke(app, ["report", *map(str, arguments)])


@pytest.mark.usefixtures("drawn")
def test_page_is_self_contained_and_has_what_matters(tmp_path: Path) -> None:
    write_run(tmp_path)
    result = run_report(tmp_path)
    assert result.exit_code == 0, result.output
    page = (tmp_path / "report" / "index.html").read_text()
    assert not re.search(r'(src|href)="(?!data:)', page)
    assert page.count("data:image/png;base64,") == 5
    for text in (
        "4 ranks, all-reduce",
        "8.0x",
        "blocks.<wbr>*.<wbr>weight",
        "reason 0 &lt;b&gt;",
        "relative error 0.9 &gt; 0.5",
    ):
        assert text in page, text
    assert "val_loss" in page
    for stem in ("loss", "error", "bits", "bytes", "time"):
        assert (tmp_path / "report" / f"{stem}.png").read_bytes().startswith(b"\x89PNG")


def test_other_folder(tmp_path: Path) -> None:
    write_run(tmp_path / "run")
    assert run_report(tmp_path / "run", "--out", tmp_path / "elsewhere").exit_code == 0
    assert (tmp_path / "elsewhere" / "index.html").is_file()
    assert not (tmp_path / "run" / "report").exists()


def test_many_decisions_are_cut_and_counted(tmp_path: Path) -> None:
    write_run(tmp_path, switches=60)
    run_report(tmp_path)
    page = (tmp_path / "report" / "index.html").read_text()
    assert "60 in all; the last 40 are shown." in page
    assert "reason 59 " in page
    assert "reason 19 " not in page


def test_replicas_that_come_and_go(tmp_path: Path) -> None:
    record = write_run(tmp_path)
    for change in (
        MembersChange(step=0, members=("a", "b"), joined=("a", "b"), lost=(), seconds=0.4),
        MembersChange(step=70, members=("a",), joined=(), lost=("b",), seconds=2.3),
        MembersChange(step=160, members=("a", "<b>"), joined=("<b>",), lost=(), seconds=1.1),
    ):
        record.write("members", **asdict(change))
    run_report(tmp_path)
    page = (tmp_path / "report" / "index.html").read_text()
    assert '<b>2</b><span class="soft">1 joined, 1 lost</span>' in page  # the first ones have not joined anybody
    assert "<td>70</td>" in page
    assert "<td>2.3</td>" in page
    assert "&lt;b&gt;" in page


def test_a_running_job_whose_last_line_is_half_written(tmp_path: Path) -> None:
    record = write_run(tmp_path)
    with record.path.open("a") as file:
        file.write('{"kind": "observation", "st')
    assert run_report(tmp_path).exit_code == 0


def test_a_job_that_has_only_begun(tmp_path: Path) -> None:
    RunRecord(tmp_path).write("start", 0, world_size=2, layout="reduce-scatter")
    result = run_report(tmp_path)
    assert result.exit_code == 0
    assert "0 observations" in result.output


def test_steps_done_again_after_a_resume_count_once(tmp_path: Path) -> None:
    record = write_run(tmp_path)
    record.write("start", 120, world_size=4, layout="all-reduce")
    record.write("validation", 130, metrics={"val_loss": 1.2})
    lines = read_record(tmp_path)
    assert max(line["step"] for line in lines if line["kind"] == "observation") == 110
    assert [line["step"] for line in lines if line["kind"] == "start"] == [0, 120]
    assert lines[-1]["metrics"]["val_loss"] == 1.2


def test_not_a_number_becomes_null(tmp_path: Path) -> None:
    record = write_run(tmp_path)
    record.write("validation", 190, metrics={"val_loss": math.nan})
    assert json.loads(record.path.read_text().splitlines()[-1])["metrics"]["val_loss"] is None
    assert run_report(tmp_path).exit_code == 0


def test_losses_of_the_csv_logger_are_used(tmp_path: Path) -> None:
    write_run(tmp_path)
    rows = ["epoch,lowbit/cosine,step,train_loss_epoch,train_loss_step,val_loss", "0,0.9,5,,2.5,", "0,,9,2.4,,2.0"]
    (tmp_path / "metrics.csv").write_text("\n".join(rows))
    losses = read_run(tmp_path).losses()
    assert {name: (series.steps, series.values) for name, series in losses.items()} == {
        "train_loss_step": ([5], [2.5]),
        "val_loss": ([9], [2.0]),
    }


def test_errors_name_what_to_do(tmp_path: Path) -> None:
    missing = run_report(tmp_path)
    assert missing.exit_code == 2
    assert "CompressionMonitor or AdaptiveCompression in its callbacks" in " ".join(missing.output.split())
    (tmp_path / FILE_NAME).write_text("nonsense\n")
    broken = run_report(tmp_path)
    assert broken.exit_code == 2
    assert "line 1: not a line of a record" in " ".join(broken.output.split())
    (tmp_path / FILE_NAME).write_text("")
    assert "empty" in run_report(tmp_path).output


@pytest.mark.parametrize("nbytes", [999, 1000, 5e14])
def test_sizes(nbytes: float) -> None:
    from lowbit_strategy.options.sizes import size

    assert size(nbytes) == {999: "999 B", 1000: "1 KB", 5e14: "500 TB"}[nbytes]


# -- records of other frameworks and folders ------------------------------------------------------------------------


def test_a_record_without_losses(tmp_path: Path) -> None:
    """Fabric's: the monitor does not know the loss."""
    write_run(tmp_path, observation={"loss": ..., "epoch": ...})
    result = run_report(tmp_path)
    assert result.exit_code == 0, result.output
    assert "training loss" not in (tmp_path / "report" / "index.html").read_text()


@pytest.mark.usefixtures("drawn")
def test_names_that_matplotlib_or_html_would_read(tmp_path: Path) -> None:
    names = [r"blocks.$\frac$.weight", "blocks.$.weight", "blocks.<b>&.weight"]
    write_run(tmp_path, observation={"groups": {name: figures(0.2) for name in names}})
    result = run_report(tmp_path)
    assert result.exit_code == 0, result.output
    shown = (tmp_path / "report" / "index.html").read_text().replace("<wbr>", "")
    for name in names:
        assert f"<code>{html.escape(name)}</code>" in shown


@pytest.mark.parametrize(
    "line", ['{"step": 3}', '{"kind": "observation"}', '{"kind": "start", "step": "3"}', "[1, 2]", "3"]
)
def test_lines_that_are_no_record_s(line: str, tmp_path: Path) -> None:
    record = write_run(tmp_path)
    with record.path.open("a") as file:
        file.write(line + "\n")
    result = run_report(tmp_path)
    assert result.exit_code == 2
    assert "not a line of a record (it needs a kind and a step)" in " ".join(result.output.split())


@pytest.mark.parametrize(
    ("kind", "fields", "missing"),
    [
        ("observation", {}, "groups"),
        ("observation", {"groups": 3}, "no attribute 'items'"),
        ("validation", {}, "metrics"),
        ("levels", {"labels": LABELS}, "shares"),
        ("warning", {}, "text"),
        ("switch", {}, "what"),
    ],
)
def test_lines_of_another_version(kind: str, fields: dict[str, Any], missing: str, tmp_path: Path) -> None:
    write_run(tmp_path).write(kind, 200, **fields)
    _check_refused(tmp_path, missing)


def test_figures_of_another_version(tmp_path: Path) -> None:
    old = {key: value for key, value in figures(0.2).items() if key != "compensated_norm"}
    write_run(tmp_path, observation={"groups": {"a": old}})
    _check_refused(tmp_path, "no attribute 'compensated_norm'")


def _check_refused(folder: Path, missing: str) -> None:
    result = run_report(folder)
    assert result.exit_code == 2, result.output
    assert "damaged, or another version of the package wrote it" in result.output
    assert missing in result.output
    assert result.output.count("\n") == 1


def test_the_newest_run_below_a_folder(tmp_path: Path) -> None:
    for age, folder in enumerate(("lightning_logs/version_1", "lightning_logs/version_0", "other")):
        record = write_run(tmp_path / folder)
        os.utime(record.path, (1e9 - age, 1e9 - age))
    for given in (tmp_path, tmp_path / "lightning_logs"):
        result = run_report(given)
        assert result.exit_code == 0, result.output
        assert "the newest run in it is" in result.output
        assert "The others, which can be given in its place:" in result.output
        assert "lightning_logs/version_0" in result.output.replace("\n", "")
        page = tmp_path / "lightning_logs" / "version_1" / "report" / "index.html"
        assert page.is_file()
        page.unlink()


def test_a_record_of_two_runs(tmp_path: Path) -> None:
    """A folder given as `record` twice: the last run is drawn, and the report says that there is another one."""
    record = write_run(tmp_path)
    assert "runs in its record" not in run_report(tmp_path).output
    record.write("start", 0)
    result = run_report(tmp_path)
    assert result.exit_code == 0, result.output
    assert "has 2 runs in its record; this is the last" in " ".join(result.output.split())
    assert "0 observations, 0 decisions" in result.output
    record.write("levels", 3, labels=LABELS, shares={}, parameters={}, accumulation=None)
    record.write("start", 3)  # resumed: the same run
    assert "has 2 runs in its record" in run_report(tmp_path).output


# -- two runs -------------------------------------------------------------------------------------------------------


def _csv(folder: Path, losses: list[float]) -> None:
    folder.mkdir(parents=True)
    rows = ["step,train_loss,val_loss"]
    rows += [f"{10 * at},{loss}," for at, loss in enumerate(losses)]
    rows += [f"{10 * at},,{loss + 1}" for at, loss in enumerate(losses)]
    (folder / "metrics.csv").write_text("\n".join(rows))


def test_one_slow_step_does_not_flatten_the_times(tmp_path: Path) -> None:
    record = write_run(tmp_path)
    write = {
        "total": figures(0.1),
        "groups": {},
        "sent_nbytes": 1.0,
        "dense_nbytes": 2.0,
        "codec_ms": 1.0,
        "comm_ms": 5.0,
    }
    record.write("observation", 200, loss=1.0, step_ms=9000.0, **write)
    figure = draw_all(read_run(tmp_path))["time"]
    (axes,) = figure.axes
    assert 20 < axes.get_ylim()[1] < 40
    assert "1 slower step, up to 9,000 ms" in [text.get_text() for text in axes.texts]


def test_the_axis_of_losses(tmp_path: Path) -> None:
    write_run(tmp_path / "falls")  # from 5 to 0.03
    _csv(tmp_path / "stays", [4.0, 2.0])
    write_run(tmp_path / "stays")
    for name, scale in (("falls", "log"), ("stays", "linear")):
        assert draw_all(read_run(tmp_path / name))["loss"].axes[0].get_yscale() == scale


def test_weights_count_in_the_total(tmp_path: Path) -> None:
    weights = {"weights_nbytes": 3000.0}
    write_run(tmp_path / "with", observation=weights)
    run_report(tmp_path / "with")
    page = (tmp_path / "with" / "report" / "index.html").read_text()
    assert "2.8x" in page  # 11,000 bytes against 4,000: weights are not compressed
    assert "gradients and weights" in page
    write_run(tmp_path / "without", start={"layout": "reduce-scatter"})
    run_report(tmp_path / "without")
    page = (tmp_path / "without" / "report" / "index.html").read_text()
    assert "8.0x" in page
    assert "Gradients only" in page


@pytest.mark.slow
@pytest.mark.usefixtures("drawn")
@pytest.mark.skipif(shutil.which("chromium") is None, reason="needs chromium")
@pytest.mark.parametrize("width", [500, 1280])  # chromium makes no narrower window
def test_nothing_is_cut_off_on_a_narrow_screen(width: int, tmp_path: Path) -> None:
    long = "model.layers.*.block_sparse_moe.experts.*.down_projection_of_the_expert.weight"
    write_run(tmp_path, group=long, start={"configuration": {"compressor": "LoCo", "compressor.bits": "4"}})
    run_report(tmp_path, tmp_path)
    page = tmp_path / "report" / "index.html"
    page.write_text(page.read_text() + "<script>document.title = document.documentElement.scrollWidth</script>")
    flags = "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking"
    command = ["chromium", *flags.split(), "--disable-component-update", "--disable-sync", "--dump-dom"]
    command += [f"--user-data-dir={tmp_path / 'profile'}", f"--window-size={width},900", page.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=True)
    title = re.search(r"<title>(\d+)</title>", done.stdout)
    assert title is not None
    assert int(title[1]) <= width
