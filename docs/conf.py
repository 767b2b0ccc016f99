"""Configuration of the documentation; `make docs` builds it."""

import sys
from importlib.metadata import version as installed_version
from pathlib import Path

sys.path.append(str(Path(__file__).parent / "_extensions"))

project = "orscale_jax"
author = "The orscale_jax authors"
copyright = author
version = release = installed_version("orscale-jax")

extensions = [
    "mathml",
    "narrow",
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "sphinx_copybutton",
]
exclude_patterns = ["_build"]
html_theme = "furo"
html_title = f"orscale_jax {release}"
pygments_dark_style = "github-dark"
html_static_path = ["_static"]
html_css_files = ["custom.css"]
html_use_index = False  # The page of the API is one, by module.

# Printed output is not for copying, and neither are prompts.
copybutton_selector = "div:not(.highlight-text) > div.highlight > pre"
copybutton_prompt_text = r">>> |\.\.\. |\$ "
copybutton_prompt_is_regexp = True

myst_enable_extensions = ["amsmath", "deflist", "dollarmath"]
myst_heading_anchors = 3

autodoc_member_order = "bysource"
autodoc_typehints = "none"  # The docstrings say it; spelled out, aliases fill lines.
toc_object_entries_show_parents = "hide"
maximum_signature_line_length = 88
napoleon_numpy_docstring = False

nitpick_ignore_regex = [
    # Other projects' names are not linked: that would need the network at build time.
    ("py:.*", r"(collections|flax|jax|numpy|optax|pandas|re|rich)\..*"),
]
