"""The shape of the package: no circle of files. Layers are import-linter's (`make check`)."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator
from pathlib import Path

import lowbit_strategy

ROOT = Path(lowbit_strategy.__file__).parent


def modules() -> dict[str, Path]:
    """Every file of the package by its dotted name."""
    found = {}
    for path in ROOT.rglob("*.py"):
        parts = path.relative_to(ROOT.parent).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


@functools.cache
def trees() -> dict[Path, ast.Module]:
    return {path: ast.parse(path.read_text()) for path in ROOT.rglob("*.py")}


def imports(path: Path, known: dict[str, Path]) -> Iterator[str]:
    """What a file imports of the package, inside functions as well."""
    for node in ast.walk(trees()[path]):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in known)
        elif isinstance(node, ast.ImportFrom) and node.module:
            folder = [*path.relative_to(ROOT.parent).parent.parts] if node.level == 1 else []
            module = ".".join([*folder, node.module])
            for alias in node.names:
                inner = f"{module}.{alias.name}"
                if inner in known:
                    yield inner
                elif module in known:
                    yield module


def circles(graph: dict[str, set[str]]) -> list[list[str]]:
    """Files that import each other, directly or not: what is left once files that import nothing are taken away."""
    left = {name: set(targets) for name, targets in graph.items()}
    while leaves := [name for name, targets in left.items() if not targets & left.keys()]:
        for name in leaves:
            del left[name]
    return [sorted(left)] if left else []


def test_no_circle_of_files() -> None:
    known = modules()
    graph = {name: set(imports(path, known)) - {name} for name, path in known.items()}
    assert circles(graph) == []


def test_circles_are_found() -> None:
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}}) == [["a", "b", "c", "d"]]
    assert circles({"a": {"b"}, "b": {"c"}, "c": set()}) == []


def test_nothing_sets_attributes_of_the_engine_from_outside() -> None:
    found = []
    for path, tree in trees().items():
        for node in ast.walk(tree):
            targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
            for target in (inner for each in targets if each is not None for inner in _attributes(each)):
                if _is_engine(target.value):
                    found.append(f"{path.relative_to(ROOT)}:{target.lineno} sets {target.attr}")
    assert found == []


def _attributes(target: ast.expr) -> Iterator[ast.Attribute]:
    """What is set of an object, or put into one of its attributes."""
    for each in target.elts if isinstance(target, ast.Tuple) else [target]:
        each = each.value if isinstance(each, ast.Subscript) else each
        if isinstance(each, ast.Attribute):
            yield each


def _is_engine(node: ast.expr) -> bool:
    """By the one name that everything gives an engine."""
    return (isinstance(node, ast.Name) and node.id == "sync") or (
        isinstance(node, ast.Attribute) and node.attr in ("sync", "_sync")
    )


RANDOM = ("rand", "randn", "randint", "randperm", "rand_like", "randn_like", "randint_like", "bernoulli", "multinomial")
RANDOM_IN_PLACE = (
    "random_",
    "uniform_",
    "normal_",
    "bernoulli_",
    "exponential_",
    "geometric_",
    "cauchy_",
    "log_normal_",
)
SEEDS = ("seed_everything", "set_rng_state", "fork_rng")


def shared_random_numbers(source: str) -> list[str]:
    """Calls that draw from, or seed, random numbers which the training script draws from as well."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            names = [getattr(node, "module", None) or "", *(alias.name for alias in node.names)]
            found += [f"{node.lineno}: {name}" for name in names if name.split(".")[0] in ("random", "numpy")]
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            draws = node.func.attr in RANDOM + RANDOM_IN_PLACE
            of_torch = isinstance(node.func.value, ast.Name) and node.func.value.id == "torch"
            own = any(keyword.arg == "generator" for keyword in node.keywords)
            seeds = node.func.attr in SEEDS or (node.func.attr in ("manual_seed", "seed") and of_torch)
            if seeds or (draws and not own):
                found.append(f"{node.lineno}: {node.func.attr}")
    return found


def test_the_script_draws_the_random_numbers_that_it_would_draw_without_us() -> None:
    every = {str(path): shared_random_numbers(path.read_text()) for path in modules().values()}
    assert {path: calls for path, calls in every.items() if calls} == {}


