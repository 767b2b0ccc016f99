"""What every test of the package runs under."""

import contextlib
import gc
import importlib.metadata
import os
import shutil
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

# Both are read when jax is first imported.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
# Compiling takes most of the tests' time. Without late optimizations a step of JAX 0.10
# compiles in a quarter of it; newer ones do not have the last of these flags.
# XLA_FLAGS= (empty) tests with them, as .ci/run does on the newest JAX.
os.environ.setdefault(
    "XLA_FLAGS",
    "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
    + " --xla_cpu_use_fusion_emitters=false"
    * (importlib.metadata.version("jaxlib") < "0.11"),
)

import chex
import hypothesis
import jax
import pytest

from tests.commit import commit_number

XLA_FLAGS = os.environ["XLA_FLAGS"]
jax.config.update("jax_num_cpu_devices", 8)  # Meshes to shard over.

# No deadline: an example of a new shape compiles. Derandomized: a run repeats the last.
hypothesis.settings.register_profile("default", deadline=None, derandomize=True)
hypothesis.settings.load_profile("default")

# Every program is compiled once for all workers, and for the next run.
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
MAX_CACHE_BYTES = 300_000_000  # A run makes 60 MB.

EXAMPLES = Path(__file__).parent / "examples"
# These show in seconds that the programs start, and are run with the package's tests.
START = {EXAMPLES / "test_programs.py", EXAMPLES / "test_quickstart.py"}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--part-of-extended",
        action="store_true",
        help="run a third of the extended tests, which follows from the commit",
    )


def pytest_configure(config: pytest.Config) -> None:
    given = os.environ.get("JAX_COMPILATION_CACHE_DIR")  # Of mutants: their original's.
    folder = Path(given or config.rootpath / ".pytest_cache" / "compiled")
    if not hasattr(config, "workerinput"):  # Not in a worker of pytest-xdist.
        with contextlib.suppress(FileNotFoundError):  # Another run may clear it, too.
            if sum(path.stat().st_size for path in folder.glob("*")) > MAX_CACHE_BYTES:
                shutil.rmtree(folder, ignore_errors=True)
    jax.config.update("jax_compilation_cache_dir", str(folder))


@pytest.hookimpl(tryfirst=True)  # Before tests are chosen by their marks.
def pytest_collection_modifyitems(
    config: pytest.Config, items: list[pytest.Item]
) -> None:
    """Add the marks that follow from a test's place, and leave out the other thirds."""
    seen = set()
    for item in items:
        if EXAMPLES in item.path.parents and item.path not in START:
            item.add_marker(pytest.mark.examples)
        if has(item, "quick_first_case") and not has(item, "slow"):
            test, _, _ = item.nodeid.partition("[")
            if test in seen:
                item.add_marker(pytest.mark.extended)
            seen.add(test)
    if config.getoption("part_of_extended"):
        third = commit_number() % 3
        items[:] = [
            item
            for item in items
            if not has(item, "extended") or zlib.crc32(item.nodeid.encode()) % 3 == third
        ]


def has(item: pytest.Item, mark: str) -> bool:
    return item.get_closest_marker(mark) is not None


def pytest_collection_finish() -> None:
    """Keep the garbage collector from what lives as long as the run."""
    # A module that is imported must not set flags of the processes that tests start.
    assert os.environ["XLA_FLAGS"] == XLA_FLAGS
    gc.freeze()
    gc.set_threshold(10_000, 10, 10)


@pytest.fixture(autouse=True, scope="module")
def compiled_programs_are_freed() -> Iterator[None]:
    """Stay below Linux's limit of mapped regions: past it, LLVM crashes the process."""
    yield
    jax.clear_caches()


@pytest.fixture(autouse=True)
def strict_broadcasting(request: pytest.FixtureRequest) -> Iterator[None]:
    """A (n,) that meets a (m, n) unasked is an error in the package."""
    rule = "allow" if EXAMPLES in request.path.parents else "raise"
    with jax.numpy_rank_promotion(rule):
        yield


@pytest.fixture(autouse=True)
def traces_are_counted_anew() -> None:
    """Of functions under chex.assert_max_traces, which it knows by their names."""
    chex.clear_trace_counter()


@pytest.fixture(params=["jit", "no_jit"])
def jit(request: pytest.FixtureRequest) -> Callable:
    """Run a test compiled and op by op, as chex.variants does for a unittest.TestCase."""
    return jax.jit if request.param == "jit" else lambda function: function


@pytest.fixture
def enable_x64() -> Iterator[None]:
    """Run a test in double precision."""
    with jax.enable_x64(True):
        yield
