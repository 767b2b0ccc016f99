"""Variational inference in NumPyro, whose guide is an inverse autoregressive flow.

The loss of one step is estimated from one sample of the guide: this program compares
optimizers over many fits, not over one.
"""

import itertools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpyro
import numpyro.distributions as dist
import optax
from numpyro.infer import SVI, Trace_ELBO
from numpyro.infer.autoguide import AutoIAFNormal

from orscale_jax import muon, orscale

Make = Callable[[float], optax.GradientTransformation]
OPTIMIZERS: dict[str, Make] = {
    "optax.adam": optax.adam,
    "optax.contrib.muon": optax.contrib.muon,
    "muon": muon,
    "orscale": orscale,
}


def data() -> tuple[jax.Array, jax.Array]:
    keys = jax.random.split(jax.random.key(0))
    x = jax.random.normal(keys[0], (200, 20))
    noise = 0.3 * jax.random.normal(keys[1], (200,))
    return x, x @ jnp.linspace(-2, 2, 20) + noise


def regression(x: jax.Array, y: jax.Array) -> None:
    prior = dist.Normal(0, 3).expand([x.shape[1]]).to_event(1)
    scale = numpyro.sample("scale", dist.HalfNormal(1))
    numpyro.sample("y", dist.Normal(x @ numpyro.sample("weights", prior), scale), obs=y)


def fits(optimizer: optax.GradientTransformation, steps: int, count: int) -> jax.Array:
    """The losses of each step of each fit, (count, steps)."""
    svi = SVI(regression, AutoIAFNormal(regression), optimizer, Trace_ELBO())
    x, y = data()

    def fit(key: jax.Array) -> jax.Array:
        state = svi.init(key, x, y)
        step = lambda state, _: svi.update(state, x, y)  # noqa: E731
        return jax.lax.scan(step, state, length=steps)[1]

    return jax.jit(jax.vmap(fit))(jax.random.split(jax.random.key(1), count))


def main(
    rates: tuple[float, ...] = (0.01, 0.02), steps: int = 100, count: int = 64
) -> dict[tuple[float, str], jax.Array]:
    """The loss of each fit's last step."""
    return {
        (rate, name): fits(OPTIMIZERS[name](rate), steps, count)[:, -1]
        for rate, name in itertools.product(rates, OPTIMIZERS)
    }


if __name__ == "__main__":
    print(f"{'rate':4}  {'optimizer':18}  {'median':>6}  {'largest':>8}  {'NaN':>3}")
    for (rate, name), losses in main().items():
        failed = jnp.isnan(losses)
        median, largest = jnp.median(losses[~failed]), losses[~failed].max()
        print(f"{rate:4}  {name:18}  {median:6.0f}  {largest:8.2g}  {failed.sum():3}")
