"""The direction of imports that CONTRIBUTING.md draws; tables of contents."""

import ast
import re
from pathlib import Path

import pytest

from orscale_jax import diagnostics, family

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "orscale_jax"

# Each folder, and the folders of the package that it imports.
BELOW_STAGES = {"distributed", "newton_schulz", "parameters", "sharding", "trees"}
FOLDERS = {
    "trees": set(),
    "newton_schulz": {"sharding"},
    "sharding": {"trees"},
    "distributed": {"newton_schulz", "sharding"},
    "parameters": {"sharding", "trees"},
    "transforms": BELOW_STAGES,
    "family": BELOW_STAGES | {"transforms", "arguments", "optimizers"},
    "audit": BELOW_STAGES | {"transforms", "family", "optimizers"},
    "diagnostics": BELOW_STAGES | {"transforms", "family"},
    "flax": {"parameters", "trees"},
}
SHARED = {"validate"}  # Modules of the package itself that every folder may import.


def imports(path):
    """The modules that a file imports, as lists of names."""
    for node in ast.walk(ast.parse(path.read_text())):
        names = []
        if isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        yield from (name.split(".") for name in names)


def imported_by(folder):
    """The folders and modules of the package that the files of a folder import."""
    for path in sorted((PACKAGE / folder).rglob("*.py")):
        for top, *inside in imports(path):
            if top == "orscale_jax" and inside[0] != folder:
                yield path.name, inside[0]


@pytest.mark.parametrize("folder", FOLDERS)
def test_imports_go_one_way(folder):
    for file, imported in imported_by(folder):
        allowed = imported in FOLDERS[folder] | SHARED
        assert allowed, f"{folder}/{file} imports orscale_jax.{imported}"


def test_every_folder_has_a_place():
    folders = {path.parent.name for path in PACKAGE.glob("*/__init__.py")}
    assert folders == set(FOLDERS)
    page = (ROOT / "CONTRIBUTING.md").read_text()
    for folder in folders:
        assert f"`{folder}/`" in page, folder


def test_the_page_names_files_that_are_there():
    page = (ROOT / "CONTRIBUTING.md").read_text()
    section = page.split("\n## Architecture\n")[1].split("\n## ")[0]
    there = {path.name for path in PACKAGE.rglob("*.py")} | {"test_architecture.py"}
    assert set(re.findall(r"\w+\.py", section)) <= there


WITHOUT_JAX = {
    ("distributed", "plan"),
    ("distributed", "costs"),
    ("distributed", "mesh"),
    ("newton_schulz", "hardware"),
    ("newton_schulz", "restarts"),
}


@pytest.mark.parametrize("name", sorted(WITHOUT_JAX))
def test_the_planner_does_without_jax(name):
    modules = list(imports(PACKAGE.joinpath(*name).with_suffix(".py")))
    assert all(top not in {"jax", "jaxlib", "optax"} for top, *_ in modules)
    inside = {tuple(inside[:2]) for top, *inside in modules if top == "orscale_jax"}
    assert inside <= WITHOUT_JAX


ROW = re.compile(r"^([\w/]+(?:, [\w/]+)*)  +\S")  # The names, and what they are for.


def table_of_contents(package):
    """The names in the table of a package's docstring; None without a table."""
    docstring = ast.get_docstring(ast.parse((package / "__init__.py").read_text()))
    _, rule, table = (docstring or "").partition("\n==")
    if not rule:
        return None
    rows = filter(None, map(ROW.match, table.partition("\n==")[0].splitlines()))
    return [name.rstrip("/") for row in rows for name in row[1].split(", ")]


TABLES = {
    str(path.parent.relative_to(ROOT)): table_of_contents(path.parent)
    for part in ("orscale_jax", "examples")
    for path in sorted((ROOT / part).rglob("__init__.py"))
}
OF_FUNCTIONS = {
    module: TABLES.pop(module.__name__.replace(".", "/"))
    for module in (diagnostics, family)
}


@pytest.mark.parametrize("folder", [folder for folder, table in TABLES.items() if table])
def test_tables_of_contents_list_every_file(folder):
    names = TABLES[folder]
    assert len(names) == len(set(names))
    there = {path.stem for path in (ROOT / folder).glob("*.py")}
    there |= {path.parent.name for path in (ROOT / folder).glob("*/__init__.py")}
    missing = there - {"__init__", "__main__"} - set(names)
    assert not missing, f"{folder}/__init__.py does not list {sorted(missing)}"
    gone = set(names) - there
    assert not gone, f"{folder}/__init__.py lists what is not there: {sorted(gone)}"


@pytest.mark.parametrize("module", OF_FUNCTIONS, ids=lambda module: module.__name__)
def test_the_tables_of_public_modules_list_functions(module):
    assert OF_FUNCTIONS[module]
    assert all(callable(getattr(module, name)) for name in OF_FUNCTIONS[module])
