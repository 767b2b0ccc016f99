"""The bytes of a step that holds one layer's gradients, compiled for this machine."""

import math

import jax
import pytest

from examples.benchmarks import one_layer_at_a_time as bench
from examples.gallery.one_layer_at_a_time import Sizes

# Of Llama 3 8B, and of OLMoE without the norms of queries and keys.
PARAMETERS = {"Llama-3-8B": 8_030_261_248, "mixture": 6_919_161_856 - 16 * 2 * 2048}


def arrays(model):
    return jax.tree.leaves(model.shapes(), is_leaf=lambda x: isinstance(x, tuple))


@pytest.mark.parametrize("name", PARAMETERS)
def test_the_models(name):
    assert sum(map(math.prod, arrays(bench.MODELS[name]))) == PARAMETERS[name]


@pytest.mark.extended
@pytest.mark.parametrize("experts", [False, True])
def test_the_bytes(experts):
    sizes = Sizes(2, 64, 2, 2, 96, 256, 2)
    model = bench.Model(sizes, sequences=1 if experts else 2, experts=experts)
    row = bench.measured(model, 64, jax.devices("cpu")[0])
    assert row.parameters == sum(map(math.prod, arrays(model)))
    # The weights have 3 bytes. 8-bit momentum has 1.0625, and 8-bit moments have 2.125.
    tables = 2 * 256 * 64
    others = 5 * 64 + experts * 2 * 64 * bench.EXPERTS  # AdamW trains routers, too.
    matrices = row.parameters - tables - others
    wanted = 3 * row.parameters + 1.0625 * matrices + 2.125 * tables
    assert wanted < row.arguments < wanted + 8 * 5 * 64 + 2.2 * others + 2000
    assert row.saved == 2 * 64 * 64 * 2
    assert len([*row.cells()]) == len(bench.COLUMNS) - 1
