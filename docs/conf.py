"""Configuration of the documentation; `make docs` builds it."""

from importlib.metadata import version as installed_version

project = "orscale_jax"
author = "The orscale_jax authors"
copyright = author
version = release = installed_version("orscale-jax")

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.mathjax",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
]
exclude_patterns = ["_build"]
html_theme = "furo"
html_title = f"orscale_jax {release}"

myst_enable_extensions = ["amsmath", "deflist", "dollarmath"]
myst_heading_anchors = 3

autodoc_member_order = "bysource"
autodoc_typehints = "none"  # The docstrings say it; spelled out, aliases fill lines.
maximum_signature_line_length = 88
napoleon_numpy_docstring = False

nitpick_ignore_regex = [
    # Other projects' names are not linked: that would need the network at build time.
    ("py:.*", r"(collections|flax|jax|numpy|optax|pandas|re|rich)\..*"),
]
