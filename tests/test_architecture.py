"""docs/architecture.md: the direction of imports, and its recipes; tables of contents."""

import ast
import dataclasses
import inspect
import re
import sys
import types
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from orscale_jax import diagnostics, family, orthogonalize, polar_factor
from orscale_jax.newton_schulz.platforms import PLATFORMS
from orscale_jax.transforms import trust_ratio

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "orscale_jax"
PAGE = (ROOT / "docs" / "architecture.md").read_text()

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
    for folder in folders:
        assert f"`{folder}/`" in PAGE, folder


def test_the_page_names_files_that_are_there():
    there = {path.name for path in PACKAGE.rglob("*.py")} | {"test_architecture.py"}
    assert set(re.findall(r"\w+\.py", PAGE)) <= there


def test_the_recipes_name_what_is_in_their_files():
    recipes = PAGE.split("\n## How to change it\n")[1].split("\n## ")[0]
    names = 0
    for files in re.findall(r"^\|.*\| (.*) \|$", recipes, re.MULTILINE)[2:]:
        for file, text in re.findall(r"`([\w/]+\.py)`: (.*?)(?=; `|$)", files):
            source = (PACKAGE / file).read_text()
            for name in re.findall(r"`(\w[\w.]*)[`(]", text):
                assert name == "report.html" or name in source, f"{name} in {file}"
                names += 1
    assert names > 20


@pytest.mark.parametrize("public", ["polar_factor", "orthogonalize"])
def test_the_recipe_for_a_dtype_on_a_platform(public, monkeypatch):
    """The platform's row alone decides, whichever function the user calls."""

    def program(x):
        if public == "polar_factor":
            return polar_factor(x)
        stage = orthogonalize()
        return stage.update({"kernel": x}, stage.init({"kernel": x}))[0]

    def lowered(columns):  # Another shape, since JAX keeps what it has traced.
        traced = jax.jit(program).trace(jnp.ones((8, columns)))
        return traced.lower(lowering_platforms=("tpu",)).as_text()

    assert "bf16" in lowered(16)
    row = dataclasses.replace(PLATFORMS["tpu"], dtype=np.dtype(np.float32))
    monkeypatch.setitem(PLATFORMS, "tpu", row)
    assert "bf16" not in lowered(24)


def test_the_recipe_for_another_rule_that_sets_c(monkeypatch):
    source = inspect.getsource(trust_ratio)
    for now, changed in [
        (
            r'LARGEST = \("first", "largest"\)',
            'LARGEST, _ = ("first", "largest", "mean")',
        ),
        ("if self.anchor == LARGEST else 1", "if self.anchor != FIRST else 1"),
        (r"jnp\.minimum\((\w+), (\w+)\)", r"(\1 * count + \2) / (count + 1)"),
        (
            r"_calibrated\(ratio\.calibrate, ",
            "_calibrated(ratio.calibrate, ratio.anchor, ",
        ),
        (r"static_argnums=0\)", "static_argnums=(0, 1))"),
        (
            r"(?<=def _calibrated\(\n)    calibrate: bool,",
            "    calibrate: bool, anchor: str,",
        ),
    ]:
        source, count = re.subn(now, changed, source)
        assert count == 1, now
    copy = types.ModuleType("with_a_mean")
    monkeypatch.setitem(sys.modules, copy.__name__, copy)  # Dataclasses look there.
    exec(compile(source, trust_ratio.__file__, "exec"), vars(copy))
    stage = copy.scale_by_calibrated_trust_ratio(anchor="mean", anchor_steps=3, eps=0.0)
    params, state = {"kernel": jnp.eye(2)}, stage.init({"kernel": jnp.eye(2)})
    for norm in (1.0, 2.0, 4.0, 8.0):
        _, state = stage.update({"kernel": norm * jnp.eye(2)}, state, params)
    np.testing.assert_allclose(state.calibration["kernel"], (1 + 1 / 2 + 1 / 4) / 3)


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
