"""All optimizers, stages and wrappers, for the tests of what each owes its users.

tests/test_citizenship.py fails if a public function that makes one is not here.
"""

import functools
import inspect

import numpy as np
import optax

from orscale_jax import (
    family,
    keep_master_weights,
    muon,
    orscale,
    orthogonalize,
    qk_clip,
    scale_by_calibrated_trust_ratio,
    scale_by_path,
    scale_by_shape,
    where_nonzero,
)


def functions_of(module):
    """The public functions that a module of the package offers, by name."""
    return {
        name: value
        for name, value in vars(module).items()
        if inspect.isfunction(value) and not name.startswith("_")
    }


# Optimizers by name: functions of a rate and of orscale's arguments. First the public
# ones, then others with states or programs of their own.
FAMILY = functions_of(family)
PUBLIC = {"orscale": orscale, "muon": muon, **FAMILY}
# The arguments of the paper's experiments on images.
VISION = {"consistent_rms": None, "calibrate": False, "r_min": 0.5, "r_max": 1.5}
OPTIMIZERS = PUBLIC | {
    "vision": functools.partial(orscale, **VISION),
    "largest_anchor": functools.partial(orscale, anchor="largest", anchor_steps=3),
    "int8_momentum": functools.partial(orscale, mu_dtype="int8"),
}


def halved(params, factors):
    return params | {"w": params["w"] * factors["heads"].query[0]}


# Stages by name: functions of what a number becomes (a float, or an array), and of the
# dimension numbers of the matrices "w" and "stack" of tests/runs.py.
STAGES = {
    "orthogonalize": lambda of, **n: orthogonalize(ns_steps=of(4), **n),
    "scale_by_shape": lambda of, **n: scale_by_shape(of(0.3), **n),
    "where_nonzero": lambda of, **n: where_nonzero(
        optax.add_decayed_weights(of(0.1)), **n
    ),
    "scale_by_calibrated_trust_ratio": lambda of, **n: scale_by_calibrated_trust_ratio(
        r_min=of(0.3), **n
    ),
    "scale_by_path": lambda of, **_: scale_by_path({"w": of(2.0), "stack": of(0.5)}),
    "qk_clip": lambda of, **_: qk_clip(halved, threshold=of(10.0)),
}
# Further arguments of their updates.
EXTRA = {"qk_clip": {"max_logits": {"heads": np.full(4, 100.0, np.float32)}}}

# Wrappers by name: functions of an optimizer, and of what a number becomes.
WRAPPERS = {
    "keep_master_weights": lambda optimizer, of: keep_master_weights(optimizer),
}


def same(number):
    """What a number becomes where it stays what it is."""
    return number
