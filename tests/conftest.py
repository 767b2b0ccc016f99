"""What every test of the package runs under."""

import importlib.metadata
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

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

import hypothesis
import jax
import pytest

jax.config.update("jax_num_cpu_devices", 8)  # Meshes to shard over.

# No deadline: an example of a new shape compiles. Derandomized: a run repeats the last.
hypothesis.settings.register_profile("default", deadline=None, derandomize=True)
hypothesis.settings.load_profile("default")

# Every program once for all workers, which would each compile it again.
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
COMPILED = pytest.StashKey[tempfile.TemporaryDirectory[str]]()

EXAMPLES = Path(__file__).parent / "examples"


def pytest_configure(config: pytest.Config) -> None:
    folder = getattr(config, "workerinput", {}).get("compiled")
    if folder is None:
        config.stash[COMPILED] = tempfile.TemporaryDirectory()
        folder = config.stash[COMPILED].name
    jax.config.update("jax_compilation_cache_dir", folder)


@pytest.hookimpl(optionalhook=True)  # Of pytest-xdist.
def pytest_configure_node(node: Any) -> None:
    node.workerinput["compiled"] = node.config.stash[COMPILED].name


def pytest_unconfigure(config: pytest.Config) -> None:
    if COMPILED in config.stash:
        config.stash[COMPILED].cleanup()


@pytest.fixture(autouse=True)
def strict_broadcasting(request: pytest.FixtureRequest) -> Iterator[None]:
    """A (n,) that meets a (m, n) unasked is an error in the package."""
    rule = "allow" if EXAMPLES in request.path.parents else "raise"
    with jax.numpy_rank_promotion(rule):
        yield


@pytest.fixture
def enable_x64() -> Iterator[None]:
    """Run a test in double precision."""
    with jax.enable_x64(True):
        yield
