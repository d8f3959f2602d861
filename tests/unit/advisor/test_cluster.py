"""The file of measurements: what is read back, what is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from lowbit_strategy.advisor.cluster import Bench, Cluster, Coding, Link, read_bench, slowest, slowest_cluster
from lowbit_strategy.version import __version__

BENCH = Bench(
    version=__version__,
    nodes=2,
    ranks_per_node=2,
    cluster=Cluster(
        inter_node=Link(1e-3, 1e8, ((1e5, 1e-4), (1e6, 1e-2)), ring=Link(2e-3, 5e7, ((1e4, 1e-4),))),
        intra_node=Link(1e-5, 1e10),
        gloo=True,
        codings={"loco": Coding(1e9, 1e-4)},
    ),
)


def test_what_is_written_is_read(tmp_path: Path) -> None:
    path = tmp_path / "bench.json"
    BENCH.write(path)
    assert read_bench(path) == BENCH


def test_of_all_ranks_the_slowest_counts() -> None:
    one, other = BENCH.cluster, replace(BENCH.cluster, codings={"loco": Coding(5e8, 1e-5)}).scaled(link=0.5)
    found = slowest_cluster([one, other])
    assert found.codings == {"loco": Coding(5e8, 1e-4)}
    assert found.inter_node == other.inter_node
    assert found.inter_node.ring == Link(2e-3, 2.5e7, ((1e4, 2e-4),))


def test_the_slowest_link_is_slowest_at_every_size_that_all_have_measured() -> None:
    links = [Link(1e-3, 1e8, ((1e5, 1e-4), (1e6, 1e-2))), Link(2e-3, 5e8, ((1e5, 2e-4),))]
    assert slowest(links) == Link(2e-3, 1e8, ((1e5, 2e-4),))


def test_files_of_others_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "bench.json"
    with pytest.raises(ValueError, match="cannot be read"):
        read_bench(path)
    path.write_text("[1, 2")
    with pytest.raises(ValueError, match="not written by this version"):
        read_bench(path)
    replace(BENCH, version="0.0.1").write(path)
    with pytest.raises(ValueError, match=r"measured with lowbit_strategy 0\.0\.1"):
        read_bench(path)
    BENCH.write(path)
    path.write_text(json.dumps({**json.loads(path.read_text()), "format": 99}))
    with pytest.raises(ValueError, match="measure again"):
        read_bench(path)
    for part in ("nodes", "ranks_per_node", "cluster"):
        BENCH.write(path)
        path.write_text(json.dumps({**json.loads(path.read_text()), part: ["edited"]}))
        with pytest.raises(ValueError, match=f"is damaged: it.{part}"):
            read_bench(path)


@pytest.mark.parametrize(
    ("place", "value"),
    [
        ("nodes", 0),
        ("nodes", "two"),
        ("ranks_per_node", -1),
        ("cluster/inter_node/nbytes_per_s", 0.0),
        ("cluster/inter_node/nbytes_per_s", -1e9),
        ("cluster/inter_node/nbytes_per_s", float("nan")),
        ("cluster/inter_node/latency_s", "soon"),
        ("cluster/inter_node/latency_s", float("inf")),
        ("cluster/inter_node/measured", [[1e5, -1.0]]),
        ("cluster/inter_node/ring/nbytes_per_s", None),
        ("cluster/codings/loco/numel_per_s", 0),
        ("cluster/codings", {}),
    ],
)
def test_figures_that_no_link_can_have_are_refused_with_their_place(tmp_path: Path, place: str, value: object) -> None:
    path = tmp_path / "bench.json"
    BENCH.write(path)
    content = json.loads(path.read_text())
    *parents, name = place.split("/")
    owner = content
    for parent in parents:
        owner = owner[parent]
    owner[name] = value
    path.write_text(json.dumps(content))
    with pytest.raises(ValueError, match=rf"is damaged: .*{name}.*measure again"):
        read_bench(path)
