"""Weights on simulated ranks: any shapes, types and numbers of ranks; what is sent, kept, decoded and saved."""

from __future__ import annotations

import copy

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from lowbit_strategy import Exact, WeightCode, WeightDelta
from lowbit_strategy.codecs.block import BlockCodec
from lowbit_strategy.collectives.layout import TensorSpec, dim0_row_numel
from lowbit_strategy.collectives.ordered import Gathering
from lowbit_strategy.engine.weight_sync import WeightSync
from lowbit_strategy.kernels.format import uniform
from lowbit_strategy.methods.weight_codings import WeightCoding
from lowbit_strategy.model.module_layout import ModuleLayout
from testing.worlds.shards import CPU, SPECS, Shards
from testing.worlds.simulated import SimulatedWorld


def by_definition(values: Tensor, world_size: int, bits: int, block_size: int = 128) -> Tensor:
    """Every shard coded by itself."""
    row = dim0_row_numel(tuple(values.shape), world_size)
    codec = BlockCodec(uniform(bits, block_size))
    parts = values.reshape(-1).split(row) if row else []
    decoded = [codec.decode_sum(codec.encode(part, seed=0)[None], part.numel()) for part in parts]
    return torch.cat([*decoded, torch.empty(0)]).view(values.shape)


_sizes = st.integers(1, 70)
_specs = st.lists(
    st.tuples(st.lists(_sizes, min_size=0, max_size=2), st.sampled_from(("other", "embedding"))), min_size=1, max_size=4
).map(lambda parts: [TensorSpec(f"p{at}", tuple(shape), role) for at, (shape, role) in enumerate(parts)])  # type: ignore[arg-type]


@given(
    _specs, st.sampled_from((1, 2, 3, 5)), st.sampled_from((4, 6, 8)), st.sampled_from(("nothing", "codes", "replica"))
)
def test_codes_are_those_of_every_shard_by_itself(
    specs: list[TensorSpec], world_size: int, bits: int, keep: str
) -> None:
    coding = WeightCode(bits=bits, keep=keep, block_size=32, exempt=("@vector",))  # type: ignore[arg-type]
    shards = Shards(coding, world_size, specs)
    for seed in range(2):
        found = shards.gather()
        for spec in specs:
            exact = shards.values[spec.name]
            high = 8 if spec.role == "embedding" else bits
            expected = exact if spec.ndim < 2 else by_definition(exact, world_size, high, 32)
            assert torch.equal(found[spec.name], expected)
        again = shards.gather()
        assert all(torch.equal(again[name], value) for name, value in found.items())
        shards.end_step()
        shards.step_(seed)


