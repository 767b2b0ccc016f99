"""The programs of docs/ that need packages by others: the blocks that are marked py."""

import re
from pathlib import Path

BLOCK = re.compile(r"^```py\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def run_page(name, **names):
    """Run the blocks of a page in order, with these names to start from."""
    page = Path(__file__).parents[2] / "docs" / name
    for block in BLOCK.findall(page.read_text()):
        exec(compile(block, page, "exec"), names)
    return names
