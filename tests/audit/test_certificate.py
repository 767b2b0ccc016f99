"""The update on a mesh against that of one device: faults are named, and nothing else."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding

from orscale_jax import assert_same_on
from orscale_jax.audit.certificate import certify
from tests.audit import silent_faults
from tests.audit.silent_faults import AXES, FAULTS, SHAPES, SPECS
from tests.runs import mesh_of


def abstract(mesh, dtype=jnp.float32):
    return {
        name: jax.ShapeDtypeStruct(
            shape, dtype, sharding=NamedSharding(mesh, SPECS[name])
        )
        for name, shape in SHAPES.items()
    }


@pytest.mark.quick_first_case
@pytest.mark.parametrize("name", FAULTS)
def test_a_published_fault_is_found_and_named(name):
    _, optimizer, leaf, words = FAULTS[name]
    mesh = mesh_of(AXES)
    certificate = certify(optimizer, abstract(mesh), mesh, {})
    print(certificate)
    [row] = [row for row in certificate.rows if row.path == leaf]
    assert row.error > 1e-3 and words in row.cause


@pytest.mark.extended
def test_the_trainers_muon_itself_is_right():
    mesh = mesh_of(AXES)
    print(
        assert_same_on(
            mesh, silent_faults.a_trainers(silent_faults.right), abstract(mesh)
        )
    )