@pytest.mark.parametrize(("bits", "least"), [(8, 1.5e-36), (4, 8.3e-38)])
def test_blocks_without_an_element_above_the_documented_bound_are_zeros(bits: int, least: float) -> None:
    assert str(least) in (WeightCode.__doc__ or "")
    codec = WeightCode(bits=bits).codec(TensorSpec("w", (64, 64)))
    assert codec is not None
    for largest, decoded in ((least, least), (least / 1.1, 0.0)):
        values = torch.full((128,), largest)
        found = codec.decode_sum(codec.encode(values, seed=0)[None], 128)
        torch.testing.assert_close(found, torch.full((128,), decoded), rtol=0.01, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("coding", [WeightCode(), WeightDelta(), WeightDelta(bits=2), Exact(keep="replica")])
def test_types(coding: WeightCoding, dtype: torch.dtype) -> None:
    shards = Shards(coding, 3, dtype=dtype)
    for seed in range(6):
        found = shards.gather()
        assert torch.equal(found["net.bias"], shards.values["net.bias"])  # exempt
        if isinstance(coding, Exact) or (seed == 0 and coding.sends_differences):
            assert torch.equal(found["net.weight"], shards.values["net.weight"])
        worst = (found["net.weight"].float() - shards.values["net.weight"].float()).abs().max()
        assert worst < 0.05
        shards.end_step()
        shards.step_(seed)


def test_many_exempt_parameters_arrive_as_they_are() -> None:
    """With neighbors that are copied with them and with ones that are not: padded in the message, or cut unevenly."""
    sizes = (24, 48, 24, 5, 24, 25, 24, 24)
    specs = [TensorSpec(f"v{at}", (size,)) for at, size in enumerate(sizes)]
    specs.insert(2, TensorSpec("matrix", (24, 32)))
    for world_size in (1, 2, 3):
        shards = Shards(WeightCode(bits=8), world_size, specs)
        found = shards.gather()
        for at in range(len(sizes)):
            assert torch.equal(found[f"v{at}"], shards.values[f"v{at}"])


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_differences_by_definition_and_errors_do_not_add_up(bits: int) -> None:
    shards = Shards(WeightDelta(bits=bits), 3)
    replica = shards.values["net.weight"].clone()
    shards.gather()
    errors = []
    for seed in range(40):
        shards.end_step()
        shards.step_(seed)
        exact = shards.values["net.weight"]
        replica += by_definition(exact - replica, 3, bits)
        found = shards.gather()["net.weight"]
        assert torch.equal(found, replica)
        errors.append(float((found - exact).norm() / exact.norm()))
    assert max(errors[-5:]) < 1.5 * max(errors[5:15])
    assert errors[-1] < {2: 2e-2, 4: 2e-3, 8: 1e-4}[bits]


def test_without_keeping_every_gather_sends() -> None:
    shards = Shards(WeightCode(keep="nothing"), 2)
    shards.gather()
    once = shards.sent()
    shards.gather()
    assert shards.sent() == 2 * once
    assert shards.syncs[0].modules["net"].kept_nbytes == 0
    shards.end_step()


def test_new_weights_are_seen_after_each_kind_of_change() -> None:
    shards = Shards(WeightDelta(), 2)
    for change in ("invalidate", "loaded", "forget"):
        shards.gather()
        shards.step_(1, size=3.0)
        for sync in shards.syncs:
            getattr(sync, change)()
        found = shards.gather()
        worst = float((found["net.weight"] - shards.values["net.weight"]).abs().max())
        assert worst == 0.0 if change in ("loaded", "forget") else 0 < worst < 1.5


@pytest.mark.parametrize("coding", [WeightCode(), WeightDelta()])
@pytest.mark.parametrize("value", [1.0, torch.inf, torch.nan])
def test_weights_that_have_not_changed_are_seen_as_before(coding: WeightCoding, value: float) -> None:
    shards = Shards(coding, 2)
    shards.gather()
    shards.end_step()
    shards.step_(0)
    shards.values["net.weight"][3, 7] = value
    seen, sent = shards.gather(), shards.sent()
    looked = shards.look()
    assert shards.sent() > sent
    torch.testing.assert_close(looked, seen, rtol=0, atol=0, equal_nan=True)
    shards.step_(1)  # by the user's own code
    assert not torch.equal(shards.look()["net.weight"][20:], seen["net.weight"][20:])


def _states(shards: Shards) -> list[dict[str, object]]:
    return [copy.deepcopy(sync.state_dict()) for sync in shards.syncs]


def test_a_restored_replica_continues_bit_for_bit() -> None:
    whole, resumed = Shards(WeightDelta(bits=2), 3), Shards(WeightDelta(bits=2), 3)
    for seed in range(3):
        whole.gather()
        whole.end_step()
        whole.step_(seed)
        resumed.step_(seed)
    for sync, state in zip(resumed.syncs, _states(whole), strict=True):
        sync.forget()
        sync.load_state_dict([state], own=True)
        sync.loaded()  # the weights are loaded after the residuals
        assert sync.state_dict()["rows"].keys() == {"net"}  # saved again before anything was gathered
    for seed in range(3, 6):
        expected, found = whole.gather(), resumed.gather()
        assert all(torch.equal(found[name], value) for name, value in expected.items())
        for shards in (whole, resumed):
            shards.end_step()
            shards.step_(seed)


def test_on_another_number_of_ranks_weights_begin_exact() -> None:
    old, new = Shards(WeightDelta(), 2), Shards(WeightDelta(), 3)
    old.gather()
    for sync in new.syncs:
        sync.load_state_dict(_states(old), own=False)
    new.step_(5)
    assert torch.equal(new.gather()["net.weight"], new.values["net.weight"])


def test_a_message_of_another_layout_is_noticed() -> None:
    shards = Shards(WeightCode(), 2)
    renamed = tuple(TensorSpec(f"other.{spec.name}", spec.shape, spec.role) for spec in SPECS)
    layout = ModuleLayout(specs=renamed, dtype=torch.float32, num_gathers=2)
    shards.syncs[1] = WeightSync(WeightCode(), {"net": layout}, {"net": Gathering(shards.world.comms[1])}, CPU)
    with pytest.raises(RuntimeError, match="rank 1 sent a message with a different layout than rank 0 expects"):
        shards.gather()


@pytest.mark.parametrize("coding", [WeightCode(), WeightDelta(), Exact(keep="replica")])
@pytest.mark.parametrize(("num_nodes", "num_inside"), [(2, 2), (3, 2), (2, 4)])
def test_on_two_levels_each_byte_travels_to_each_other_node_once(
    coding: WeightCoding, num_nodes: int, num_inside: int
) -> None:
    world_size = num_nodes * num_inside
    between = [SimulatedWorld(num_nodes) for _ in range(num_inside)]
    inside = [SimulatedWorld(num_inside) for _ in range(num_nodes)]
    gatherings = [
        Gathering(
            between[rank % num_inside].comms[rank // num_inside], inside[rank // num_inside].comms[rank % num_inside]
        )
        for rank in range(world_size)
    ]
    assert [each.rank for each in gatherings] == list(range(world_size))
    flat, nodes = Shards(coding, world_size), Shards(coding, world_size, gatherings=gatherings)
    for seed in range(3):
        expected, found = flat.gather(), nodes.gather()
        assert all(torch.equal(found[name], value) for name, value in expected.items())
        for shards in (flat, nodes):
            shards.end_step()
            shards.step_(seed)
    assert nodes.sent() == flat.sent()
    left_the_node = sum(comm.sent_nbytes for world in between for comm in world.comms)
    assert left_the_node == world_size * flat.sent() * (num_nodes - 1) // (world_size - 1)
    assert gatherings[0].between_nodes(nodes.sent()) == left_the_node // world_size


def test_a_weight_that_was_not_a_number_for_one_step_does_not_stay() -> None:
    """And an infinite one, such as in a mask, leaves the block around it alone."""
    shards = Shards(WeightDelta(bits=4), 3)
    shards.values["net.weight"][5, 7] = -torch.inf
    for step in range(8):
        gathered = shards.gather()
        shards.end_step()
        if step == 2:
            assert gathered["net.weight"].isnan().any()
        shards.step_(step, size=0.0 if step > 2 else 0.01)
        if step == 1:
            shards.values["net.weight"][20, 20] = torch.nan
        if step == 2:
            shards.values["net.weight"][20, 20] = 0.5
    weight, expected = gathered["net.weight"], shards.values["net.weight"]
    assert weight[5, 7] == -torch.inf
    weight[5, 7] = expected[5, 7] = 0.0
    torch.testing.assert_close(weight, expected, rtol=0, atol=2e-3)
