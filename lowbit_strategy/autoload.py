"""Installing the package is enough: ``import torch`` ends by calling `autoload`, an entry point of ``torch.backends``.

1. wait for the first import of a framework module that we support; until then nothing is imported
2. once that module has been imported, call our function for it

``import lowbit_strategy`` does the same if torch has not.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

SWITCH = "LOWBIT_AUTOLOAD"  # "0": off
SECTION = "lowbit_config"  # in Accelerate's configuration files
VARIABLE = "LOWBIT_CONFIG"  # the section as JSON, or the path of a file that holds it

_STRATEGIES = "lowbit_strategy.register:register_names"
_ACCELERATE = "lowbit_strategy.config_file.accelerate_hooks"
_SERVED = {  # a framework's module: our function that is called with it
    "lightning.pytorch.strategies": _STRATEGIES,
    "pytorch_lightning.strategies": _STRATEGIES,
    "lightning.fabric.strategies": _STRATEGIES,
    "lightning_fabric.strategies": _STRATEGIES,
    "accelerate.accelerator": f"{_ACCELERATE}:serve_accelerators",
    "transformers.trainer": f"{_ACCELERATE}:serve_trainers",
    "accelerate.commands.config.config_args": f"{_ACCELERATE}:serve_files",
    "accelerate.utils.launch": f"{_ACCELERATE}:serve_launchers",
}
_WATCHED = ("torch.optim.optimizer", f"{_ACCELERATE}:watch_for_section")  # if a section is in the environment

_log = logging.getLogger("lowbit_strategy")
_before_torch = "torch" not in sys.modules  # a script has imported this package


def autoload() -> None:
    """Called by ``import torch``, which it must never break.

    With `SWITCH` off it does nothing; a script that imports the package still gets everything.
    """
    if os.environ.get(SWITCH) != "0":
        serve()
    elif not _before_torch and _Waiting in sys.meta_path:
        sys.meta_path.remove(_Waiting)
        package = __name__.partition(".")[0]
        for name in [each for each in sys.modules if each.partition(".")[0] == package]:
            del sys.modules[name]


def serve() -> None:
    """Support frameworks that are already imported, and the others as soon as they are. Further calls do nothing."""
    if os.environ.get(VARIABLE) and _WATCHED[0] in sys.modules:
        _call(_WATCHED[1], sys.modules[_WATCHED[0]])
    if _Waiting.done:
        return
    if any(name in sys.modules for name in _SERVED):
        _Waiting.leave_to_wrapt()
    elif _Waiting not in sys.meta_path:
        sys.meta_path.insert(0, _Waiting)


class _Waiting:
    """Stands in for wrapt's import hooks until one is needed: importing wrapt would slow ``import torch`` too much."""

    done = False

    @classmethod
    def find_spec(cls, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name not in _SERVED or cls.done:
            return None
        cls.leave_to_wrapt()
        return importlib.util.find_spec(name)

    @classmethod
    def leave_to_wrapt(cls) -> None:
        cls.done = True
        if cls in sys.meta_path:
            sys.meta_path.remove(cls)
        try:
            from wrapt import register_post_import_hook

            for name in _SERVED:
                if _is_being_imported(sys.modules.get(name)):
                    _serve_when_done(name)
                else:
                    register_post_import_hook(_serve, name)
        except Exception as error:
            _log.warning("lowbit_strategy supports no framework in this process: %r", error)


def _is_being_imported(module: ModuleType | None) -> bool:
    """Whether a module is still executing: it may be the one that imports torch. The mark is importlib's."""
    return bool(getattr(getattr(module, "__spec__", None), "_initializing", False))


def _serve_when_done(name: str) -> None:
    """Wait until importlib removes its mark from the executed module. The package does not help: transformers replaces
    its own package during import.
    """
    spec: Any = sys.modules[name].__spec__
    kind = type(spec)

    class Spec(kind):  # type: ignore[misc, valid-type]
        def __setattr__(self, attribute: str, value: Any) -> None:
            super().__setattr__(attribute, value)
            if attribute == "_initializing" and not value:
                self.__class__ = kind
                if name in sys.modules:  # it has not failed
                    _serve(sys.modules[name])

    spec.__class__ = Spec


def _serve(module: ModuleType) -> None:
    _call(_SERVED[module.__name__], module)


def _call(function: str, module: ModuleType) -> None:
    """Call `function`; an error in it must not break the user's import."""
    try:
        where, _, name = function.partition(":")
        getattr(importlib.import_module(where), name)(module)
    except Exception as error:
        _log.warning("lowbit_strategy cannot support %s: %r", module.__name__, error)
