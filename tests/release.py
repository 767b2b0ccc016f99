"""The checklist of a release; it uploads nothing and sets no tag: ``make release``.

It checks that the tree is clean and has one version, builds the site, the source
distribution and the wheel, takes a step with the wheel in an empty environment on the
oldest and the newest Python found, and prints the commands that are left.
"""

import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
# Of a dated heading of the changelog: the version, the date, and what stands under it.
RELEASE = re.compile(
    r"^## \[([\d.]+)\] - (\d{4}-\d\d-\d\d)\n(.*?)(?=^## |\Z)", re.MULTILINE | re.DOTALL
)


def newest_release() -> tuple[str, str, str]:
    """Version, date and text of the newest release in the changelog."""
    release = RELEASE.search((ROOT / "CHANGELOG.md").read_text())
    assert release, "CHANGELOG.md has no heading of the form '## [0.1.0] - 2026-11-24'"
    version, date, text = release.groups()
    return version, date, text.strip()


def versions() -> dict[str, str]:
    """The version of this tree, by the file that says so."""
    citation = (ROOT / "CITATION.cff").read_text()
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    package = (ROOT / "orscale_jax" / "__init__.py").read_text()
    return {
        "pyproject.toml": project["version"],
        "orscale_jax": re.findall(r'^__version__ = "(.+)"$', package, re.MULTILINE)[0],
        "CITATION.cff": re.findall(r"^version: (.+)$", citation, re.MULTILINE)[0],
        "CHANGELOG.md": newest_release()[0],
    }


def dates() -> set[str]:
    """The dates of the release."""
    citation = (ROOT / "CITATION.cff").read_text()
    released = re.findall(r"^date-released: (.+)$", citation, re.MULTILINE)
    return {*released, newest_release()[1]}


def call(*command: object) -> None:
    subprocess.run([str(word) for word in command], cwd=ROOT, check=True)


def output(*command: str) -> str:
    """What a command prints; nothing if it fails or is not there."""
    if not shutil.which(command[0]):
        return ""
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    return "" if done.returncode else done.stdout.strip()


def pythons() -> Iterator[str]:
    """An interpreter of every Python from 3.11, the oldest first."""
    for minor in range(11, 20):
        prefix = output("pyenv", "prefix", f"3.{minor}")
        for python in (f"python3.{minor}", f"{prefix}/bin/python"):
            # A name on the PATH may be a shim that does not run.
            if output(python, "-c", "import sys; print(sys.version_info[1])") == str(
                minor
            ):
                yield python
                break


def check_tree() -> None:
    status = ["git", "status", "--porcelain"]
    changes = subprocess.check_output(status, cwd=ROOT, text=True)
    assert not changes, f"not committed:\n{changes}"
    assert len(set(versions().values())) == 1, versions()
    assert len(dates()) == 1, dates()
    assert "[Unreleased]" not in (ROOT / "CHANGELOG.md").read_text(), "CHANGELOG.md"


def build() -> Path:
    """Build the site and the distributions; return the wheel."""
    shutil.rmtree(ROOT / "dist", ignore_errors=True)
    sphinx = (sys.executable, "-m", "sphinx", "-W", "-n", "-q", "-b", "html")
    call(*sphinx, "docs", "docs/_build/html")
    call(sys.executable, "-m", "build")
    distributions = sorted((ROOT / "dist").iterdir())
    call(sys.executable, "-m", "twine", "check", "--strict", *distributions)
    [wheel] = (path for path in distributions if path.suffix == ".whl")
    return wheel


def try_wheel(wheel: Path, python: str) -> None:
    """Install it where nothing is, and take a step."""
    with tempfile.TemporaryDirectory() as folder:
        call(python, "-m", "venv", folder)
        installed = f"{folder}/bin/python"
        quiet = ("--quiet", "--disable-pip-version-check")
        call(installed, "-m", "pip", "install", *quiet, wheel)
        call(installed, "-I", "tests/installed.py")


def main() -> None:
    check_tree()
    wheel = build()
    found = [*pythons()]
    for python in dict.fromkeys([found[0], found[-1]]):
        try_wheel(wheel, python)
    version, _, text = newest_release()
    print(f"""
All checks of the release passed; .ci/run has those of the code. What is left:

git tag --annotate v{version} --cleanup=whitespace --file=- <<'END'
orscale_jax {version}

{text}
END
git push origin v{version}
python -m twine upload dist/*""")


if __name__ == "__main__":
    main()
