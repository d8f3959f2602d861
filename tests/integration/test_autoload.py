"""Found by being installed: what ``import torch`` imports of this package, and what it never breaks."""

from __future__ import annotations

import json
import shutil
import sys
import zipfile
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import pytest

import lowbit_strategy
from lowbit_strategy import OUTER_RULES, custom_loop, exports, leaves
from lowbit_strategy.leaves import RULES
from lowbit_strategy.methods.entries import CLASSES
from testing.processes.scripts import REPOSITORY, run_script

_LOADED = "sorted(name for name in sys.modules if name.partition('.')[0] in ('lowbit_strategy', 'wrapt'))"
LIGHT = ["lowbit_strategy", "lowbit_strategy.autoload", "lowbit_strategy.version"]


def show(code: str, env: dict[str, str | None] | None = None, flags: tuple[str, ...] = ()) -> list[Any]:
    """What `code` shows, one thing after another, in an interpreter of its own; ``loaded()`` is ours and wrapt."""
    head = "import json, sys\nshown = []\nshow = shown.append\n"
    head += f"def loaded(): return {_LOADED}\n"
    command = [sys.executable, *flags, "-c", f"{head}{code}\nprint(json.dumps(shown))"]
    return list(json.loads(run_script(command, env=env).stdout.splitlines()[-1]))


def test_the_entry_point() -> None:
    (entry,) = entry_points(group="torch.backends", name="lowbit_strategy")
    assert entry.value == "lowbit_strategy.autoload:autoload"


def test_names_are_those_of_the_registries() -> None:
    assert sorted(RULES) == sorted(OUTER_RULES)


_FIRST = (
    "from lowbit_strategy.lightning import LowBitDDPStrategy as S; S('loco2', outer='diloco')",
    "from lowbit_strategy.accelerate import LowBitPlugin as P; P('loco2', outer='diloco', weights='delta4')",
    "from lowbit_strategy.attach.sync_options import SyncOptions as S; "
    "S(outer={'name': 'diloco', 'every': '30s'}, elastic={'lighthouse': 'http://127.0.0.1:1'})",
    "from lowbit_strategy import WarmUp; WarmUp(compressor='loco2')",
    "from lowbit_strategy.control import Schedule; from lowbit_strategy.custom_loop import prepare",
)
_WITHOUT_A_SECTION = """
from accelerate import Accelerator; import accelerate.commands.launch; Accelerator()
from transformers import Trainer; show([name for name in loaded() if name.startswith('lowbit')])
"""
_IN_A_FORK = """\
import os
def in_a_fork(code):
    reading, writing = os.pipe()
    if not (child := os.fork()):
        exec(code, globals())
        os.write(writing, json.dumps(shown[-1]).encode())
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0, code
    return json.loads(os.read(reading, 10_000))
"""
_IMPORTS = f"""\
{_IN_A_FORK}
import torch; show(loaded())
import torchmetrics, torch._dynamo  # most of what frameworks import, and nothing that is served
show(in_a_fork({_WITHOUT_A_SECTION!r}))
import lightning.pytorch as L; from lightning.pytorch.strategies import StrategyRegistry
assert 'loco_ddp' in StrategyRegistry and 'diloco_hsdp' in StrategyRegistry.available_strategies()
L.Trainer(strategy='ddp', accelerator='cpu', devices=1, logger=False, enable_checkpointing=False)
show([name for name in loaded() if name.startswith('lowbit')])
import accelerate, accelerate.commands.launch; show([name for name in loaded() if 'accelerate.' in name])
for code in {_FIRST!r}:  # names are known whichever module is imported first
    in_a_fork(code)
show(type(StrategyRegistry.get('loco_ddp')).__module__)
"""


def test_nothing_is_imported_before_it_is_asked_for() -> None:
    torch, without_a_section, lightning, accelerate, asked = show(_IMPORTS)
    assert torch == LIGHT
    names = ["leaves", "methods", "methods.entries", "register"]
    assert lightning == sorted([*LIGHT, *(f"lowbit_strategy.{name}" for name in names)])
    assert accelerate == []
    assert asked == "lowbit_strategy.lightning.strategies"
    launch = ["lowbit_strategy.config_file", "lowbit_strategy.config_file.accelerate_hooks"]
    light = ["lowbit_strategy.inform", "lowbit_strategy.options", "lowbit_strategy.options.conversion"]
    assert without_a_section == sorted([*LIGHT, *launch, *light])


@pytest.mark.parametrize(
    "first", [pytest.param("transformers import Trainer", marks=pytest.mark.slow), "accelerate import Accelerator"]
)
def test_a_framework_that_imports_torch_itself(first: str) -> None:
    """`autoload` is called while the module that is to be served is being imported."""
    made, spec = show(
        f"from {first} as Made\nshow(type(Made.__init__).__name__)\n"
        "show(type(sys.modules[Made.__module__].__spec__).__name__)"
    )
    assert made == "BoundFunctionWrapper"
    assert spec == "ModuleSpec"


_OFF = f"""\
{_IN_A_FORK}
sys.modules["torchmetrics"] = None  # seconds of imports, and lightning_fabric does without
import torch; show(loaded())
show(in_a_fork(
    "import lowbit_strategy; from accelerate import Accelerator as Made; show(type(Made.__init__).__name__)"
))
from lightning_fabric.strategies import STRATEGY_REGISTRY as names; show("loco_ddp" in names)
import lowbit_strategy; show("loco_ddp" in names)
"""


