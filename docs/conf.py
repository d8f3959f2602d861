"""Sphinx: the pages in this folder and the API reference from the docstrings. `make docs` builds it offline."""

from __future__ import annotations

import importlib
import re
from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx.addnodes import pending_xref
from sphinx.application import Sphinx
from sphinx.domains.python import PythonDomain
from sphinx.environment import BuildEnvironment
from sphinx.transforms import SphinxTransform
from sphinx.util import logging
from sphinx.util.nodes import make_refnode

import lowbit_strategy

FOLDER = Path(__file__).resolve().parent

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
autodoc_preserve_defaults = False  # it reads the source, which has fewer arguments than the signature
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
    "lowbit_strategy.extend",
    "lowbit_strategy.fabric",
    "lowbit_strategy.lightning",
    "lowbit_strategy.lightning_fabric",
    "lowbit_strategy.metrics",
    "lowbit_strategy.pytorch_lightning",
    "lowbit_strategy.transformers",
)


def warn_of_what_is_missing(app: Sphinx, _exception: Exception | None) -> None:
    """One warning, which `make docs` makes an error, for each public name that the reference does not have."""
    domain = app.env.get_domain("py")
    assert isinstance(domain, PythonDomain)
    public = [f"{module}.{name}" for module in PUBLIC_MODULES for name in importlib.import_module(module).__all__]
    for name in public:
        if name not in domain.objects:
            logging.getLogger(__name__).warning("%s is public but not in the reference: add it to docs/api", name)


def keep_first_sentence(_app: Sphinx, what: str, _name: str, _obj: object, _options: object, lines: list[str]) -> None:
    """Napoleon takes what stands before a colon in a property's first line for its type."""
    if what == "property" and lines:
        lines[0] = lines[0].replace(": ", " \u2013 ")


class LinkArXiv(SphinxTransform):
    """Every ``arXiv 2407.04480``, in pages and docstrings, is a link."""

    default_priority = 900
    _NUMBER = re.compile(r"arXiv\s+(\d{4}\.\d{4,5})")

    def apply(self, **kwargs: Any) -> None:
        for node in list(self.document.findall(nodes.Text)):
            inside = isinstance(node.parent, (nodes.literal, nodes.literal_block, nodes.reference))
            if inside or not self._NUMBER.search(node.astext()):
                continue
            parts: list[nodes.Node] = []
            for at, text in enumerate(self._NUMBER.split(node.astext())):
                if at % 2:
                    link = nodes.reference("", f"arXiv {text}", refuri=f"https://arxiv.org/abs/{text}")
                    parts.append(link)
                elif text:
                    parts.append(nodes.Text(text))
            node.parent.replace(node, parts)


class NarrowPictures(SphinxTransform):
    """A picture that has a version for narrow screens, ``<name>_narrow.svg`` beside it, is followed by that one.

    `_static/wide.css` shows one of the two.
    """

    default_priority = 400  # before Sphinx collects pictures

    def apply(self, **kwargs: Any) -> None:
        for node in list(self.document.findall(nodes.image)):
            narrow = f"{node['uri'].removesuffix('.svg')}_narrow.svg"
            if node["uri"].endswith(".svg") and (FOLDER / narrow).is_file():
                twin = node.deepcopy()
                twin["uri"], twin["classes"] = narrow, ["narrow"]
                node["classes"] = [*node["classes"], "broad"]
                node.parent.insert(node.parent.index(node) + 1, twin)


def resolve_by_name(app: Sphinx, env: BuildEnvironment, node: pending_xref, content: nodes.Element) -> Any:
    """Types in signatures and names in docstrings are called where they are defined: find where they are documented."""
    target = node.get("reftarget", "")
    if node.get("refdomain") != "py":
        return None
    domain = env.get_domain("py")
    assert isinstance(domain, PythonDomain)
    ending = f".{target.rpartition('.')[2]}"
    found = sorted((name for name in domain.objects if name.endswith(ending)), key=lambda name: (name.count("."), name))
    if not found or (target.count(".") and not target.startswith("lowbit_strategy.")):
        return None
    entry = domain.objects[found[0]]
    return make_refnode(app.builder, node["refdoc"], entry.docname, entry.node_id, content, found[0])


def setup(app: Sphinx) -> None:
    app.add_transform(LinkArXiv)
    app.add_transform(NarrowPictures)
    app.connect("missing-reference", resolve_by_name)
    app.connect("autodoc-process-docstring", keep_first_sentence, priority=400)  # before napoleon
    app.connect("env-check-consistency", lambda app, env: warn_of_what_is_missing(app, None))
