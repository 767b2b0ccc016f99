import jax
import jax.numpy as jnp
import numpy as np
import pytest

from examples.pretrain.operation.checkpoint import checksums

DTYPES = ("float32", "bfloat16", "int32", "uint8", "bool")


def array(dtype, shape=(6, 8)):
    values = np.random.default_rng(0).normal(size=shape)
    return np.array(jnp.asarray(values if "float" in dtype else 100 * values, dtype))


def checksum(x):
    return checksums([x])["0"]


@pytest.mark.parametrize("dtype", DTYPES)
def test_any_bit_counts(dtype):
    x = array(dtype)
    before = checksum(x)
    changed = set()
    for place in (0, 1, 7, 8, 47):
        for bit in range(1 if dtype == "bool" else 8 * x.itemsize):
            flipped = x.copy()
            flipped.view(np.uint8).reshape(-1)[x.itemsize * place + bit // 8] ^= (
                1 << bit % 8
            )
            changed.add(checksum(flipped))
    assert len(changed) == 5 * (1 if dtype == "bool" else 8 * x.itemsize)
    assert before not in changed


@pytest.mark.usefixtures("enable_x64")
def test_the_upper_bits_of_long_numbers_count():
    for x in (np.arange(3.0), np.arange(3)):
        assert checksum(x) != checksum(-x)


@pytest.mark.parametrize("dtype", DTYPES[:4])
def test_the_order_of_entries_counts(dtype):
    """Also of numbers that differ in their sign alone, and of rows that are far apart."""
    x = array(dtype, (4, 32_768))
    x[0, :2] = 3, -3 if dtype != "uint8" else 4
    before = checksum(x)
    for a, b in (((0, 0), (0, 1)), ((0, 0), (2, 0)), ((1, 5), (3, 6))):
        swapped = x.copy()
        swapped[a], swapped[b] = x[b], x[a]
        assert x[a] != x[b] and checksum(swapped) != before
    assert checksum(x[::-1]) != before
    assert checksum(np.zeros_like(x)) != before


def test_the_sharding_does_not_count():
    x = array("float32", (8, 16))
    mesh = jax.make_mesh((4, 2), ("a", "b"))
    found = {
        checksum(jax.device_put(x, jax.NamedSharding(mesh, spec)))
        for spec in (jax.P(), jax.P("a"), jax.P("b", "a"), jax.P(None, ("a", "b")))
    }
    assert found == {checksum(x)}


def test_checksums_have_the_paths_of_their_arrays():
    tree = {"params": {"kernel": jnp.ones((2, 3))}, "count": (jnp.int32(3), None)}
    found = checksums(tree)
    assert found.keys() == {"params.kernel", "count.0"}
    assert all(isinstance(value, int) for value in found.values())
    assert found == checksums(jax.tree.map(np.asarray, tree))
