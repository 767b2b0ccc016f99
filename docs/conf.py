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
    "links",
    "mathml",
    "messages",
    "narrow",
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.intersphinx",
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
html_js_files = ["sort.js"]
html_use_index = False  # The pages of the API list names by module.

# Printed output is not for copying, and neither are prompts.
copybutton_selector = "div:not(.highlight-text) > div.highlight > pre"
copybutton_prompt_text = r">>> |\.\.\. |\$ "
copybutton_prompt_is_regexp = True

myst_enable_extensions = ["amsmath", "dollarmath"]
myst_heading_anchors = 3
myst_html_meta = {
    "description": "Muon for JAX, as an Optax optimizer that you put where AdamW is now."
}

# The site builds without a network: each inventory is plain text, and has the names that
# the pages use. It was written by the project's own docs sources on 2026-11-28.
intersphinx_mapping = {
    project: (f"https://{host}/en/latest/", f"inventories/{project}.inv")
    for project, host in {
        "flax": "flax.readthedocs.io",
        "flax_linen": "flax-linen.readthedocs.io",
        "jax": "docs.jax.dev",
        "optax": "optax.readthedocs.io",
        "orbax": "orbax.readthedocs.io",
    }.items()
}

nb_execution_timeout = 600
nb_execution_raise_on_error = True
nb_execution_excludepatterns = ["[!n]*"]

autosummary_generate = False  # Its tables only.
autodoc_member_order = "bysource"
autodoc_typehints = "none"  # The docstrings say it; spelled out, aliases fill lines.
toc_object_entries_show_parents = "hide"
maximum_signature_line_length = 88
napoleon_numpy_docstring = False

nitpick_ignore_regex = [
    # These projects have no inventory here, or do not list the name.
    ("py:.*", r"(collections|numpy|pandas|re|rich)\..*"),
    ("py:class", r"optax\.(contrib\.MuonDimensionNumbers|MaskedNode)"),
]
