"""The mutants of tests/mutants.csv have not gone stale; `make mutants` runs them."""

import re

from tests import mutants


def stale(mutant):
    """What is wrong with a mutant, or None."""
    try:
        mutants.the_place(mutants.ROOT, mutant)
        located = [mutants.located(a) for a in mutant.tests.split()]
    except LookupError as error:
        return str(error)
    files = [path.partition("::")[0] for path in located if path.endswith(".py")]
    text = "".join((mutants.ROOT / file).read_text() for file in files)
    chosen = re.findall(r"(?:-k |::)(\w+)", mutant.tests)
    unknown = [name for name in chosen if files and name not in text]
    return f"{unknown} is no test in {files}" if unknown else None


def test_every_mutant_stands_once_and_names_its_tests():
    found = {number: stale(m) for number, m in enumerate(mutants.MUTANTS, 1)}
    wrong = [f"mutant {number}: {why}" for number, why in found.items() if why]
    assert not wrong, "\n".join(["mend tests/mutants.csv:", *wrong])
