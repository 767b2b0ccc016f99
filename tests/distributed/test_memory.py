"""How often a step reads and writes a matrix, from the compiled program."""

import os
import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest

from orscale_jax import muon, orscale
from tests.runs import step_of

INSTRUCTION = re.compile(r"\s*(?:ROOT )?%?([\w.-]+) = (.*?) ([\w-]+)\((.*)")
# Gram matrices of this size are not computed in strips, which read parts of a matrix.
WHOLE = re.compile(r"f32\[(?:256,1024|1024,256)\]")
FREE = {"parameter", "get-tuple-element", "tuple", "bitcast"}


def passes(optimizer):
    """Reads and writes of one 256×1024 matrix by the kernels of a donated step."""
    params = {"w": jax.ShapeDtypeStruct((256, 1024), jnp.float32)}
    state = jax.eval_shape(optimizer.init, params)
    step = step_of(optimizer, donate_argnums=(0, 1))
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


@pytest.mark.extended
@pytest.mark.compiled
@pytest.mark.parametrize("build, reads, writes", [(muon, 18, 8), (orscale, 23, 9)])
def test_passes_over_a_matrix(build, reads, writes):
    """Two Gram matrices and two products with X among them: 6 reads, 4 writes."""
    found = passes(build(1e-3))
    print(build.__name__, found)
    assert found[0] <= reads and found[1] <= writes


MATRIX = 4 * 512 * 640
TEMPORARIES = """
import jax, jax.numpy as jnp, optax
from orscale_jax import orscale, orthogonalize
from tests.runs import step_of


def temporaries(optimizer, count):
    step = step_of(optimizer, donate_argnums=(0, 1))
    params = {
        f"w{i:03d}": jax.ShapeDtypeStruct((512, 640), jnp.float32) for i in range(count)
    }
    state = jax.eval_shape(optimizer.init, params)
    compiled = step.lower(params, state, params).compile()
    return compiled.memory_analysis().temp_size_in_bytes


def capped(max_stack_bytes):
    stage = orthogonalize(max_stack_bytes=max_stack_bytes)
    return optax.chain(optax.trace(0.95, nesterov=True), stage, optax.scale(-0.01))

"""


def temporaries(optimizer, counts, flags=""):
    """Bytes, for steps on these counts of 1.25 MiB matrices, with these XLA flags."""
    line = f"print(*(temporaries({optimizer}, count) for count in {counts}))"
    found = subprocess.run(
        [sys.executable, "-c", TEMPORARIES + line],
        env=os.environ | {"XLA_FLAGS": flags},
        capture_output=True,
        text=True,
        check=True,
    )
    print(optimizer, counts, flags, found.stdout)
    return [*map(int, found.stdout.split())]


@pytest.mark.extended
@pytest.mark.compiled
def test_a_loop_over_a_stack_is_in_place():
    """Temporaries of 8 matrices in 2 stacks: 1.5 copies, and 2.5 if the loop copies."""
    [found] = temporaries("capped(5 * 2**20)", (8,))
    assert found <= 1.6 * 8 * MATRIX


@pytest.mark.slow
def test_temporaries_are_bounded_by_stacks_and_not_by_the_model():
    """If XLA does not start as many matrices at once as it can; else by two copies."""
    flags = "--xla_cpu_enable_concurrency_optimized_scheduler=false"
    few, many = temporaries("capped(2**20)", (2, 8), flags)
    assert many <= 1.05 * few
    of_four = temporaries("capped(5 * 2**20)", (8, 64), flags)
    assert max(of_four) <= 4 * 4 * MATRIX
    counts = (8, 64, 128)
    for optimizer in ("capped(5 * 2**20)", "orscale(1e-3)"):
        found = temporaries(optimizer, counts)
        assert all(x <= 2.05 * n * MATRIX for x, n in zip(found, counts, strict=True))
