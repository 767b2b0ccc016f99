"""`orscale` and `muon` against the float64 oracle and each other."""

import inspect
import pathlib
import pydoc
import re
import subprocess
import sys
from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from optax.contrib import MuonDimensionNumbers as Dims

from orscale_jax import muon, orscale, scale_by_shape
from tests import leaves, oracle
from tests.runs import RELATIVES, VISION, Oracles, readout, run, tree

ROOT = pathlib.Path(__file__).parents[1]


RATIO = ("calibrate", "anchor", "anchor_steps", "r_min", "r_max", "eps")
OF_FAMILY = {
    "hyperball": ((*RATIO, "consistent_rms", "scale_mode"), ()),
    "normuon": (RATIO, ("b2", "eps", "norm")),
    "orscale_on_normuon": ((), ("b2", "neuron_eps", "norm")),
    "aurora": (RATIO, ("pp_iterations", "pp_beta")),
}
OPTIMIZERS = {"orscale": orscale, "muon": muon, **RELATIVES}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_help_shows_every_argument_with_its_default_and_its_description(name):
    left_out, own = ({"muon": (RATIO, ())} | OF_FAMILY).get(name, ((), ()))
    found = inspect.signature(OPTIMIZERS[name]).parameters
    plain = {**inspect.signature(orscale).parameters}
    kept = {key: plain[key] for key in plain if key not in left_out}
    assert {key: found[key] for key in found if key not in own} == kept
    assert {*found} == {*kept, *own}
    text = pydoc.plain(pydoc.render_doc(OPTIMIZERS[name]))
    args = re.search(r"Args:\n(.*?)\n    Returns:", text, re.DOTALL).group(1)
    assert re.findall(r"^ {6}(\w+): \S", args, re.MULTILINE) == list(found)
    assert all(f"= {found[key].default!r}" in text for key in own)


CALLS = """
from orscale_jax import family, muon, orscale

muon(1e-3, momentum=0.9, weight_decay=lambda step: 0.1)
family.normuon(1e-3, b2=0.9, eps=1e-8, consistent_rms=None)
muon(1e-3, r_min=0.2)
muon(1e-3, momentum="x")
orscale(1e-3, momentun=0.9)
family.hyperball(0.02, scale_mode="spectral")
family.aurora()
"""


@pytest.mark.slow
def test_types_of_arguments(tmp_path):
    (tmp_path / "calls.py").write_text(CALLS)
    mypy = [sys.executable, "-m", "mypy", str(tmp_path / "calls.py")]
    found = subprocess.run(mypy, capture_output=True, text=True, cwd=ROOT, check=False)
    errors = re.findall(r":(\d+): error: (.*)  \[", found.stdout)
    expected = (
        (6, 'Unexpected keyword argument "r_min" for "muon"'),
        (7, 'Argument "momentum" to "muon" has incompatible type "str"'),
        (8, 'Unexpected keyword argument "momentun"'),
        (9, 'Unexpected keyword argument "scale_mode" for "hyperball"'),
        (10, 'Missing positional argument "learning_rate"'),
    )
    for (line, message), (at, words) in zip(errors, expected, strict=True):
        assert int(line) == at and message.startswith(words)


NUMBERS_OF = {
    name: [
        key
        for key, parameter in inspect.signature(OPTIMIZERS[name]).parameters.items()
        if type(parameter.default) in (int, float) and "weight_decay" not in key
    ]
    for name in OPTIMIZERS
}


@pytest.mark.quick_first_case
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_schedule_for_a_number(name, subtests):
    """Followed as the message says it: the optimizer works, and its number changes."""
    params = {"w": jnp.eye(2, 3), "b": jnp.ones(3)}
    for argument in NUMBERS_OF[name]:
        own = inspect.signature(OPTIMIZERS[name]).parameters[argument].default

        def schedule(count, own=own):
            return own + count if type(own) is int else own * (1 + count / 32)

        with subtests.test(argument):
            with pytest.raises(ValueError, match=f"{argument}=.*is not valid") as refused:
                OPTIMIZERS[name](1e-3, **{argument: schedule})
            line = re.search("for a schedule write (.*)\\.$", str(refused.value)).group(1)
            names = {"optax": optax, "learning_rate": 1e-3, "schedule": schedule}
            optimizer = eval(line, OPTIMIZERS | names)
            state = optimizer.init(params)
            for count in range(2):
                updates, state = optimizer.update(params, state, params)
                assert state.hyperparams[argument] == pytest.approx(schedule(count))
            assert all(jnp.isfinite(x).all() for x in jax.tree.leaves(updates))


