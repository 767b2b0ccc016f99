"""The page on memory says what the tables say."""

import re
from pathlib import Path

import pytest

from examples.study import low_memory
from examples.study.plan import Runs

PAGE = Path(__file__).parents[3] / "docs" / "memory.md"
TABLES = {
    "quality": low_memory.quality_table,
    "low rates": low_memory.low_rates_table,
}


@pytest.fixture(autouse=True)
def no_run_is_missing(monkeypatch):
    def refuse(self):
        raise AssertionError("A run is missing in docs/data/low_memory.")

    monkeypatch.setattr(Runs, "_trainer", property(refuse))


@pytest.mark.parametrize("name", TABLES)
def test_the_page_has_the_tables(name):
    found = re.search(rf"<!-- table: {name} -->\n((?:\|.*\n)+)", PAGE.read_text())
    assert found and found[1].strip() == TABLES[name]()


def test_no_search_has_seen_the_seeds():
    assert not {*low_memory.SEEDS} & {*low_memory.SEARCH_SEEDS}
