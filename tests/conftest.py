"""What every test of the package runs under."""

import os
from collections.abc import Iterator
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")  # Read when jax is first imported.

import hypothesis
import jax
import pytest

jax.config.update("jax_num_cpu_devices", 8)  # Meshes to shard over.

# No deadline: an example of a new shape compiles. Derandomized: a run repeats the last.
hypothesis.settings.register_profile("default", deadline=None, derandomize=True)
hypothesis.settings.load_profile("default")

EXAMPLES = Path(__file__).parent / "examples"


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
