"""Names of other packages that this one relies on: all of them are where they were, as they were."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lowbit_strategy.hooks import fsdp
from testing.private_names import PRIVATE_NAMES, PrivateName, problems

EVERY = [pytest.param(name, id=f"{name.target}") for names in PRIVATE_NAMES.values() for name in names]


@pytest.mark.parametrize("name", EVERY)
def test_it_is_there_and_takes_what_we_pass(name: PrivateName) -> None:
    assert name.problem() is None
    assert name.reason
    assert name.seen.partition(" ")[0] in PRIVATE_NAMES


@pytest.mark.parametrize("name", PRIVATE_NAMES["lightning"], ids=lambda name: name.target)
def test_it_is_there_in_the_other_namespace(name: PrivateName) -> None:
    other = name.target.replace("lightning.pytorch", "pytorch_lightning").replace(
        "lightning.fabric", "lightning_fabric"
    )
    assert other != name.target
    assert replace(name, target=other).problem() is None


def _example(target: str, *parameters: str) -> PrivateName:
    return PrivateName(
        target=target, use="called", parameters=parameters or None, seen="torch 2.13", reason="of this test"
    )


def test_what_has_moved_is_named_with_the_reason() -> None:
    found = problems(
        [
            _example("torch.nn:Module.forward_again"),
            _example("torch.nothing_here:Module.forward"),
            _example("torch.nn:Linear.forward", "self", "tensor"),
            _example("torch.nn:Linear.in_features"),  # set on instances
        ]
    )
    assert len(found) == 3
    assert found[0] == "torch.nn:Module.forward_again is gone; it is called because of this test"
    assert "torch.nothing_here:Module.forward is gone (No module named" in found[1]
    assert "torch.nn:Linear.forward takes ('self', 'input') instead of ('self', 'tensor')" in found[2]


def test_what_attaching_sets_on_fsdp2_s_groups_is_listed() -> None:
    owner, *others = {name.target.rpartition(".")[0] for name in PRIVATE_NAMES["torch"] if ".mesh_info" in name.target}
    assert not others
    assert {f"{owner}.{name}" for name in fsdp._SET} <= {name.target for name in PRIVATE_NAMES["torch"]}