def test_arguments_that_are_missing_or_anothers():
    with pytest.raises(TypeError, match="'r_min': its arguments are"):
        muon(1e-3, r_min=0.2)
    with pytest.raises(TypeError, match=r"muon\(\): missing a required .*learning_rate"):
        muon()
    with pytest.raises(TypeError, match=r"orscale\(\): too many positional arguments"):
        orscale(1e-3, 0.9)
    with pytest.raises(ValueError, match="inject_hyperparams makes one of a schedule"):
        scale_by_shape(lambda count: 0.2)


@pytest.mark.parametrize(
    "injected", [False, pytest.param(True, marks=pytest.mark.extended)]
)
@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.quick_first_case
def test_the_scale_of_optax(nesterov, injected):
    """With Nesterov's term and Optax's unbiased average, only first directions agree."""
    tree, numbers = leaves.some("wide", "transposed", "query")
    rate = optax.linear_schedule(0.02, 0.01, 4)
    theirs = optax.contrib.muon(
        rate, nesterov=nesterov, muon_weight_dimension_numbers=numbers
    )
    build = optax.inject_hyperparams(muon) if injected else muon
    ours = build(
        rate,
        scale_mode="shape_scaling",
        nesterov=nesterov,
        ns_coeffs="jordan",
        weight_decay=0.0,
        weight_dimension_numbers=numbers,
    )
    states = [optimizer.init(tree(0)) for optimizer in (theirs, ours)]
    for seed in range(1, 2 if nesterov else 4):
        (expected, first), (found, second) = (
            jax.jit(optimizer.update)(tree(seed), state, tree(0))
            for optimizer, state in zip((theirs, ours), states, strict=True)
        )
        states = [first, second]
        for name in numbers:
            assert leaves.relative_error(found[name], expected[name]) < 2e-4, name


@pytest.mark.quick_first_case
@pytest.mark.parametrize(
    "names, arguments, by_hand",
    [
        (leaves.FEW, {}, {}),
        (leaves.SHAPES, {}, {}),
        (
            *(leaves.SHAPES, VISION),
            {"rms": None, "calibrate": False, "r_min": 0.5, "r_max": 1.5},
        ),
        (leaves.FEW, *[{"nesterov": False, "momentum": 0.8}] * 2),
        (leaves.FEW, *[{"r_min": -np.inf, "r_max": np.inf}] * 2),
    ],
    ids=["few", "language_model", "vision", "no_nesterov", "no_clip"],
)
def test_25_steps_against_float64_numpy(names, arguments, by_hand):
    tree, numbers = leaves.some(*names)
    params = tree(0, 0.05)
    optimizer = orscale(
        lambda step: 0.03 / (1 + step),
        ns_dtype=jnp.float32,
        weight_dimension_numbers=numbers,
        **arguments,
    )
    expected = Oracles(params, **by_hand)
    seen = run(optimizer, params, 25, tree)
    for step, (_, state) in enumerate(seen):
        expected.step(tree(step + 1), 0.03 / (1 + step))
        for name, matrices in expected.matrices.items():
            for part, attribute in [
                ("calibration", "c"), ("raw_trust_ratio", "r"), ("trust_ratio", "clipped")
            ]:  # fmt: skip
                values = readout(state, part)[name]
                assert values.shape == leaves.BATCHES.get(name, ())
                by_matrix = [getattr(matrix, attribute) for matrix in matrices]
                np.testing.assert_allclose(values.ravel(), by_matrix, rtol=1e-5)
    expected.assert_close(seen[-1][0], 1e-5)


