"""docs/architecture.md: imports, numbers of lines, recipes; tables of contents."""

import ast
import re
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from orscale_jax import (
    diagnostics,
    family,
    orscale,
    orthogonalize,
    scale_by_calibrated_trust_ratio,
)
from orscale_jax.newton_schulz.platforms import PLATFORMS
from orscale_jax.transforms import trust_ratio

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "orscale_jax"
PAGE = (ROOT / "docs" / "architecture.md").read_text()

FIVE = "the five folders above"


def allowed():
    """The page's table: each folder or module, and what it may import."""
    rows = re.findall(r"^\| (`[\w/.]+`) \| .* \| (.*) \|$", PAGE, re.MULTILINE)
    return {
        re.match(r"`(\w+)(/|\.py)`$", name)[1]: set(re.findall(r"`(\w+)`", may))
        | (set(BELOW_STAGES) if FIVE in may else set())
        for name, may in rows
    }


SHARED = {"validate"}  # Which every file may import.
BELOW_STAGES = ("trees", "sharding", "newton_schulz", "distributed", "parameters")
ALLOWED = allowed()


def imports(path):
    """The modules that a file imports, as lists of names."""
    for node in ast.walk(ast.parse(path.read_text())):
        names = []
        if isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        yield from (name.split(".") for name in names)


@pytest.mark.parametrize("part", ALLOWED)
def test_imports_go_one_way(part):
    files = sorted((PACKAGE / part).rglob("*.py")) or [PACKAGE / f"{part}.py"]
    for path in files:
        for top, *inside in imports(path):
            if top == "orscale_jax":
                may = inside[0] in ALLOWED[part] | SHARED | {part}
                assert may, f"{path} imports orscale_jax.{inside[0]}"


def test_no_folder_grows_unnoticed():
    """To raise a number of the page's table is a decision, which the diff shows."""
    row = r"^\| `(\w+)(?:/|\.py)` \| .* \| ([\d,]+) \| .* \|$"
    rows = re.findall(row, PAGE, re.MULTILINE)
    assert [name for name, _ in rows] == [*ALLOWED]
    for name, at_most in rows:
        files = sorted((PACKAGE / name).rglob("*.py")) or [PACKAGE / f"{name}.py"]
        lines = sum(len(path.read_text().splitlines()) for path in files)
        assert lines <= int(at_most.replace(",", "")), f"{name} has {lines:,} lines"


def test_every_folder_and_module_has_its_row():
    there = {path.parent.name for path in PACKAGE.glob("*/__init__.py")}
    there |= {path.stem for path in PACKAGE.glob("*.py")} - {"__init__"}
    assert there == ALLOWED.keys()
    assert tuple(ALLOWED)[:5] == BELOW_STAGES  # "The five folders above".


def test_the_page_names_what_chooses_by_platform():
    for path in PACKAGE.rglob("*.py"):
        for node in ast.parse(path.read_text()).body:
            inside = node.body if isinstance(node, ast.ClassDef) else [node]
            for function in inside:
                if "platform_dependent(" in ast.unparse(function):
                    assert re.search(rf"`(\w+\.)?{function.name}`", PAGE), function.name


def test_the_page_names_files_that_are_there():
    folders = PACKAGE, ROOT / "tests"
    there = {path.name for folder in folders for path in folder.rglob("*.py")}
    assert set(re.findall(r"\w+\.py", PAGE)) <= there


def test_the_recipes_name_what_is_in_their_files():
    recipes = PAGE.split("\n## How to change it\n")[1].split("\n## ")[0]
    names = 0
    for files in re.findall(r"^\|.*\| (.*) \|$", recipes, re.MULTILINE)[2:]:
        for file, text in re.findall(r"`([\w/]+\.py)`: (.*?)(?=; `|$)", files):
            folder = ROOT if file.startswith("tests/") else PACKAGE
            source = (folder / file).read_text()
            for name in re.findall(r"`(\w[\w.]*)[`(]", text):
                assert name in source, f"{name} in {file}"
                names += 1
    assert names > 20


def test_the_recipe_for_another_rule_that_sets_c(monkeypatch):
    """The line of the page: W₀ moves, and r stays 1, until the last direction sets c."""
    [(name, rule)] = re.findall(r'`"(\w+)": (lambda steps: .*?)`', PAGE)
    monkeypatch.setitem(trust_ratio.ANCHORS, name, eval(rule))
    stage = scale_by_calibrated_trust_ratio(anchor=name, anchor_steps=3, eps=0.0)
    ratios, state = [], stage.init({"kernel": jnp.eye(2)})
    for step in range(1, 6):  # W grows like t and D like t², until r would be 1 / t.
        params, direction = step * jnp.eye(2), step**2 * jnp.eye(2)
        _, state = stage.update({"kernel": direction}, state, {"kernel": params})
        ratios.append(state.trust_ratio["kernel"])
    np.testing.assert_allclose(ratios, [1, 1, 1, 3 / 4, 3 / 5], rtol=1e-6)
    np.testing.assert_allclose(state.calibration["kernel"], 1 / 3, rtol=1e-6)
    np.testing.assert_allclose(state.anchor_weight_norm["kernel"], 18**0.5, rtol=1e-6)


def test_the_docs_say_what_the_table_of_platforms_says():
    cpu, gpu, tpu = (PLATFORMS[name] for name in ("cpu", "gpu", "tpu"))
    leaves = cpu.limits.stack_length

    def mib(nbytes):
        return f"{nbytes >> 20} MiB"

    stacks, chunks = (
        [mib(platform.limits[i]) for platform in (cpu, gpu, tpu)] for i in (0, 1)
    )
    page = (ROOT / "docs" / "speed.md").read_text()
    for text, sentence in [
        (
            orthogonalize.__doc__,
            f"None: {stacks[1]} on GPU; {stacks[0]} and at most {leaves} leaves on CPU; "
            f"{stacks[2]} on TPU.",
        ),
        (page, f"A stack has up to {stacks[1]} ("),
        (
            page,
            f"On TPUs the limit is {stacks[2]}, and on CPUs a stack also has at most ",
        ),
        (page, f"at most {leaves} leaves"),
        (page, f"{chunks[1]} on GPUs, {chunks[2]} on TPUs and {chunks[0]} on CPUs"),
        (
            page,
            f"in {gpu.dtype} on GPUs, in {tpu.dtype} on TPUs and in {cpu.dtype} on CPUs",
        ),
        (
            orscale.__doc__,
            f"None: {gpu.dtype} on GPU, {tpu.dtype} on TPU, {cpu.dtype} on CPU",
        ),
    ]:
        assert sentence in " ".join(text.split())


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
