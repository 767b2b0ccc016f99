"""Every program in examples/ can be imported, and says what its options are.

So none of them rots that no other test and no target of the Makefile runs.
"""

import importlib.util
import os
import re
import runpy
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PROGRAMS = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts): path.read_text()
    for path in sorted((ROOT / "examples").rglob("*.py"))
    if '__name__ == "__main__"' in path.read_text()
}
WITH_OPTIONS = [n for n, x in PROGRAMS.items() if "ArgumentParser" in x or "tyro" in x]


@pytest.mark.parametrize("name", sorted(PROGRAMS.keys() - WITH_OPTIONS))
def test_it_can_be_imported(name):
    importlib.import_module(name)


@pytest.mark.parametrize("name", WITH_OPTIONS)
@pytest.mark.filterwarnings("ignore:.*found in sys.modules:RuntimeWarning")  # By runpy.
def test_it_says_what_its_options_are(name, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", [name, "--help"])
    monkeypatch.setattr(os, "environ", dict(os.environ))  # Some set XLA's flags.
    with pytest.raises(SystemExit) as end:
        runpy.run_module(name, run_name="__main__")
    assert end.value.code in (0, None)
    assert "usage:" in capsys.readouterr().out


@pytest.mark.parametrize("file", ["Makefile", ".ci/run", "CONTRIBUTING.md"])
def test_commands_name_what_is_there(file):
    text = (ROOT / file).read_text()
    for module in re.findall(r"\b((?:examples|tests)\.[a-z_.]*[a-z])\b", text):
        path = module.removesuffix(".py").replace(".", "/")
        assert (ROOT / path).exists() or (ROOT / f"{path}.py").exists(), module
    for path in re.findall(r"\b(?:examples|tests)/[\w/.]+", text):
        assert (ROOT / path.rstrip(".")).exists(), path
