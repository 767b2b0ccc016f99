"""What every test of the package runs under."""

from collections.abc import Iterator
from pathlib import Path

import jax
import pytest

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