def test_shared_random_numbers_are_found() -> None:
    own = "torch.rand(3, generator=torch.Generator().manual_seed(0))"
    assert shared_random_numbers(own) == []
    for line in ("torch.randn(3)", "x.normal_()", "torch.manual_seed(0)", "import random", "from numpy import random"):
        assert shared_random_numbers(line), line


# What runs before training starts, or beside it, reaches no collective.
WITHOUT_COLLECTIVES = ("advisor", "config_file", "doctor", "kernels", "launch", "report")


def walks_over_sets(source: str) -> list[str]:
    """Loops over sets, whose order differs between processes: a collective in one of them hangs."""
    found = []
    tree = ast.parse(source)
    for scope in (tree, *(node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef))):
        inner = list(_nodes_of(scope))
        sets = {
            node.target.id
            for node in inner
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and _names_a_set(node.annotation)
        } | {
            target.id
            for node in inner
            if isinstance(node, ast.Assign) and _makes_a_set(node.value)
            for target in node.targets
            if isinstance(target, ast.Name)
        }
        for node in inner:
            iterated = [node.iter] if isinstance(node, (ast.For, ast.comprehension)) else []
            if (
                isinstance(node, ast.Call)
                and isinstance(node.func, ast.Name)
                and node.func.id in ("list", "tuple", "next")
            ):
                iterated = node.args[:1]
            for each in iterated:
                if _makes_a_set(each) or (isinstance(each, ast.Name) and each.id in sets):
                    found.append(f"{each.lineno}: {ast.unparse(each)}")
    return sorted(set(found)) + [f"{name} has no order" for name in ("WeakSet",) if name in source]


def _nodes_of(scope: ast.AST) -> Iterator[ast.AST]:
    """All nodes of a module or function, without those of functions inside."""
    for node in ast.iter_child_nodes(scope):
        if not isinstance(node, ast.FunctionDef):
            yield node
            yield from _nodes_of(node)


def _names_a_set(annotation: ast.expr) -> bool:
    return ast.unparse(annotation).startswith(("set[", "frozenset["))


def _makes_a_set(node: ast.expr) -> bool:
    if isinstance(node, (ast.Set, ast.SetComp)):
        return True
    if isinstance(node, ast.BinOp) and isinstance(node.op, (ast.Sub, ast.BitAnd, ast.BitOr, ast.BitXor)):
        return any(_makes_a_set(side) or _calls(side, ("keys",)) for side in (node.left, node.right))
    is_set = isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("set", "frozenset")
    return is_set or _calls(node, ("union", "intersection", "difference", "symmetric_difference"))


def _calls(node: ast.expr, methods: tuple[str, ...]) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in methods


def test_nothing_that_reaches_a_collective_walks_over_a_set() -> None:
    files = {str(path.relative_to(ROOT)): path.read_text() for path in modules().values()}
    walks = {path: walks_over_sets(text) for path, text in files.items() if not path.startswith(WITHOUT_COLLECTIVES)}
    assert {path: found for path, found in walks.items() if found} == {}


def test_walks_over_sets_are_found() -> None:
    assert walks_over_sets("for x in sorted({1, 2}):\n    pass\nys = [x for x in {1: 2}]") == []
    for line in (
        "for x in {1, 2}: pass",
        "xs = [x for x in set(names)]",
        "xs = list(a.keys() - b)",
        "names: set[str] = set()\nfor name in names: pass",
        "import weakref\nx = weakref.WeakSet()",
    ):
        assert walks_over_sets(line), line


def test_unit_tests_lie_where_their_sources_lie() -> None:
    unit, repository = ROOT.parent / "tests" / "unit", ROOT.parent
    folders = {path.parent.relative_to(unit) for path in unit.rglob("test_*.py")}
    assert [str(each) for each in folders if not (ROOT / each).is_dir() and not (repository / each).is_dir()] == []


def test_nothing_imports_a_test() -> None:
    """What two of them need is in ``testing/``."""
    paths = [path for room in ("tests", "testing", "benchmarks") for path in (ROOT.parent / room).rglob("*.py")]
    importing = re.compile(r"^\s*(from|import) tests\b", re.MULTILINE)
    assert [path.name for path in paths if importing.search(path.read_text())] == []