BAD_HYPERPARAMETERS = [
    ({"learning_rate": -1e-3}, r"learning_rate=-0.001.*in \[0, inf\)"),
    ({"learning_rate": "fast"}, "learning_rate='fast'.*number or a schedule"),
    ({"learning_rate": None}, "learning_rate=None"),
    ({"learning_rate": np.nan}, "learning_rate=nan"),
    ({"learning_rate": np.inf}, "learning_rate=inf"),
    ({"learning_rate": Fraction(1, 8)}, r"learning_rate=Fraction\(1, 8\).*number"),
    ({"weight_decay": np.inf}, "weight_decay=inf"),
    ({"momentum": 1.0}, r"momentum=1\.0.*\[0, 1\)"),
    ({"momentum": -0.1}, "momentum=-0.1"),
    ({"momentum": True}, "momentum=True"),
    ({"nesterov": 1}, "nesterov=1.*True or False"),
    ({"mu_dtype": jnp.int32}, "mu_dtype=.*int32.*floating"),
    ({"mu_dtype": "float12"}, "mu_dtype='float12'"),
    ({"weight_decay": -0.1}, "weight_decay=-0.1"),
    ({"consistent_rms": -0.2}, "consistent_rms=-0.2"),
    ({"scale_mode": "original"}, "scale_mode='original'.*'shape_scaling'"),
    ({"scale_mode": None}, "scale_mode=None.*'spectral'"),
    (
        {"consistent_rms": 0.18, "scale_mode": "shape_scaling"},
        "consistent_rms=0.18.*no effect with scale_mode='shape_scaling'; leave it "
        "out, or pass scale_mode='spectral'",
    ),
    ({"ns_steps": 0}, "ns_steps=0.*at least 1"),
    ({"ns_steps": 5.0}, "ns_steps=5.0.*whole number"),
    ({"ns_steps": True}, "ns_steps=True"),
    ({"ns_coeffs": "quintic"}, "ns_coeffs='quintic'.*polar_express"),
    ({"ns_coeffs": [(1.0, 2.0)]}, "ns_coeffs=.*one per step"),
    ({"ns_dtype": "int8"}, "ns_dtype='int8'.*floating"),
    ({"ns_dtype": jnp.float64}, "ns_dtype=.*jax_enable_x64"),
    ({"ns_dtype": jnp.ones(())}, "ns_dtype=Array.*floating dtype"),
    ({"mu_dtype": np.ones(2)}, "mu_dtype=array.*floating dtype"),
    ({"adam_learning_rate": -1.0}, "adam_learning_rate=-1"),
    ({"adam_b1": 1.0}, r"adam_b1=1\.0"),
    ({"adam_b2": 1.5}, r"adam_b2=1\.5"),
    ({"adam_eps": -1e-8}, "adam_eps=-1e-08"),
    ({"adam_eps_root": -1e-8}, "adam_eps_root=-1e-08"),
    ({"adam_weight_decay": -1.0}, "adam_weight_decay=-1"),
    ({"mesh": "data"}, "mesh='data'.*Mesh"),
]


OF_THE_RATIO = [
    ({"r_min": 2.0, "r_max": 1.0}, "r_min=2.0 is larger than r_max=1.0"),
    ({"r_min": np.inf, "r_max": np.inf}, "r_min=inf.*number"),
    ({"r_min": -2.0, "r_max": -1.0}, r"r_max=-1\.0.*in \[0, inf\)"),
    ({"r_min": -np.inf, "r_max": -np.inf}, "r_max=-inf"),
    ({"r_max": "5"}, "r_max='5'.*number"),
    ({"r_min": np.nan}, "r_min=nan"),
    ({"r_min": np.ones(2)}, "r_min="),
    ({"eps": -1e-6}, "eps=-1e-06"),
    ({"calibrate": "yes"}, "calibrate='yes'"),
]


@pytest.mark.parametrize(
    "build, bad",
    [(muon, BAD_HYPERPARAMETERS), (orscale, BAD_HYPERPARAMETERS + OF_THE_RATIO)],
)
def test_bad_hyperparameters_are_refused_when_built(build, bad, subtests):
    for arguments, words in bad:
        with subtests.test(words), pytest.raises(ValueError, match=words):
            build(**({"learning_rate": 1e-3} | arguments))


@pytest.mark.parametrize("injected", [False, True])
def test_one_boolean_is_no_mask_of_several_parameters(injected):
    """inject_hyperparams makes one of a function, calling it with the step count."""
    make = optax.inject_hyperparams(orscale) if injected else orscale

    def mask(tree):
        return jax.tree.map(lambda p: p.ndim > 1, tree)

    optimizer = make(1e-2, weight_decay_mask=mask if injected else False)
    with pytest.raises(ValueError, match=r"weight_decay_mask.*False.*static_args"):
        optimizer.init({"w": jnp.ones((2, 3)), "b": jnp.ones(3)})


