"""The package as it is declared, installed and published."""

import importlib.resources
import re
import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path

import pytest

import orscale_jax
from tests import release

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
PIN = re.compile(r'([\w.-]+)==[\w.]+( ; python_(full_)?version (<|>=) "3\.\d+(\.\d+)?")?')


def normalized(name):
    return re.sub(r"[-_.]+", "-", name).lower()


def requirement_name(requirement):
    return normalized(re.match(r"[\w.-]+", requirement)[0])


def test_one_version_and_date_everywhere():
    versions = release.versions() | {
        "imported": orscale_jax.__version__,
        "installed": metadata.version("orscale-jax"),
    }
    assert len(set(versions.values())) == 1, versions
    assert len(release.dates()) == 1


def test_depends_on_jax_and_optax_alone():
    required = [r for r in metadata.requires("orscale-jax") if "extra ==" not in r]
    assert {requirement_name(r) for r in required} == {"jax", "optax"}


def test_type_information_is_shipped():
    assert importlib.resources.files(orscale_jax).joinpath("py.typed").is_file()


def test_readme_names_the_two_commands_near_its_top():
    """Both are targets of the Makefile, and CI runs the tests by the same command."""
    readme = (ROOT / "README.md").read_text()
    assert len(readme.split()) <= 900  # A newcomer reads that much.
    top, _, _ = readme.partition("\n## ")
    commands = re.findall(r"^make ([\w-]+)  # .*: 2 to 4 minutes", top, re.MULTILINE)
    assert commands == ["demo", "test"]
    makefile = (ROOT / "Makefile").read_text()
    for target in commands:
        assert re.search(rf"^{target}: .* ## ", makefile, re.MULTILINE), target
    lines = (ROOT / ".ci" / "run").read_text().splitlines()
    assert "make test" in lines


def test_only_dependencies_are_imported():
    # In a separate process: this one has imported the extras already.
    program = """
import importlib, pkgutil, sys
import orscale_jax
for module in pkgutil.iter_modules(orscale_jax.__path__, "orscale_jax."):
    if module.name.split(".")[1] not in ("equinox", "flax", "haliax"):
        importlib.import_module(module.name)
print(*{name.partition(".")[0] for name in sys.modules})
"""
    imported = subprocess.run(
        [sys.executable, "-c", program], check=True, capture_output=True, text=True
    ).stdout.split()
    assert "orscale_jax" in imported
    assert {"chex", "equinox", "flax", "grain", "matplotlib", "orbax"}.isdisjoint(
        imported
    )


def test_every_development_dependency_is_pinned():
    text = (ROOT / "constraints.txt").read_text()
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    other = [line for line in lines if not PIN.fullmatch(line)]
    assert not other  # It may contain neither addresses nor options.
    extras = PROJECT["optional-dependencies"].values()
    declared = {requirement_name(r) for extra in extras for r in extra}
    pinned = {requirement_name(line) for line in lines}
    assert declared - {"orscale-jax"} <= pinned


def test_versions_page_names_the_bounds_and_the_pins():
    page = (ROOT / "docs" / "changelog.md").read_text()
    rows = re.findall(r"^\| (\w+) \| (\S+) \| (\S+)", page, re.M)
    tried = {name.lower(): versions for name, *versions in rows}
    pins = (ROOT / "constraints.txt").read_text()
    for requirement in [f"python{PROJECT['requires-python']}", *PROJECT["dependencies"]]:
        name, declared = requirement.split(">=")
        oldest, newest = tried[name]
        assert oldest in (declared, f"{declared}.0")
        pin = rf'^{name}=={re.escape(newest)}( ; python_version >= "3\.12")?$'
        assert name == "python" or re.search(pin, pins, re.M)


@pytest.mark.extended
def test_no_file_names_a_package_index_or_a_path_of_one_machine():
    listing = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    if listing.returncode != 0:
        pytest.skip("not a git checkout")
    private = re.compile(
        r"pypi\.org|pythonhosted\.|index[-_]url|find[-_]links"
        r"|(?<![\w.~-])/(?:home|mnt|opt|root|Users|work)/"
    )
    found = {
        name: match[0]
        for name in filter(None, listing.stdout.split("\0"))
        if (ROOT / name).is_file()
        and (match := private.search((ROOT / name).read_text(errors="replace")))
    }
    assert not found
