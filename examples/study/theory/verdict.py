"""A verdict on a run in plain words: do its trust ratios help?"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from examples.study.theory.curvature import curvature, shape_scale
from examples.study.theory.decompose import decompose, measured
from examples.study.theory.estimate import Statistics
from examples.study.theory.gain import kappas
from examples.study.theory.per_matrix import vectors
from examples.study.theory.verdict_rules import RULES, Facts
from orscale_jax import _checks
from orscale_jax.diagnostics.reading import Reading
from orscale_jax.diagnostics.step_gain import Estimate, StepGain
from orscale_jax.parameters.dimension_numbers import WeightDimensionNumbers
from orscale_jax.transforms.matrices import Matrices
from orscale_jax.transforms.stages import SPECTRAL, Scale
from orscale_jax.trees.boxes import PyTree, unbox
from orscale_jax.trees.nodes import mask_like


class Verdict(NamedTuple):
    """The result of :func:`verdict`; ``print`` shows the sentence.

    Attributes:
      outcome: The name of the case; :func:`verdict` lists them.
      text: The verdict in a sentence.
      numbers: The numbers behind it: ``matrices``, ``measured``, ``uniform``, ``spread``,
        ``at_r_max``, ``at_r_min``; with statistics ``counted``, ``kappa_eff``,
        ``kappa_eff_stderr``, ``kappa_layer``, ``kappa_layer_stderr``; with a step's gain
        ``kappa_step``, ``kappa_step_stderr``.
    """

    outcome: str
    text: str
    numbers: dict[str, float]

    def __str__(self) -> str:
        """The sentence."""
        return self.text


def verdict(
    reading: Reading,
    statistics: Statistics | None = None,
    params: PyTree | None = None,
    weight_dimension_numbers: WeightDimensionNumbers = None,
    *,
    consistent_rms: ArrayLike | None = 0.2,
    scale_mode: str = SPECTRAL,
    gained: StepGain | None = None,
) -> Verdict:
    r"""Say in a sentence whether the trust ratios of a run help, and by how much.

    From a reading alone it can tell a run that is saturated or uniform. With ``gained``,
    from :func:`step_gain`, :math:`\kappa` along the step decides. With ``statistics``,
    from :func:`estimate`, it computes :func:`gain`, the paper's model, for steps at the
    optimizer's scale :math:`s_\ell` (``consistent_rms`` or ``scale_mode``): then
    :math:`\kappa_{\mathrm{eff}}` compares with Muon at the same scale. It decides only if
    ``gained`` is not given. Errors of signal and curvature make layers look more
    different than they are; what they add to ``kappa_layer`` is subtracted.

    Standard errors of :math:`\kappa_{\mathrm{eff}}` are propagated to first order, as if
    those of different matrices, and of signal and smoothness, were independent. The
    smallest effect of interest is 5 %: a learning rate that is off by 22 % loses as much.
    The verdict is the first of these cases that applies, where κ is the one that decides:

    ``"not measured"``
      No matrix has a ratio yet.
    ``"saturated"``
      At least half of the matrices are at ``r_max``, or at ``r_min``.
    ``"uniform"``
      All ratios are the same to 2 %: Muon at another learning rate.
    ``"no statistics"``
      Ratios differ, and κ is not known.
    ``"negative curvature"``
      κ is not known, because the measured curvature is not positive along the step or,
      in the model, for any of the matrices.
    ``"too noisy"``
      Standard errors are missing or too large, or fewer than half of the matrices have a
      positive curvature.
    ``"wrong way"``
      κ is below 0.95, and below 1 by two standard errors.
    ``"homogeneous"``
      In the model, :math:`\kappa_{\mathrm{layer}}` plus two standard errors is at most
      1.05: no ratios could gain more.
    ``"gain"``
      κ is above 1.05, and above 1 by two standard errors.
    ``"neutral"``
      κ with two standard errors on either side is between 0.95 and 1.05.
    ``"undecided"``
      The standard errors are too large to tell whether κ is within 5 % of 1.

    Args:
      reading: From :func:`read`.
      statistics: From :func:`estimate`, at the parameters of the reading.
      params: The parameters. Needed with statistics.
      weight_dimension_numbers: The dimension numbers of the optimizer.
      consistent_rms: The value that the optimizer has.
      scale_mode: The mode that the optimizer has; see
        :func:`orscale_jax.scale_by_shape`.
      gained: From :func:`step_gain`, at the parameters of the reading. Its κ then
        decides, and :math:`\kappa_{\mathrm{eff}}` is only reported.

    Returns:
      A :class:`Verdict`. Since it reads values, it cannot be called inside ``jax.jit``.

    Raises:
      ValueError: If ``statistics`` come without ``params``, or are of other matrices.

    Example:
      >>> import jax.numpy as jnp
      >>> from orscale_jax import orscale
      >>> from orscale_jax.diagnostics import read
      >>> from examples.study.theory import verdict
      >>> optimizer = orscale(0.1, calibrate=False, weight_decay=0.0)
      >>> params = {"up": 0.86 * jnp.eye(4), "down": 0.86 * jnp.eye(4)}
      >>> _, state = optimizer.update(params, optimizer.init(params), params)
      >>> print(verdict(read(state, params)))
      uniform: this is Muon at 2 × the learning rate (2 of 2 matrices measured)

    References:
      Lou & You, *OrScale*, section 4.
    """
    facts = _facts_of_reading(reading)
    with_ratios = reading.trust_ratio is not None and facts["measured"] > 0
    if gained is not None and with_ratios:
        value, stderr = gained.kappa
        facts |= _floats({"kappa_step": value, "kappa_step_stderr": stderr})
    if statistics is not None and with_ratios:
        if params is None:
            _checks.refuse("params", None, "pass the parameters along with statistics")
        matrices = Matrices.of(weight_dimension_numbers, params)
        scale = Scale.of(consistent_rms, scale_mode).known()
        facts |= _floats(_facts_of_gain(matrices, scale, reading, statistics, params))
    found = ((name, rule(facts)) for name, rule in RULES.items())
    outcome, text = next((name, text) for name, text in found if text is not None)
    return Verdict(outcome, text, facts)


def _facts_of_reading(reading: Reading) -> Facts:
    if reading.trust_ratio is None:
        number = sum(leaf.size for leaf in jax.tree.leaves(unbox(reading.weight_norm)))
        facts = dict.fromkeys(("spread", "at_r_max", "at_r_min"), 0.0)
        return facts | {"matrices": number, "measured": number, "uniform": 1.0}
    return _floats(_facts_of_ratios(reading))


def _floats(facts: dict[str, jax.Array]) -> Facts:
    return {name: float(value) for name, value in jax.device_get(facts).items()}


@jax.jit
def _facts_of_ratios(reading: Reading) -> dict[str, Any]:
    split = decompose(reading)
    counts = measured(reading)
    [on, at_max, at_min] = vectors(
        counts=counts, at_max=_number(reading.at_r_max), at_min=_number(reading.at_r_min)
    )
    number = jnp.maximum(split.matrices, 1)
    only_max, only_min = on * at_max * (1 - at_min), on * at_min * (1 - at_max)
    return {
        "matrices": on.size,
        "measured": split.matrices,
        "uniform": split.uniform,
        "spread": split.spread,
        "at_r_max": jnp.sum(only_max) / number,
        "at_r_min": jnp.sum(only_min) / number,
    }


def _number(flags: PyTree) -> PyTree:
    return jax.tree.map(lambda flag: jnp.where(flag, 1.0, 0.0), unbox(flags))


@functools.partial(jax.jit, static_argnames=("matrices", "scale"))
def _facts_of_gain(
    matrices: Matrices,
    scale: Scale,
    reading: Reading,
    statistics: Statistics,
    params: PyTree,
) -> dict[str, jax.Array]:
    """The gain in the paper's model, for steps at the optimizer's scale."""
    numbers, ratio = matrices.axes_tree, unbox(reading.trust_ratio)

    def scaled(tree: PyTree, power: int) -> PyTree:
        return mask_like(unbox(shape_scale(tree, params, numbers, scale, power)), ratio)

    def b(smoothness: PyTree) -> PyTree:
        return scaled(curvature(smoothness, params, numbers), 2)

    found = kappas(
        jax.tree.map(
            lambda r, on: jnp.where(on > 0, r, jnp.nan), ratio, measured(reading)
        ),
        Estimate(*(scaled(tree, 1) for tree in statistics.signal)),
        Estimate(*map(b, statistics.smoothness)),
    )
    return {
        "kappa_eff": found.kappa_eff.value,
        "kappa_eff_stderr": found.kappa_eff.stderr,
        "kappa_layer": found.kappa_layer.value,
        "kappa_layer_stderr": found.kappa_layer.stderr,
        "counted": found.matrices,
    }
