"""A step with an installed wheel: ``python -I tests/installed.py``, with its Python."""

import importlib.util
import platform

import jax.numpy as jnp

import orscale_jax
from orscale_jax import diagnostics

EXTRAS = ("chex", "flax", "matplotlib", "orbax", "pandas", "examples", "tests")


def main() -> None:
    assert "site-packages" in orscale_jax.__file__, orscale_jax.__file__
    assert not [extra for extra in EXTRAS if importlib.util.find_spec(extra)]
    params = {"kernel": jnp.eye(4)}
    optimizer = orscale_jax.orscale(1e-3)
    updates, state = optimizer.update(params, optimizer.init(params), params)
    assert bool(jnp.isfinite(updates["kernel"]).all())
    reading = diagnostics.read(state, params)
    assert abs(diagnostics.summarize(reading)["optimizer/trust_ratio/mean"] - 1) < 1e-3
    version, python = orscale_jax.__version__, platform.python_version()
    print(f"orscale_jax {version} works with jax and optax alone on Python {python}")


if __name__ == "__main__":
    main()
