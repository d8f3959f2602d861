"""`lowbit report`: what it reads, what it writes, what it says when there is nothing to read."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from lowbit_strategy.cli import app
from lowbit_strategy.report.run import read_run
from lowbit_strategy.telemetry.run_record import FILE_NAME, RunRecord, read_record

LABELS = ["loco(bits=8)", "loco(bits=2)"]


def figures(error: float, *, compressed: bool = True, numel: int = 1000) -> dict[str, Any]:
    return {
        "numel": numel,
        "relative_error": error,
        "cosine": 1 - error,
        "sent_energy_ratio": 0.9,
        "residual_norm": 0.5,
        "compensated_norm": 2.0,
        "bits_per_element": 4.125,
        "wire_nbytes": 500.0,
        "method": "loco 4-bit, blocks of 128" if compressed else "float32",
        "compressed": compressed,
    }


def write_run(folder: Path, num_steps: int = 200, *, switches: int = 1) -> RunRecord:
    record = RunRecord(folder / FILE_NAME)
    record.write("start", 0, world_size=4, layout="all-reduce", strategy="LowBitDDPStrategy", num_steps=num_steps)
    record.write("levels", 0, labels=LABELS, shares={LABELS[0]: 1.0, LABELS[1]: 0.0}, parameters={}, accumulation=None)
    for step in range(0, num_steps, 10):
        record.write(
            "observation",
            step,
            epoch=0,
            loss=5 / (1 + step),
            total=figures(0.1 + step / 1000),
            groups={"blocks.*.weight": figures(0.2), "norm.<weight>": figures(0.0, compressed=False, numel=8)},
            sent_nbytes=1000.0,
            dense_nbytes=8000.0,
            codec_ms=1.0,
            comm_ms=5.0,
            step_ms=20.0 if step else None,
            nonfinite=[],
        )
    for at in range(switches):
        switch = {"what": "blocks.0.weight", "before": LABELS[0], "after": LABELS[1], "reason": f"reason {at} <b>"}
        record.write("switch", 50, epoch=0, **switch)
    record.write("levels", 50, labels=LABELS, shares={LABELS[0]: 0.2, LABELS[1]: 0.8}, parameters={}, accumulation=None)
    record.write("validation", 100, metrics={"val_loss": 1.5, "epoch": 0.0})
    record.write("warning", 60, text="blocks.*.weight: relative error 0.9 > 0.5")
    return record


def run_report(*arguments: object) -> Any:
    return CliRunner().invoke(app, ["report", *map(str, arguments)])


def test_page_is_self_contained_and_says_what_matters(tmp_path: Path) -> None:
    write_run(tmp_path)
    result = run_report(tmp_path)
    assert result.exit_code == 0, result.output
    page = (tmp_path / "report" / "index.html").read_text()
    assert not re.search(r'(src|href)="(?!data:)', page)
    assert page.count("data:image/png;base64,") == 5
    for text in ("4 ranks, all-reduce", "8.0x", "blocks.*.weight", "reason 0 &lt;b&gt;", "relative error 0.9 &gt; 0.5"):
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


def test_a_running_job_whose_last_line_is_half_written(tmp_path: Path) -> None:
    record = write_run(tmp_path)
    with record.path.open("a") as file:
        file.write('{"kind": "observation", "st')
    assert run_report(tmp_path).exit_code == 0


def test_a_job_that_has_only_begun(tmp_path: Path) -> None:
    RunRecord(tmp_path / FILE_NAME).write("start", 0, world_size=2, layout="reduce-scatter")
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


def test_errors_say_what_to_do(tmp_path: Path) -> None:
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
    from lowbit_strategy.report.charts import size

    assert size(nbytes) == {999: "999 B", 1000: "1 KB", 5e14: "500 TB"}[nbytes]
