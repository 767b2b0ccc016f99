"""Break the numeric code, one expression at a time: every mutant must be caught.

    python -m tests.mutants               # all of them
    python -m tests.mutants 3 7           # some
    python -m tests.mutants --sample 12   # as many, which follow from the commit

A mutant is a copy of the tree with one expression replaced; it is caught if the tests
named beside it in mutants.csv fail. `make mutants` runs all, `.ci/run` a sample.
"""

import argparse
import ast
import csv
import functools
import os
import pathlib
import random
import re
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

from tests.commit import commit_number

ROOT = pathlib.Path(__file__).parents[1]
# Tests read the pages, too: without them a mutant would only seem to be caught.
COPIED = ("orscale_jax", "tests", "examples", "docs", "README.md", "pyproject.toml")
AT_ONCE = 2  # Mutants, each in a process of its own.


class Mutant(NamedTuple):
    """Code in a function, what it becomes, and the tests that must notice.

    Attributes:
      function: The function or class around the code, in any module.
      code: An expression or a statement that occurs in it once, in any formatting.
      broken: The code that replaces it.
      tests: Arguments of pytest; files by the ends of their paths.
    """

    function: str
    code: str
    broken: str
    tests: str


with (ROOT / "tests" / "mutants.csv").open() as file:
    MUTANTS = [Mutant(**row) for row in csv.DictReader(file)]


@functools.lru_cache(maxsize=AT_ONCE)
def functions(tree: pathlib.Path) -> list[tuple[pathlib.Path, ast.AST]]:
    """The functions and classes of the package, with their files."""
    return [
        (path, node)
        for path in sorted((tree / "orscale_jax").rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef | ast.ClassDef)
    ]


def the_place(tree: pathlib.Path, mutant: Mutant) -> tuple[pathlib.Path, ast.expr]:
    """The file and the node of the mutant's code, or a LookupError unless it is one."""
    try:
        wanted = ast.dump(ast.parse(mutant.code, mode="eval").body)
    except SyntaxError:
        wanted = ast.dump(ast.parse(mutant.code).body[0])
    found = [
        (path, node)
        for path, outer in functions(tree)
        if outer.name == mutant.function
        for node in ast.walk(outer)
        if ast.dump(node) == wanted
    ]
    if len(found) != 1:
        places = [f"{path.relative_to(tree)}:{node.lineno}" for path, node in found]
        raise LookupError(f"{mutant.code!r} stands in {mutant.function} at {places}")
    return found[0]


def break_code(tree: pathlib.Path, mutant: Mutant) -> pathlib.Path:
    """Break a copy's code in its one place; return the file, relative to the tree."""
    path, node = the_place(tree, mutant)
    lines = path.read_bytes().splitlines(keepends=True)  # Columns count bytes.
    before = [*lines[: node.lineno - 1], lines[node.lineno - 1][: node.col_offset]]
    after = [lines[node.end_lineno - 1][node.end_col_offset :], *lines[node.end_lineno :]]
    path.write_bytes(b"".join([*before, mutant.broken.encode(), *after]))
    return path.relative_to(tree)


def located(argument: str) -> str:
    """A file, with the test in it if there is one, by its path; else the argument."""
    name, *test = argument.split("::")
    if not name.endswith(".py"):
        return argument
    found = [str(path.relative_to(ROOT)) for path in (ROOT / "tests").rglob(name)]
    if len(found) != 1:
        raise LookupError(f"{name} names {len(found)} files, not one: {found}")
    return "::".join([*found, *test])


def failing_test(tree: pathlib.Path, tests: str) -> str | None:
    """The first test that fails in the tree, or None if all pass."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider"]
    # Most programs of a mutant are those of the original, which are compiled already.
    cache = {"JAX_COMPILATION_CACHE_DIR": str(ROOT / ".pytest_cache" / "compiled")}
    done = subprocess.run(
        [*command, "-m", "not slow", *map(located, tests.split())],
        cwd=tree,
        env=os.environ | cache,
        capture_output=True,
        text=True,
    )
    if done.returncode not in (0, 1):
        raise SystemExit(f"The tests {tests} could not run:\n{done.stdout}{done.stderr}")
    pattern = r"^(?:FAILED|ERROR) tests/(.*?)(?: - |$)"
    found = re.search(pattern, done.stdout, re.MULTILINE)
    return (found[1] if found else "pytest") if done.returncode else None


def survives(number: int) -> bool:
    """Whether the tests miss a mutant; print the outcome."""
    mutant = MUTANTS[number - 1]
    with tempfile.TemporaryDirectory() as folder:
        tree = pathlib.Path(folder)
        for name in COPIED:
            if (ROOT / name).is_dir():
                unneeded = shutil.ignore_patterns("_build")
                shutil.copytree(ROOT / name, tree / name, ignore=unneeded)
            else:
                shutil.copy(ROOT / name, tree / name)
        broken = break_code(tree, mutant)
        caught = failing_test(tree, mutant.tests)
    print(
        f"{number:3}  {broken}, {mutant.function}: {mutant.code}\n"
        f"     became: {mutant.broken}\n"
        f"     {f'caught by {caught}' if caught else 'SURVIVED ' + mutant.tests}",
        flush=True,
    )
    return caught is None


def main() -> int:
    parser = argparse.ArgumentParser("python -m tests.mutants")
    parser.add_argument("numbers", type=int, nargs="*", help="which of them")
    parser.add_argument("--sample", type=int, metavar="N", help="N, by the commit")
    given = parser.parse_args()
    numbers = given.numbers or range(1, len(MUTANTS) + 1)
    if given.sample:
        draw = random.Random(commit_number())
        numbers = sorted(draw.sample(numbers, given.sample))
    with ThreadPoolExecutor(AT_ONCE) as pool:
        survived = list(pool.map(survives, numbers))
    survivors = [n for n, missed in zip(numbers, survived, strict=True) if missed]
    print(f"{len(numbers) - len(survivors)} of {len(numbers)} mutants caught.", end=" ")
    print(f"Survivors: {survivors}" if survivors else "")
    return bool(survivors)


if __name__ == "__main__":
    sys.exit(main())
