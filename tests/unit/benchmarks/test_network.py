"""The network benchmark: its arithmetic, its refusal without root, its namespaces, and one small run of each mode."""

from __future__ import annotations

import argparse
import json
import subprocess
from pathlib import Path

import pytest

from benchmarks import network
from testing.hosts import namespaces
from testing.hosts.namespaces import INTERFACE, SlowNetwork
from testing.processes.scripts import REPOSITORY, run_script

SCRIPT = REPOSITORY / "benchmarks" / "network.py"


def _options(*arguments: str) -> argparse.Namespace:
    return network.parse_arguments(arguments)


def test_baselines_come_first_and_once() -> None:
    assert network.variants_of(_options("--variants", "loco_ddp,ddp")) == ["no-sync", "ddp", "loco_ddp"]
    assert network.variants_of(_options("--mode", "fsdp-reduce-scatter")) == ["fsdp2", "loco_fsdp"]
    assert network.variants_of(_options("--mode", "collective", "--variants", "loco")) == [
        "all-reduce/fp32",
        "all-reduce/loco",
        "reduce-scatter/fp32",
        "reduce-scatter/loco",
    ]


def _report(seconds: float, sent_nbytes: float) -> dict[str, object]:
    return {"times_s": [seconds, seconds, 99.0], "sent_nbytes": [sent_nbytes], "numel": 1000}


def test_communication_is_the_step_without_the_step_that_does_not_communicate() -> None:
    reports = [{"no-sync": _report(1.0, 0), "ddp": _report(5.0, 6000), "loco_ddp": _report(1.5, 750)}] * 4
    _, ddp, loco = network.rows_of(reports, "1gbit", _options())
    assert (ddp.seconds, ddp.communication_s, ddp.speedup) == (5.0, 4.0, 1.0)
    assert (loco.communication_s, loco.speedup) == (0.5, 8.0)
    # Two hops of three quarters of 1000 elements.
    assert ddp.bits_per_element_hop == 32
    assert loco.bits_per_element_hop == 4


def test_a_reduce_scatter_is_one_hop_and_compares_with_its_own_kind() -> None:
    names = ["all-reduce/fp32", "reduce-scatter/fp32", "reduce-scatter/loco"]
    report = dict(zip(names, [_report(8.0, 6000), _report(6.0, 3000), _report(2.0, 375)], strict=True))
    *_, loco = network.rows_of([report] * 4, "none", _options("--mode", "collective"))
    assert loco.speedup == 3.0
    assert loco.bits_per_element_hop == 4


def test_a_median_over_steps_of_the_ranks_mean() -> None:
    reports = [{"v": {"times_s": [1.0, 2.0, 30.0]}}, {"v": {"times_s": [3.0, 4.0, 50.0]}}]
    assert network.seconds_of(reports, "v") == 3.0


