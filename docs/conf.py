"""Sphinx: the pages in this folder and the API reference from the docstrings. `make docs` builds it offline."""

from __future__ import annotations

import importlib

from sphinx.application import Sphinx
from sphinx.domains.python import PythonDomain
from sphinx.util import logging

import lowbit_strategy

project = "lowbit_strategy"
author = "The lowbit_strategy authors"
copyright = "The lowbit_strategy authors, Apache-2.0"
version = release = lowbit_strategy.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_copybutton"]
exclude_patterns: list[str] = []
root_doc = "index"
highlight_language = "text"  # a block without a language holds commands or what they print
default_role = "py:obj"  # `Name` in a docstring links to the name where it is documented

suppress_warnings = ["ref.python"]  # a class that several namespaces have, such as `CompressionMonitor`

myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 4

autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
autodoc_member_order = "bysource"
python_use_unqualified_type_names = True
python_maximum_signature_line_length = 88
napoleon_use_rtype = False

html_theme = "furo"
pygments_style, pygments_dark_style = "friendly", "monokai"
html_title = "lowbit_strategy"
html_static_path = ["_static"]
html_css_files = ["wide.css"]
html_show_sphinx = False
html_copy_source = False
copybutton_exclude = ".linenos, .gp, .go"

# Modules whose `__all__` is what users import: every name in it must be in the reference.
PUBLIC_MODULES = (
    "lowbit_strategy",
    "lowbit_strategy.accelerate",
    "lowbit_strategy.control",
    "lowbit_strategy.custom_loop",
    "lowbit_strategy.fabric",
    "lowbit_strategy.lightning",
    "lowbit_strategy.lightning_fabric",
    "lowbit_strategy.metrics",
    "lowbit_strategy.pytorch_lightning",
    "lowbit_strategy.transformers",
)
# Without an `__all__`: what contributors build on, and the part for custom loops.
PUBLIC_NAMES = (
    "lowbit_strategy.codecs.base.Codec",
    "lowbit_strategy.collectives.stateful_codec.StatefulCodec",
    "lowbit_strategy.methods._base.method.Method",
    "lowbit_strategy.methods._base.reducer.Reducer",
)


def warn_of_what_is_missing(app: Sphinx, _exception: Exception | None) -> None:
    """One warning, which `make docs` makes an error, for each public name that the reference does not have."""
    domain = app.env.get_domain("py")
    assert isinstance(domain, PythonDomain)
    public = [f"{module}.{name}" for module in PUBLIC_MODULES for name in importlib.import_module(module).__all__]
    for name in [*public, *PUBLIC_NAMES]:
        if name not in domain.objects:
            logging.getLogger(__name__).warning("%s is public but not in the reference: add it to docs/api", name)


def keep_first_sentence(_app: Sphinx, what: str, _name: str, _obj: object, _options: object, lines: list[str]) -> None:
    """Napoleon takes what stands before a colon in a property's first line for its type."""
    if what == "property" and lines:
        lines[0] = lines[0].replace(": ", " \u2013 ")


def setup(app: Sphinx) -> None:
    app.connect("autodoc-process-docstring", keep_first_sentence, priority=400)  # before napoleon
    app.connect("env-check-consistency", lambda app, env: warn_of_what_is_missing(app, None))
