"""A wheel and an sdist build, hold what they must, and work in an environment with a compiler and in one without."""

from __future__ import annotations

import site
import tarfile
import zipfile
from pathlib import Path

import pytest

from testing.processes.scripts import REPOSITORY, run_script

pytestmark = pytest.mark.slow

WITH_COMPILER = ["cc", "no-compiler"]


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("sdist")
    # Not isolated: setuptools is here, and fetching it again would test the network.
    run_script(["-m", "build", "--no-isolation", "--sdist", "--outdir", out, REPOSITORY])
    (path,) = out.glob("*.tar.gz")
    return path


@pytest.fixture(scope="module", params=WITH_COMPILER)
def wheel(request: pytest.FixtureRequest, sdist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from the sdist, not from the tree: a file missing from the sdist shows."""
    out = tmp_path_factory.mktemp(f"wheel-{request.param}")
    with tarfile.open(sdist) as archive:
        archive.extractall(out, filter="data")
    (tree,) = out.iterdir()
    env = {"CC": "/bin/false"} if request.param == "no-compiler" else None
    run_script(["-m", "build", "--no-isolation", "--wheel", "--outdir", out, tree], env=env)
    (path,) = out.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def python(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of an environment with the wheel in it and this one's packages behind it."""
    folder = tmp_path_factory.mktemp("venv")
    run_script(["-m", "venv", folder])
    python = folder / "bin" / "python"
    # Without the repository on the path, where pip would find the package already installed.
    run_script([python, "-m", "pip", "install", "-q", "--no-deps", "--no-index", wheel], env={"PYTHONPATH": None})
    (own,) = folder.glob("lib/python*/site-packages")
    (own / "dependencies.pth").write_text("\n".join(site.getsitepackages()) + "\n")
    return python


def test_sdist_holds_what_the_build_needs(sdist: Path) -> None:
    with tarfile.open(sdist) as archive:
        names = {name.split("/", 1)[1] for name in archive.getnames() if "/" in name}
    sources = {path.relative_to(REPOSITORY).as_posix() for path in REPOSITORY.glob("lowbit_strategy/**/*.[ch]")}
    modules = {path.relative_to(REPOSITORY).as_posix() for path in REPOSITORY.glob("lowbit_strategy/**/*.py")}
    assert sources
    assert not (sources | modules | {"LICENSE", "pyproject.toml", "setup.py", "lowbit_strategy/py.typed"}) - names
    assert not [name for name in names if name.endswith((".so", ".pyc"))]


def test_wheel_holds_the_package_and_nothing_else(wheel: Path, sdist: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        metadata = next(archive.read(name).decode() for name in names if name.endswith(".dist-info/METADATA"))
    with tarfile.open(sdist) as archive:
        packed = {name.split("/", 1)[1] for name in archive.getnames() if "/lowbit_strategy/" in name}
    assert not {name for name in packed if name.endswith((".py", ".typed", ".j2"))} - set(names)
    tops = {name.split("/")[0] for name in names}
    assert {top.rsplit(".", 1)[-1] for top in tops} == {"lowbit_strategy", "dist-info"}
    assert not [name for name in names if name.endswith((".c", ".h"))]
    has_extension = any(name.endswith(".so") for name in names)
    assert has_extension == ("wheel-cc" in str(wheel))
    assert "License-Expression: Apache-2.0" in metadata
    assert "Requires-Python: >=3.10" in metadata


_IMPORT = """
import importlib.metadata, pathlib, sys
import lowbit_strategy
from lowbit_strategy.kernels import native
assert pathlib.Path(lowbit_strategy.__file__).is_relative_to(sys.prefix), lowbit_strategy.__file__
(entry,) = importlib.metadata.entry_points(group="console_scripts", name="lowbit")
print(importlib.metadata.version("lowbit-strategy"), entry.value, native.available())
"""


_WITHOUT_EXTRAS = """
import sys
for name in ("pytorch_lightning", "transformers", "jinja2", "matplotlib", "jsonargparse", "sklearn", "psutil"):
    sys.modules[name] = None  # importing it raises ImportError
from lowbit_strategy.cli import main
sys.argv = ["lowbit", "doctor"]
main()
"""


def test_installed_package_works_with_and_without_the_extension(python: Path, wheel: Path, tmp_path: Path) -> None:
    done = run_script([python, "-c", _IMPORT], env={"PYTHONPATH": None}, cwd=tmp_path)
    assert done.stdout.split() == ["0.1.0", "lowbit_strategy.cli:main", str("wheel-cc" in str(wheel))]


def test_the_command_works_without_the_extras(python: Path, wheel: Path, tmp_path: Path) -> None:
    done = run_script([python, "-c", _WITHOUT_EXTRAS], env={"PYTHONPATH": None, "COLUMNS": "300"}, cwd=tmp_path)
    assert "0 problems" in done.stdout
    assert ("native C" in done.stdout) == ("wheel-cc" in str(wheel))
    assert ("the C extension is not built" in done.stdout) == ("wheel-cc" not in str(wheel))
    done = run_script([python.parent / "lowbit", "--help"], env={"PYTHONPATH": None}, cwd=tmp_path)
    assert "doctor" in done.stdout