@pytest.mark.extended
def test_decay_mask_and_the_fallbacks_own_hyperparameters():
    tree, numbers = leaves.some("tall", "wide", "square", "embedding", "bias")
    mask = {name: name in ("tall", "embedding") for name in numbers}
    params, grads, zero = tree(0), tree(1), tree(0, 0.0)
    for given in (mask, lambda tree: mask):
        optimizer = orscale(
            0.1,
            weight_decay=0.5,
            adam_learning_rate=0.2,
            adam_weight_decay=0.25,
            weight_decay_mask=given,
            weight_dimension_numbers=numbers,
        )
        update = jax.jit(optimizer.update)
        updates, state = update(zero, optimizer.init(params), params)
        decayed = -0.2 * 0.25 * params["embedding"]
        np.testing.assert_allclose(updates["embedding"], decayed, rtol=1e-6)
        assert not updates["bias"].any() and not updates["square"].any()
        updates, _ = update(grads, state, params)
        for name, decay in (("tall", 0.5), ("wide", 0.0)):
            by_hand = oracle.Matrix(params[name], decay=decay)
            by_hand.step(grads[name], 0.1)
            moved = params[name] + updates[name]
            assert leaves.relative_error(moved, by_hand.weight) < 1e-6


def test_callables_see_the_whole_tree():
    """They are not given the masked half that optax.partition passes to each group."""
    params = {"w": jnp.ones((2, 3, 4)), "b": jnp.ones(4)}
    seen = []

    def giving(value):
        return lambda tree: seen.append(jax.tree.map(jnp.shape, tree)) or value

    numbers, mask = giving({"w": Dims(1, 2), "b": None}), giving({"w": True, "b": False})
    optimizer = orscale(1e-2, weight_dimension_numbers=numbers, weight_decay_mask=mask)
    jax.eval_shape(optimizer.update, params, optimizer.init(params), params)
    # In init, in update, and in the init that update compares the state with.
    assert seen == [{"w": (2, 3, 4), "b": (4,)}] * 6


@pytest.mark.extended
@pytest.mark.compiled
@pytest.mark.parametrize("platform, rounded", [("cuda", 1), ("cpu", 0), ("tpu", 0)])
def test_gpus_keep_matrices_in_rounded_form_alone(platform, rounded):
    """A barrier between the momentum and the norms hides the wider ones from XLA."""
    params = tree(0, shapes={"v": (8, 12), "w": (5, 7), "x": (6, 9)})
    optimizer = orscale(1e-3)
    traced = jax.jit(optimizer.update).trace(params, optimizer.init(params), params)
    text = traced.lower(lowering_platforms=(platform,)).as_text()
    of_all = r"optimization_barrier.*tensor<8x12xbf16>.*<5x7xbf16>.*<6x9xbf16>"
    assert len(re.findall(of_all, text)) == rounded


@pytest.mark.quick_first_case
@pytest.mark.parametrize("nesterov", [False, True])
def test_other_parameters_take_optax_adamw(nesterov):
    """With a schedule of the decay, which is that of Optax's own AdamW."""

    def decay(step):
        return 0.1 * (step + 1)

    optimizer = orscale(
        1e-2, weight_decay=decay, adam_nesterov=nesterov, adam_eps_root=1e-3
    )
    params = {"bias": jnp.linspace(-1, 1, 5), "w": jnp.eye(5, 3)}
    bias, state = params["bias"], optimizer.init(params)
    adam = optax.scale_by_adam(b2=0.95, nesterov=nesterov, eps_root=1e-3)
    by_hand = adam.init(bias)
    for step in range(3):
        grads = jax.tree.map(lambda p, step=step: jnp.cos(p + step), params)
        updates, state = optimizer.update(grads, state, params)
        direction, by_hand = adam.update(jnp.cos(bias + step), by_hand)
        bias = bias - 1e-2 * (direction + decay(step) * bias)
        params = optax.apply_updates(params, updates)
        np.testing.assert_allclose(params["bias"], bias, rtol=1e-6)


class Variable:
    """A number as Keras keeps it, whose dtype is a name."""

    def __init__(self, value, dtype):
        self.value, self.shape, self.dtype = jnp.asarray(value, dtype), (), dtype

    def __jax_array__(self):
        return self.value

    def __float__(self):
        return float(self.value)

    def __rmul__(self, factor):
        return factor * self.value


def test_variables_whose_dtype_is_a_name():
    orscale(Variable(0.01, "float32"), weight_decay=Variable(0.1, "float32"))
    with pytest.raises(ValueError, match=r"^learning_rate has dtype bfloat16"):
        orscale(Variable(0.01, "bfloat16"))
