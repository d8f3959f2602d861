"""The file of measurements: what is read back, what is refused, which links are named."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from lowbit_strategy.advisor.bench_file import Bench, Machine, Pair, read_bench, slowest
from lowbit_strategy.advisor.cluster import Coding, Link, Rings, Work
from lowbit_strategy.version import __version__

HERE = Machine("node0", "x86_64", 8)
BENCH = Bench(
    version=__version__,
    machines=(HERE, Machine("node1", "x86_64", 8)),
    nodes=2,
    ranks_per_node=2,
    backend="gloo",
    levels={"inter-node": Link(1e-3, 1e8, ((1e5, 1e-4), (1e6, 1e-2))), "intra-node": Link(1e-5, 1e10)},
    pairs=tuple(Pair(a, b, "inter-node", 1e-3, 1e8, 2e8) for a, b in ((0, 2), (0, 3), (1, 2), (1, 3))),
    rings=Rings(Link(2e-3, 5e7, ((1e4, 1e-4),), Work(1e-4, 1e-9)), Link(1e-5, 1e9)),
    cpu_oversubscription=1.5,
    codings={"loco": Coding(1e9, 1e-4)},
    memcpy_nbytes_per_s=1e10,
)


def test_what_is_written_is_read(tmp_path: Path) -> None:
    path = tmp_path / "bench.json"
    BENCH.write(path)
    assert read_bench(path, HERE) == BENCH
    cluster = BENCH.cluster()
    assert (cluster.inter_node, cluster.intra_node) == (BENCH.levels["inter-node"], BENCH.levels["intra-node"])
    assert cluster.coding is not None
    assert cluster.coding.numel_per_s == 1e9


def test_the_slowest_link_is_slowest_at_every_size_that_all_have_measured() -> None:
    links = [Link(1e-3, 1e8, ((1e5, 1e-4), (1e6, 1e-2))), Link(2e-3, 5e8, ((1e5, 2e-4),))]
    assert slowest(links) == Link(2e-3, 1e8, ((1e5, 2e-4),))


def test_files_of_others_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "bench.json"
    with pytest.raises(ValueError, match="cannot be read"):
        read_bench(path, HERE)
    path.write_text("[1, 2")
    with pytest.raises(ValueError, match="not written by this version"):
        read_bench(path, HERE)
    replace(BENCH, version="0.0.1").write(path)
    with pytest.raises(ValueError, match=r"measured with lowbit_strategy 0\.0\.1"):
        read_bench(path, HERE)
    BENCH.write(path)
    with pytest.raises(ValueError, match=r"measured on node0 .* and this is laptop"):
        read_bench(path, Machine("laptop", "arm", 4))
    path.write_text(json.dumps({**json.loads(path.read_text()), "format": 99}))
    with pytest.raises(ValueError, match="measure again"):
        read_bench(path, HERE)
    for part in ("levels", "pairs", "rings", "cpu_oversubscription", "machines", "codings"):
        BENCH.write(path)
        path.write_text(json.dumps({**json.loads(path.read_text()), part: ["edited"]}))
        with pytest.raises(ValueError, match=f"is damaged: it.{part}"):
            read_bench(path, HERE)


@pytest.mark.parametrize(
    ("place", "value"),
    [
        ("nodes", 0),
        ("nodes", "two"),
        ("ranks_per_node", -1),
        ("memcpy_nbytes_per_s", 0),
        ("levels/inter-node/nbytes_per_s", 0.0),
        ("levels/inter-node/nbytes_per_s", -1e9),
        ("levels/inter-node/nbytes_per_s", float("nan")),
        ("levels/inter-node/latency_s", "soon"),
        ("levels/inter-node/latency_s", float("inf")),
        ("levels/inter-node/measured", [[1e5, -1.0]]),
        ("rings/between/nbytes_per_s", None),
        ("codings/loco/numel_per_s", 0),
        ("codings", {}),
        ("pairs/0/level", "between"),
        ("pairs/0/nbytes_per_s", -5),
    ],
)
def test_figures_that_no_link_can_have_are_refused_with_their_place(tmp_path: Path, place: str, value: object) -> None:
    path = tmp_path / "bench.json"
    BENCH.write(path)
    content = json.loads(path.read_text())
    *parents, name = place.split("/")
    owner = content
    for parent in parents:
        owner = owner[int(parent) if isinstance(owner, list) else parent]
    owner[name] = value
    path.write_text(json.dumps(content))
    with pytest.raises(ValueError, match=rf"is damaged: .*{name}.*measure again"):
        read_bench(path, HERE)


def test_outlier_links_are_named() -> None:
    assert BENCH.outlier_links() == []
    slow = replace(BENCH.pairs[2], nbytes_per_s=1e7)
    (sentence,) = replace(BENCH, pairs=(*BENCH.pairs[:2], slow, BENCH.pairs[3])).outlier_links()
    assert sentence.startswith("ranks 1 and 2 (inter-node) reach each other at 10 MB/s")
    far = replace(BENCH.pairs[0], latency_s=0.05)
    (sentence,) = replace(BENCH, pairs=(far, *BENCH.pairs[1:])).outlier_links()
    assert sentence.startswith("ranks 0 and 2")
