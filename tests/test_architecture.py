"""The direction of imports that docs/architecture.md draws."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "orscale_jax"

# Each folder, and the folders of the package that it imports.
FOLDERS = {
    "trees": set(),
    "newton_schulz": set(),
    "distributed": {"newton_schulz", "trees"},
    "parameters": {"distributed", "trees"},
    "transforms": {"distributed", "newton_schulz", "parameters", "trees"},
    "audit": {"distributed", "newton_schulz", "parameters", "transforms", "trees"},
    "diagnostics": {"distributed", "newton_schulz", "parameters", "transforms", "trees"},
    "flax": {"parameters", "trees"},
}
# Modules of the package itself that every folder may import, and one exception.
SHARED = {"_checks"}
EXCEPTIONS = {("audit", "_algorithm")}  # The names of the optimizer's groups.


def imports(path):
    """The modules of the package that a file imports, as tuples of names."""
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
        allowed = imported in FOLDERS[folder] | SHARED or (folder, imported) in EXCEPTIONS
        assert allowed, f"{folder}/{file} imports orscale_jax.{imported}"


def test_every_folder_has_a_place():
    folders = {path.parent.name for path in PACKAGE.glob("*/__init__.py")}
    assert folders == set(FOLDERS)
    page = (ROOT / "docs" / "architecture.md").read_text()
    for folder in folders:
        assert f"`{folder}/`" in page, folder


@pytest.mark.parametrize(
    "name", ["distributed/buckets", "distributed/planner", "newton_schulz/restarts"]
)
def test_the_planner_does_without_jax(name):
    modules = list(imports(PACKAGE / f"{name}.py"))
    assert all(top not in {"jax", "jaxlib", "optax"} for top, *_ in modules)
    inside = {tuple(inside[:2]) for top, *inside in modules if top == "orscale_jax"}
    assert inside <= {("distributed", "buckets"), ("newton_schulz", "restarts")}
