"""What the doctor says about TCP for far links: from files as the kernel's, and from this machine's."""

from __future__ import annotations

from pathlib import Path

from lowbit_strategy.doctor.doctor import examine_far_links

TUNED = {
    "tcp_rmem": "4096 131072 67108864",
    "tcp_slow_start_after_idle": "0",
}


def _kernel(folder: Path, **changed: str) -> Path:
    for name, value in (TUNED | changed).items():
        (folder / name).write_text(value + "\n")
    return folder


def test_a_host_prepared_for_far_links_needs_no_advice(tmp_path: Path) -> None:
    findings = list(examine_far_links(_kernel(tmp_path)))
    assert [finding.level for finding in findings] == ["ok", "ok"]
    assert findings[0].found == "at most 67.1 MB"


def test_each_setting_that_slows_far_links_is_noted(tmp_path: Path) -> None:
    for name, value in {
        "tcp_rmem": "4096 131072 6291456",
        "tcp_slow_start_after_idle": "1",
    }.items():
        levels = [finding.level for finding in examine_far_links(_kernel(tmp_path, **{name: value}))]
        noted = {setting for setting, level in zip(TUNED, levels, strict=True) if level == "note"}
        assert noted == {name}


def test_an_unknown_kernel_gets_no_advice(tmp_path: Path) -> None:
    assert list(examine_far_links(tmp_path)) == []