def test_without_root_it_says_so(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(namespaces.os, "geteuid", lambda: 1000)
    monkeypatch.setattr(namespaces.shutil, "which", lambda name: f"/sbin/{name}")
    monkeypatch.setattr("sys.argv", ["network.py"])
    assert network.main() == 2
    assert "need root: run this command with sudo" in capsys.readouterr().err


def _own_namespaces(network: SlowNetwork) -> set[str]:
    return {network.switch, *(host.namespace for host in network.hosts)} & set(namespaces._namespaces())


def _qdisc(network: SlowNetwork, host: int) -> str:
    return namespaces.run("tc", "-n", network.hosts[host].namespace, "qdisc", "show", "dev", INTERFACE)


@pytest.mark.root
def test_hosts_see_one_another_over_limited_links_and_all_is_removed() -> None:
    with SlowNetwork(2) as slow:
        assert len(_own_namespaces(slow)) == 3
        slow.set_rate("200mbit")
        slow.set_rate("1gbit")
        assert "tbf" in _qdisc(slow, 0)
        assert "rate 1Gbit" in _qdisc(slow, 1)
        slow.set_rate(None)
        slow.set_rate(None)
        assert "tbf" not in _qdisc(slow, 0)
        sleeper = subprocess.Popen(["ip", "netns", "exec", slow.hosts[0].namespace, "sleep", "100"])
        code = f"import socket; socket.create_server(('{slow.hosts[0].address}', 7000)).accept()[0].sendall(b'hello')"
        server = subprocess.Popen(["ip", "netns", "exec", slow.hosts[0].namespace, "python3", "-c", code])
        client = f"""
import socket, time
for _ in range(100):
    try:
        print(socket.create_connection(("{slow.hosts[0].address}", 7000), timeout=5).recv(5).decode())
        break
    except ConnectionRefusedError:
        time.sleep(0.05)
"""
        command = ["ip", "netns", "exec", slow.hosts[1].namespace, "python3", "-c", client]
        assert subprocess.run(command, capture_output=True, text=True, timeout=30).stdout == "hello\n"
        server.wait(10)
    assert not _own_namespaces(slow)
    assert sleeper.wait(10) == -9


@pytest.mark.root
def test_what_a_killed_run_left_behind_is_removed_and_what_lives_is_not() -> None:
    dead = subprocess.Popen(["true"])
    dead.wait()
    leftover = f"lowbit-{dead.pid}-h0"
    namespaces.run("ip", "netns", "add", leftover)
    with SlowNetwork(1) as slow:
        namespaces.remove_leftovers()
        assert leftover not in namespaces._namespaces()
        assert len(_own_namespaces(slow)) == 2


def test_a_delay_adds_two_ways_to_the_limit() -> None:
    assert _options("--delay", "75ms").delay == 0.075
    assert _options("--delay", "0.5s").delay == 0.5
    assert network.limit_of("200mbit", 5e6, 0.25) == pytest.approx(0.45)
    assert network.limit_of("200mbit", 5e6, 0.25, 0.075) == pytest.approx(0.6)
    assert network.limit_of("none", 5e6, 0.25, 0.075) is None


@pytest.mark.root
@pytest.mark.slow
def test_far_links_delay_and_limit_what_plain_sockets_send() -> None:
    with SlowNetwork(2, delay_s=0.04) as far:
        far.set_rate("50mbit")
        probed, packets = far.probe(3.0), far.set_rate("50mbit")
        assert 0.08 <= probed["ping_s"] < 0.12
        assert 30e6 < probed["settled_bps"] < 52e6
        assert packets["packets"] > 1000
        assert packets["lost"] == 0
    assert not _own_namespaces(far)
    with SlowNetwork(2, loss=0.2) as lossy:
        lossy.set_rate(None)
        lossy.probe(0.5)
        packets = lossy.set_rate(None)
        assert 0.1 < packets["lost"] / packets["packets"] < 0.3


# Bits per element and hop; with headers, and what is exempt or at high precision in so small a model.
BITS = {
    "no-sync": (0, 30),
    "diloco": (0, 3),
    "loco": (3.5, 9),
    "fsdp2": (30, 100),
    "ddp": (30, 100),
    "fp32": (30, 100),
}


@pytest.mark.root
@pytest.mark.slow
@pytest.mark.parametrize(
    ("mode", "variant", "expected"),
    [
        ("ddp-step", "loco_ddp", {"no-sync", "ddp", "loco_ddp"}),
        ("fsdp-reduce-scatter", "loco_fsdp", {"fsdp2", "loco_fsdp"}),
        ("fsdp-step", "loco_fsdp", {"no-sync", "fsdp2", "loco_fsdp"}),
        ("outer-step", "diloco_ddp", {"no-sync", "ddp", "diloco_ddp"}),
        ("collective", "loco", {f"{o}/{n}" for o in ("all-reduce", "reduce-scatter") for n in ("fp32", "loco")}),
    ],
)
def test_a_small_run_over_two_hosts(mode: str, variant: str, expected: set[str], tmp_path: Path) -> None:
    small = "--world-size 2 --rounds 1 --steps 2 --warmup-steps 1 --width 64 --depth 1 --context 16 --numel 100000"
    command = [SCRIPT, "--mode", mode, "--variants", variant, "--rate", "none", *small.split()]
    run_script([*command, "--json", tmp_path / "figures.json"], timeout=240)
    figures = json.loads((tmp_path / "figures.json").read_text())
    rows = {row["variant"]: row for row in figures["rows"]}
    assert set(rows) == expected
    for name, row in rows.items():
        low, high = next(bounds for part, bounds in BITS.items() if part in name)
        assert low <= row["bits_per_element_hop"] < high, name
