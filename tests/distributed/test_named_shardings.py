"""Specs recovered from the indices of shards, against those of the shardings."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec as P

from orscale_jax.distributed import auto
from orscale_jax.sharding import typed_sharding
from tests.runs import mesh_of

SPECS = [P(), P("x"), P("y", "x"), P(("x", "y")), P(("y", "x"), "z"), P(None, "z", "x")]


@pytest.mark.parametrize("spec", SPECS)
def test_shardings_have_the_names_of_their_axes(spec):
    """Read from the indices of the shards, as the partitioner gives them."""
    mesh = mesh_of({"x": 2, "one": 1, "y": 2, "z": 2})
    found = auto.axes_on(mesh, NamedSharding(mesh, spec), 3)
    assert found == typed_sharding.axes_of(spec, 3)


def test_parts_of_axes_have_names_on_a_finer_mesh():
    coarse = mesh_of({"a": 2, "b": 4})
    fine = auto.in_prime_axes(coarse)
    assert dict(fine.shape) == {"a.0": 2, "b.0": 2, "b.1": 2}
    assert [*fine.devices.flat] == [*coarse.devices.flat]
    spec = P("b.1", "a.0", "b.0")
    by_coarse, by_fine = (
        auto.axes_on(m, NamedSharding(fine, spec), 3) for m in (coarse, fine)
    )
    assert by_coarse == (None, ("a",), None)
    assert by_fine == (("b.1",), ("a.0",), ("b.0",))
    assert [*map(auto.primes, (1, 2, 7, 12))] == [[1], [2], [7], [2, 2, 3]]

    def placed(sharding, *shape):
        return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=sharding)

    by_parts, whole = NamedSharding(fine, spec), NamedSharding(coarse, P("a", "b"))
    arrays = [placed(by_parts, 2, 8, 24), placed(whole, 16, 8), placed(whole, 16, 7)]
    mesh, found = auto.named(arrays, coarse)
    assert mesh == fine
    assert [s.spec for s in found] == [spec, P("a.0", ("b.0", "b.1")), P("a.0", None)]
    mesh, found = auto.named(arrays[1:], coarse)
    assert mesh == coarse
    assert [s.spec for s in found] == [P("a", "b"), P("a", None)]
