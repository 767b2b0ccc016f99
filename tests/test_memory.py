"""How often a step reads and writes a matrix, from the compiled program."""

import functools
import os
import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import optax
import pytest

from orscale_jax import muon, orscale

INSTRUCTION = re.compile(r"\s*(?:ROOT )?%?([\w.-]+) = (.*?) ([\w-]+)\((.*)")
# Gram matrices are not made by blocks, each of which reads a part of its matrix.
WHOLE = re.compile(r"f32\[(?:256,1024|1024,256)\]")
FREE = {"parameter", "get-tuple-element", "tuple", "bitcast"}


def passes(optimizer):
    """Reads and writes of one 256×1024 matrix by the kernels of a donated step."""

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(params, state, grads):
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    params = {"w": jax.ShapeDtypeStruct((256, 1024), jnp.float32)}
    state = jax.eval_shape(optimizer.init, params)
    text = step.lower(params, state, params).compile().as_text()
    types, reads, writes = {}, 0, 0
    for line in text[text.index("\nENTRY") :].splitlines():
        if not (found := INSTRUCTION.match(line)):
            continue
        name, kind, operation, rest = found.groups()
        types[name] = kind
        if operation not in FREE:
            operands = re.findall(r"%([\w.-]+)", rest.split("metadata")[0])
            reads += sum(len(WHOLE.findall(types.get(o, ""))) for o in operands)
            writes += len(WHOLE.findall(kind))
    return reads, writes


@pytest.mark.parametrize("build, reads, writes", [(muon, 17, 8), (orscale, 22, 9)])
def test_passes_over_a_matrix(build, reads, writes):
    """Two Gram matrices and two products with X among them: 6 reads, 4 writes."""
    found = passes(build(1e-3))
    print(build.__name__, found)
    assert found[0] <= reads and found[1] <= writes


TEMPORARIES = """
import jax, jax.numpy as jnp
from orscale_jax import orscale

optimizer = orscale(1e-3)
for count in (8, 64):
    params = {
        f"w{i}": jax.ShapeDtypeStruct((512, 640), jnp.float32) for i in range(count)
    }
    state = jax.eval_shape(optimizer.init, params)
    step = jax.jit(optimizer.update, donate_argnums=(0, 1))
    compiled = step.lower(params, state, params).compile()
    print(compiled.memory_analysis().temp_size_in_bytes)
"""


def temporaries(flags=""):
    """Of a step with 8 matrices of 1.25 MiB, one stack, and with 64."""
    found = subprocess.run(
        [sys.executable, "-c", TEMPORARIES],
        env=os.environ | {"XLA_FLAGS": flags},
        capture_output=True,
        text=True,
        check=True,
    )
    print(flags, found.stdout)
    return [*map(int, found.stdout.split())]


def test_temporaries_are_one_copy_of_the_matrices():
    """At most: a stack's results take the places of what they are made of."""
    matrix = 4 * 512 * 640
    few, many = temporaries()
    assert few <= 1.05 * 8 * matrix and many <= 1.05 * 64 * matrix


def test_temporaries_are_those_of_some_stacks():
    """Where XLA does not start as many matrices at once as it can."""
    few, many = temporaries("--xla_cpu_enable_concurrency_optimized_scheduler=false")
    assert many <= 3 * few
