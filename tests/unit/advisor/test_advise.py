"""``lowbit advise`` and ``lowbit estimate`` on the command line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from lowbit_strategy.cli import app


def invoke(*arguments: str, columns: int = 160) -> tuple[int, str]:
    result = CliRunner().invoke(app, list(arguments), env={"COLUMNS": str(columns)})
    return result.exit_code, result.output


def test_nothing_is_cut_off_in_a_terminal_of_eighty_columns() -> None:
    wanted = ("--params", "7e9", "--nodes", "4", "--ranks-per-node", "8", "--compute", "0.9s", "--memory", "80GB")
    code, output = invoke("advise", *wanted, columns=80)
    assert code == 0
    assert "…" not in output
    table = [
        line for line in output.splitlines() if not line.startswith(("assumed:", "It ", "  It ", "Use", "Measure"))
    ]
    assert max(map(len, table)) <= 80


def test_advice_ends_with_a_line_to_paste() -> None:
    code, output = invoke("advise", "--params", "1e9", "--nodes", "4", "--ranks-per-node", "2", "--link", "1gbit")
    assert code == 0
    assert 'Use: strategy="loco_' in output
    assert "pays to" in output


def test_advice_against_this_package() -> None:
    links = ("--link", "10tbit", "--latency", "1us", "--compute", "0.1s")
    code, output = invoke("advise", "--params", "1e8", "--ranks-per-node", "1", *links)
    assert code == 0
    assert "Do not use this package here" in output


def test_json_has_what_the_table_has() -> None:
    code, output = invoke("advise", "--params", "1e8", "--json")
    assert code == 0
    found = json.loads(output)
    loco = next(each for each in found["choices"] if each["name"] == "loco_ddp")
    assert loco["step"]["low"] <= loco["step"]["seconds"] <= loco["step"]["high"]
    assert loco["in_series"] == 4  # inside the node, between nodes and back
    assert loco["memory_nbytes"] > loco["kept_nbytes"]["residuals"] > 0


def test_what_is_assumed_comes_first_and_in_json_with_its_range() -> None:
    given = ("--params", "1e8", "--nodes", "2", "--link", "1Gbps")
    code, output = invoke("advise", *given)
    assert code == 0
    first = output.splitlines()[0]
    assert first.startswith("assumed: 8 ranks on each, latency 0.1ms, inside a node 50GB/s, coding")
    assert "given: link 1Gbps" in first
    found = json.loads(invoke("advise", *given, "--json")[1])
    figures = {each["what"]: each for each in found["inputs"]["figures"]}
    assert {each["source"] for name, each in figures.items() if name != "link"} == {"assumed"}
    assert figures["link"]["low"] < 0.5
    assert found["inputs"]["sources"] == first
    assert figures["link"]["value"] == 1.25e8
    assert found["answer"] in ("use", "measure", "no")
    assert found["gain"]["low"] <= found["gain"]["likely"] <= found["gain"]["high"]


def test_parts_of_a_tensor_parallel_model_send_as_much_less_and_share_the_link() -> None:
    given = ("--params", "1e9", "--nodes", "4", "--ranks-per-node", "8", "--link", "10gbit", "--json")
    whole, part = (json.loads(invoke("advise", *given, *more)[1]) for more in ((), ("--tensor-parallel", "8")))
    assert (part["inputs"]["ranks_per_node"], part["inputs"]["tensor_parallel"]) == (8, 8)
    assert part["inputs"]["parameters"] == pytest.approx(whole["inputs"]["parameters"] / 8, rel=0.01)
    of_whole, of_part = ({each["name"]: each for each in found["choices"]} for found in (whole, part))
    assert of_part["fsdp, bf16"]["sent_nbytes"] < of_whole["fsdp, bf16"]["sent_nbytes"] / 7
    for name in ("fsdp, bf16", "loco_fsdp"):  # as many bytes leave a node, of all parts together
        assert of_part[name]["step"]["seconds"] == pytest.approx(of_whole[name]["step"]["seconds"], rel=0.35)
    assert of_part["loco_fsdp"]["line"] == 'strategy=LowBitFSDPStrategy("loco", tensor_parallel_size=8)'
    code, output = invoke("estimate", "--params", "1e9", "--tensor-parallel", "3")
    assert code == 2
    assert "--tensor-parallel 3 does not divide the 8 ranks of a node" in output


def test_nothing_is_said_of_links_that_there_are_not() -> None:
    given = ("advise", "--params", "1e8", "--nodes", "1")
    first, *others = invoke(*given)[1].splitlines()
    assert not {"any", "never"} & {word for line in others for word in line.split()}
    assert first.startswith("assumed: 8 ranks on each, inside a node 50GB/s, coding")
    assert "nominal: inside a node 300GB/s, compute" in invoke(*given, "--machine", "p4d")[1].splitlines()[0]
    assert "; given: link 1gbit, " in invoke(*given, "--link", "1gbit", "--memory", "9GB")[1].splitlines()[0]
    first = invoke(*given[:-1], "4", "--ranks-per-node", "1")[1].splitlines()[0]
    assert "link 10gbit" in first
    assert "inside a node" not in first


def test_far_machines_without_gpus_let_all_messages_travel_at_once() -> None:
    wanted = (
        "--params",
        "1e8",
        "--nodes",
        "4",
        "--ranks-per-node",
        "1",
        "--link",
        "10gbit",
        "--compute",
        "0.1s",
    )
    steps = []
    for far in (("--latency", "2ms", "--cpu"), ("--latency", "100ms", "--cpu"), ("--latency", "100ms")):
        code, output = invoke("advise", *wanted, *far, "--json")
        assert code == 0
        found = {each["name"]: each["step"]["seconds"] for each in json.loads(output)["choices"]}
        steps.append((found["loco_fsdp"], found["fsdp, float32"]))
    (near, _), (ahead, _), (gpu, _) = steps
    assert ahead - near < 0.6
    assert gpu > 2 * ahead


def test_estimate_of_a_model_of_ones_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_model.py").write_text(
        "from torch import nn\n\n\nclass Net(nn.Sequential):\n    def __init__(self):\n"
        "        super().__init__(nn.Linear(4096, 4096), nn.Linear(4096, 4096))\n"
    )
    monkeypatch.chdir(tmp_path)
    code, output = invoke("estimate", "--model", "own_model:Net", "--nodes", "2", "--ranks-per-node", "1", "--json")
    assert code == 0
    found = {each["name"]: each for each in json.loads(output)["choices"]}
    assert found["loco_ddp"]["step"] is None
    assert found["loco_ddp"]["sent_nbytes"] < found["ddp, bf16"]["sent_nbytes"] / 3


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "give one of --params, --model and --hf-config"),
        (("--params", "many"), "give a number such as 7e9 or 7B"),
        (("--params", "1000"), "give a model"),
        (("--model", "torch.nn:Nothing"), "give it as package.module:Class"),
        (("--model", "torch.nn:Linear"), "cannot be built on the meta device"),
        (("--hf-config", "nowhere"), "nowhere has no config.json"),
        (("--params", "1e9", "--link", "fast"), "give a bandwidth such as 10gbit"),
        (("--params", "1e15"), "give at most 1e+13"),
        (("--params", "1e9", "--memory", "80"), "'80' has no known unit: give an amount of memory such as 80GB"),
        (("--params", "1e9", "--machine", "p4e"), "'p4e' is not known"),
        (("--params", "1e9", "--compute", "0s"), "'0s' is too small: give a time"),
        (("--params", "1e9", "--link", "10"), "'10' has no known unit: give a bandwidth"),
        (("--params", "1e9", "--link", "1e17tbit"), "is too large: give a bandwidth"),
        (("--params", "1e9", "--link", "nangbit"), "'nangbit' is not a quantity"),
        (("--params", "1e9", "--link", "-1gbit"), "'-1gbit' is not a quantity"),
        (("--params", "1e9", "--latency", "1e-12s"), "is too small: give a time"),
        (("--params", "1e9", "--nodes", "0"), "'--nodes'"),
        (("--params", "1e9", "--nodes", "1000000000000"), "'--nodes'"),
        (("--params", "1e9", "--ranks-per-node", "10000000"), "'--ranks-per-node'"),
        (("--params", "1e9", "--model", "torch.nn:Linear"), "give one of --params, --model and --hf-config"),
        (("--model", "os:getcwd"), "must be a torch.nn.Module, got str"),
        (("--params", "1e9", "--precision", "16"), "--precision '16' is not known: give one of 32, bf16-mixed,"),
    ],
)
def test_bad_input(arguments: tuple[str, ...], message: str) -> None:
    code, output = invoke("advise", *arguments)
    assert code == 2
    assert message in output


def test_the_table_and_the_sentence_say_against_what() -> None:
    given = ("advise", "--params", "1e8", "--nodes", "2", "--link", "1gbit")
    for precision, baseline in (("32", "float32"), ("bf16-mixed", "bf16"), ("bf16-true", "bf16")):
        code, output = invoke(*given, "--precision", precision)
        assert code == 0
        assert f"x {baseline}" in output
        assert f"times as fast as {baseline} without compression" in output
        assert json.loads(invoke(*given, "--precision", precision, "--json")[1])["inputs"]["compared_with"] == baseline


def test_losses_are_those_that_were_measured() -> None:
    code, output = invoke("advise", "--params", "1e9", "--link", "1gbit", "--close", "--json")
    assert code == 0
    found = {each["name"]: each for each in json.loads(output)["choices"]}
    measured = {name: each["measured"] for name, each in found.items()}
    assert measured["ddp, bf16"] is None
    assert measured["loco_ddp"]["quality"] == "same"
    assert measured["powersgd_ddp"]["quality"] == "worse"
    assert measured["powersgd_ddp"]["loss"] > 3
    assert measured["diloco_ddp"]["quality"] == "local"
    assert "powersgd" not in json.loads(output)["advice"]
    assert measured["loco2_ddp"]["steps"] > measured["loco_ddp"]["steps"] > 0
    assert measured["powersgd_ddp"]["steps"] is None


def test_one_bit_is_advised_only_with_the_second_moment() -> None:
    """Without it, its steps are shorter, and a fifth more of them are needed."""
    given = ("--params", "7e9", "--ranks-per-node", "1", "--link", "1gbit", "--memory", "200GB")
    code, output = invoke("advise", *given, "--close", "--json")
    assert code == 0
    found = {each["name"]: each for each in json.loads(output)["choices"]}
    assert found["loco1_ddp"]["step"]["seconds"] < found["loco1_ddp*"]["step"]["seconds"]
    assert found["loco1_ddp"]["measured"]["steps"] > 20
    assert found["loco1_ddp"]["break_even_nbytes_per_s"] < found["loco1_ddp*"]["break_even_nbytes_per_s"]
    assert json.loads(output)["advice"] == 'strategy=LowBitDDPStrategy("loco1", second_moment=True)'
    assert "loco1_fsdp*" in found