def test_switched_off() -> None:
    assert show(_OFF, {"LOWBIT_AUTOLOAD": "0"}) == [[], "BoundFunctionWrapper", False, True]


@pytest.mark.slow
def test_isolated() -> None:
    assert show("import torch; show(len(loaded()))", flags=("-I",)) == [len(LIGHT)]


@pytest.fixture
def broken(tmp_path: Path) -> Path:
    """An installation of its own, before the one that is here."""
    names = shutil.ignore_patterns("__pycache__", "*.c", "*.h", "*.so")
    shutil.copytree(REPOSITORY / "lowbit_strategy", tmp_path / "lowbit_strategy", ignore=names)
    info = tmp_path / "lowbit_strategy-0.2.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: lowbit-strategy\nVersion: 0.2\n")
    (info / "entry_points.txt").write_text("[torch.backends]\nlowbit_strategy = lowbit_strategy.autoload:autoload\n")
    return tmp_path


# An editable installation would find what is missing.
_WITHOUT_EDITABLE = "sys.meta_path = [each for each in sys.meta_path if 'editable' not in repr(each)]\n"
_BROKEN = f"""\
import logging
sys.path.insert(0, PATH)
{_WITHOUT_EDITABLE}\
import torch, lowbit_strategy; show(lowbit_strategy.__file__)
messages = []
class Handler(logging.Handler):
    def emit(self, record): messages.append(record.getMessage())
logging.getLogger("lowbit_strategy").addHandler(Handler())
import lightning.pytorch as L; show(list(messages))
for name in ("ddp", "ddp"):
    L.Trainer(strategy=name, accelerator="cpu", devices=1, logger=False, enable_checkpointing=False)
show(messages)
import accelerate.commands.launch; accelerate.Accelerator()
"""


@pytest.mark.slow
def test_half_removed(broken: Path) -> None:
    for name in ("register.py", "options", "run.py", "methods"):
        path = broken / "lowbit_strategy" / name
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    where, before, after = show(f"PATH = {str(broken)!r}\n{_BROKEN}")
    assert where == str(broken / "lowbit_strategy" / "__init__.py")
    for messages in (before, after):  # at the import of Lightning, and not again when strategies are chosen
        assert [message for message in messages if "lightning.pytorch.strategies" in message] == [
            "lowbit_strategy cannot support lightning.pytorch.strategies: "
            "ModuleNotFoundError(\"No module named 'lowbit_strategy.register'\")"
        ]


_GONE = """\
class Gone:
    @staticmethod
    def find_spec(name, *_):
        if name.partition(".")[0] == "lowbit_strategy":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Gone)
try:
    import torch; show("imported")
except RuntimeError as error:
    show(str(error))
"""


def test_the_folder_was_deleted_by_hand() -> None:
    """It is torch that refuses, before any line of this package could run; its message is in the quickstart."""
    (message,) = show(_GONE)
    assert "Failed to load the backend extension: lowbit_strategy" in message
    assert "TORCH_DEVICE_BACKEND_AUTOLOAD=0" in message
    assert "Failed to load the backend extension" in (REPOSITORY / "docs" / "quickstart.md").read_text()


@pytest.mark.slow
def test_zipped(broken: Path) -> None:
    with zipfile.ZipFile(broken / "all.zip", "w") as archive:
        for path in broken.rglob("*"):
            if path.suffix != ".zip":
                archive.write(path, path.relative_to(broken))
    where, strategy = show(
        f"sys.path.insert(0, {str(broken / 'all.zip')!r})\n{_WITHOUT_EDITABLE}"
        "import torch, lowbit_strategy; show(lowbit_strategy.__file__)\n"
        "from lightning_fabric.strategies import STRATEGY_REGISTRY as names\n"
        "show(type(names.get('loco_ddp')).__name__)"
    )
    assert "all.zip" in where
    assert strategy == "LowBitDDPStrategy"


def test_every_name_is_offered_and_a_mistyped_one_has_a_hint() -> None:
    assert {"LoCo", "OUTER_RULES", "__version__", "from_options"} <= set(lowbit_strategy.__all__)
    entries = leaves.NAMES | CLASSES
    for name in lowbit_strategy.__all__:
        assert getattr(lowbit_strategy, name) is (
            leaves.load(entries[name], name) if name in entries else getattr(exports, name)
        )
    assert set(lowbit_strategy.__all__) <= set(dir(lowbit_strategy))
    with pytest.raises(ImportError, match="lowbit_strategy has no 'Loco'; did you mean 'LoCo'"):
        from lowbit_strategy import Loco  # type: ignore[attr-defined]  # noqa: F401
    with pytest.raises(AttributeError, match="did you mean 'LowBitPlugin'"):
        _ = lowbit_strategy.LowbitPlugIn  # type: ignore[attr-defined]
    with pytest.raises(ImportError, match=r"SyncOptions is in lowbit_strategy\.custom_loop"):
        from lowbit_strategy import SyncOptions  # type: ignore[attr-defined]  # noqa: F401
    from lowbit_strategy import compress

    assert compress is custom_loop.compress
    from lowbit_strategy import codecs  # a module, whatever it is like

    assert codecs.__name__ == "lowbit_strategy.codecs"
