"""The table of 24-bit weights and 8-bit moments on the page, from the stored runs."""

import pathlib

import pytest

from examples.track0 import low_memory

PAGE = pathlib.Path(__file__).parents[3] / "docs" / "memory.md"


def test_the_table_on_the_page(capsys):
    low_memory.main()
    assert f"\n{capsys.readouterr().out}\n" in PAGE.read_text()


@pytest.mark.extended
def test_the_programs_differ_in_their_states():
    """Bytes of the state of each variant, with one array of all for AdamW and Muon."""
    sizes = {
        variant: low_memory.program("code", *chosen).bytes_of_state
        for variant, chosen in low_memory.VARIANTS.items()
    }
    assert len(set(sizes.values())) == len(sizes)
    assert sizes["24-bit weights"] < sizes["32-bit weights"]
    assert sizes["all of 8 bits"] == min(sizes.values())
