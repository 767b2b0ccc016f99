"""What names alone make of the parameters of public models, right and wrong."""

import csv
import pathlib
import re

import jax
import jax.numpy as jnp
import pytest

from orscale_jax import by_path, describe, orscale

# For each parameter, what is "right", and what is "found" by its name: "marked" is a
# matrix that the audit asks about. Two kinds are wrong: output layers with other names,
# which a trace finds, and the hidden layers of heads that have several layers.
TABLE = pathlib.Path(__file__).parents[1] / "data" / "public_models.csv"
MODELS = {}
for row in csv.DictReader(TABLE.read_text().splitlines()):
    shape = tuple(map(int, row["shape"].split("x")))
    MODELS.setdefault(row["model"], {})[row["path"]] = shape, row["right"], row["found"]


@pytest.mark.parametrize("name", MODELS)
def test_a_public_model(name):
    model = MODELS[name]
    tree = {
        p: jax.ShapeDtypeStruct(shape, jnp.float32) for p, (shape, *_) in model.items()
    }
    wrong = {p: right for p, (_, right, found) in model.items() if right != found}
    for row in describe(tree).rows:
        _, _, found = model[row.path]
        assert row.rule == found.replace("marked", "matrix"), row.path
        if row.path in wrong:
            assert bool(row.check) == (found == "marked"), row.path
    rules = {f"^{re.escape(path)}$": rule for path, rule in wrong.items()}
    optimizer = orscale(1e-3, weight_dimension_numbers=by_path(rules))
    for row in describe(tree, optimizer).rows:
        assert row.rule == model[row.path][1], row.path
