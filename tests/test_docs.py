"""The Python blocks of README.md and the site run."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
PAGES = [
    page
    for page in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
    if BLOCK.search(page.read_text())
]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_python_blocks_run(page, tmp_path, monkeypatch):
    """In order and with shared names, as a reader would type them."""
    monkeypatch.chdir(tmp_path)
    text = page.read_text()
    namespace = {"__name__": "__main__"}
    for block in BLOCK.finditer(text):
        above = text.count("\n", 0, block.start(1))
        # Padded, so that a traceback shows the lines of the page.
        exec(compile("\n" * above + block[1], page, "exec"), namespace)
