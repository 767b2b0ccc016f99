"""The Python blocks of README.md and the site run, and print what the pages show."""

import ast
import contextlib
import inspect
import io
import pkgutil
import pydoc
import re
from pathlib import Path

import optax
import pytest

from orscale_jax import muon

ROOT = Path(__file__).parents[1]
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
FRACTION = re.compile(r"(\d+\.\d+(?:e[+-]\d+)?)")
FENCED = re.compile(r"^```(python|text)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
# test_recipes.py runs the blocks of a page.
PAGES = [
    page
    for page in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    if BLOCK.search(page.read_text()) and page.stem != "recipes"
]
QUICK_PAGES = {"README.md", "index.md", "quickstart.md"}


@pytest.mark.quick_first_case
@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, marks=() if page.name in QUICK_PAGES else pytest.mark.extended)
        for page in PAGES
    ],
    ids=lambda page: page.name,
)
def test_python_blocks_run(page, tmp_path, monkeypatch):
    """In order and with shared names; a text block is what the block above it prints."""
    monkeypatch.chdir(tmp_path)
    text = page.read_text().replace("range(100)", "range(2)")  # Not so many steps.
    namespace, printed = {"__name__": "__main__"}, None
    for block in FENCED.finditer(text):
        if block[1] == "text":
            assert printed is None or same_but_for_rounding(block[2], printed), printed
            printed = None
            continue
        above = text.count("\n", 0, block.start(2))
        with contextlib.redirect_stdout(io.StringIO()) as output:
            # Padded, so that a traceback shows the lines of the page.
            exec(compile("\n" * above + block[2], page, "exec"), namespace)
        printed = output.getvalue()


def test_the_excerpt_of_readme():
    """Rows of the table that the block above it prints, without some columns."""
    block, excerpt = re.search(
        r"^```python\n(.*?)^```\n+```\n(.*?)^```",
        (ROOT / "README.md").read_text(),
        re.MULTILINE | re.DOTALL,
    ).groups()
    with contextlib.redirect_stdout(io.StringIO()) as output:
        exec(block, {})
    printed = [re.split(r"  +", line) for line in output.getvalue().splitlines()]
    rows = [re.split(r"  +", line) for line in excerpt.splitlines()]
    for row in rows:
        assert any(set(row) <= set(line) for line in printed), row
    assert len(rows) == 3


def same_but_for_rounding(shown, printed):
    """The same text, with decimal fractions that may be rounded otherwise."""
    shown, printed = (FRACTION.split(text) for text in (shown, printed))
    numbers = [float(x) for x in shown[1::2]]
    return shown[::2] == printed[::2] and numbers == pytest.approx(
        [float(x) for x in printed[1::2]], rel=0.05, abs=1e-5
    )


def test_the_site_is_read_in_a_morning():
    pages = (ROOT / "docs").rglob("[!_]*.md")
    assert sum(len(page.read_text().split()) for page in pages) <= 36_000


def test_every_program_of_the_gallery_has_a_page():
    programs, pages = (
        {path.stem for path in (ROOT / folder).glob(files)} - {"__init__"}
        for folder, files in (("examples/gallery", "*.py"), ("docs/gallery", "*.md"))
    )
    assert programs == pages
    for name in pages:
        text = (ROOT / "docs" / "gallery" / f"{name}.md").read_text()
        assert f"python -m examples.gallery.{name}\n" in text
        assert f"{{literalinclude}} ../../examples/gallery/{name}.py" in text


# Sphinx checks the links of the site.
LINK = re.compile(r"\]\((?!https?://)([^)#\s]*)(?:#([^)\s]+))?\)")
CODE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
OTHER_PAGES = ["README.md", "CONTRIBUTING.md", "CHANGELOG.md"]


def anchors(page):
    """Those that GitHub gives to the headings."""
    for heading in re.findall(r"^#+ (.+)$", CODE.sub("", page.read_text()), re.MULTILINE):
        yield re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


@pytest.mark.parametrize("name", OTHER_PAGES)
def test_links_lead_somewhere(name):
    page = ROOT / name
    for path, anchor in LINK.findall(CODE.sub("", page.read_text())):
        target = ROOT / path if path else page
        assert target.exists(), path
        assert not anchor or anchor in anchors(target), f"{path}#{anchor}"


@pytest.mark.parametrize(
    ("page", "decay", "b2"),
    [
        (
            "README.md",
            r"its\s+default\s+is\s+0\.1,\s+and\s+1e-4\s+in\s+`optax\.adamw`",
            r"`adam_b2` is 0\.95\s+instead of 0\.999",
        ),
        (
            "docs/from_adamw.md",
            r"`weight_decay`.*\| 1e-4 \|.*\*\*0\.1\*\*",
            r"0\.999.*\|.*`adam_b2\b.*0\.95",
        ),
    ],
    ids=["README.md", "from_adamw.md"],
)
def test_defaults_that_change(page, decay, b2):
    """Of the line that a reader replaces."""
    text = (ROOT / page).read_text()
    adamw, ours = (inspect.signature(make).parameters for make in (optax.adamw, muon))
    assert (adamw["weight_decay"].default, ours["weight_decay"].default) == (1e-4, 0.1)
    assert re.search(decay, text)
    assert (adamw["b2"].default, ours["adam_b2"].default) == (0.999, 0.95)
    assert re.search(b2, text)
    assert (ours["momentum"].default, ours["consistent_rms"].default) == (0.95, 0.2)


MODULES = ("", ".diagnostics", ".equinox", ".family", ".flax", ".haliax")
DIRECTIVE = re.compile(
    r"^\.\. (?:auto|py:)?(?P<kind>currentmodule|module|function|class|data):: "
    r"(?P<name>[\w.]+).*(?:\n   :members: (?P<members>.*(?:\n {6}.*)*))?",
    re.MULTILINE,
)


def public_names(module):
    """What it defines, and what it imports as itself, under names of their own."""
    path = ROOT / module.replace(".", "/")
    path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name[0] != "_":
            yield f"{module}.{node.name}"
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                if alias.asname == alias.name:
                    yield f"{module}.{alias.name}"


def names_on_pages():
    """Of the API reference."""
    pages = (ROOT / "docs" / "api").glob("*.md")
    return {name for page in pages for name in names_on(page)}


def names_on(page):
    module = None
    for directive in DIRECTIVE.finditer(page.read_text()):
        kind, name, members = directive.group("kind", "name", "members")
        if kind in ("currentmodule", "module"):
            module = name
            yield module
            yield from (
                f"{module}.{member}" for member in re.findall(r"\w+", members or "")
            )
        else:
            yield f"{module}.{name}"


@pytest.mark.parametrize("module", MODULES)
def test_the_api_has_every_public_name(module):
    public = set(public_names("orscale_jax" + module))
    assert public
    assert public <= names_on_pages()


@pytest.mark.parametrize("module", MODULES)
def test_help_describes_every_argument_beside_its_default(module):
    for path in public_names("orscale_jax" + module):
        make = pkgutil.resolve_name(
            path.replace(f"orscale_jax{module}.", f"orscale_jax{module}:")
        )
        if inspect.isfunction(make):
            text, signature = pydoc.plain(pydoc.render_doc(make)), inspect.signature(make)
            for name, parameter in signature.parameters.items():
                assert re.search(rf"(?m)^ +\*{{0,2}}{name}: \S", text), (path, name)
                assert str(parameter) in text
