"""OrScale and its limit, Muon: the paper's Algorithm 1."""

import inspect

import jax
import optax
from jax.sharding import AbstractMesh, Mesh
from jax.typing import ArrayLike, DTypeLike

from orscale_jax import _checks
from orscale_jax._algorithm import (
    ChainTail,
    Hyperparameters,
    ScalarOrSchedule,
    Stages,
    build,
)
from orscale_jax.distributed.slow_links import SlowAxes
from orscale_jax.newton_schulz.coefficients import Coefficients
from orscale_jax.parameters.dimension_numbers import WeightDimensionNumbers
from orscale_jax.parameters.rate_multipliers import RateMultipliers
from orscale_jax.sharding.param_shardings import ParamShardings
from orscale_jax.transforms.anchors import FIRST
from orscale_jax.transforms.decay import Mask
from orscale_jax.transforms.shape import SPECTRAL


@_checks.suggests_arguments
def orscale(
    learning_rate: ScalarOrSchedule,
    *,
    momentum: ArrayLike = 0.95,
    nesterov: bool = True,
    mu_dtype: DTypeLike | None = None,
    weight_decay: ScalarOrSchedule = 0.1,
    weight_decay_mask: Mask | None = None,
    consistent_rms: ArrayLike | None = 0.2,
    scale_mode: str = SPECTRAL,
    calibrate: bool = True,
    anchor: str = FIRST,
    anchor_steps: ArrayLike = 100,
    r_min: ArrayLike = 0.1,
    r_max: ArrayLike = 5.0,
    eps: ArrayLike = 1e-6,
    ns_steps: int | jax.Array = 5,
    ns_coeffs: Coefficients = "polar_express",
    ns_dtype: DTypeLike | None = None,
    ns_preconditioning: str = "frobenius",
    weight_dimension_numbers: WeightDimensionNumbers = None,
    adam_learning_rate: ScalarOrSchedule | None = None,
    adam_b1: ArrayLike = 0.9,
    adam_b2: ArrayLike = 0.95,
    adam_eps: ArrayLike = 1e-8,
    adam_eps_root: ArrayLike = 0.0,
    adam_nesterov: bool = False,
    adam_weight_decay: ScalarOrSchedule | None = None,
    learning_rate_multipliers: RateMultipliers = None,
    mesh: Mesh | AbstractMesh | None = None,
    slow_axes: SlowAxes | None = None,
    param_shardings: ParamShardings = None,
) -> optax.GradientTransformationExtraArgs:
    r"""OrScale: Muon with a calibrated trust ratio per matrix.

    Each matrix :math:`W \in \mathbb{R}^{m \times n}` with gradient G takes the step

    .. math::

      M &\leftarrow \mu M + G, \qquad \tilde M = \mu M + G, \\
      Q &= \mathrm{NS}_k(\tilde M), \\
      D &= \lambda W + s Q, \qquad s = 0.2 \sqrt{\max(m, n)}, \\
      r &= \|W\|_F / (c \|D\|_F + \varepsilon), \qquad
      \hat r = \mathrm{clip}(r, r_{\min}, r_{\max}), \\
      W &\leftarrow W - \eta \, \hat r \, D,

    with c anchored at the matrix's first direction so that the first r is 1: the first
    step is that of :func:`muon` (Muon+Moonlight). Every other parameter takes AdamW.

    The defaults are the paper's language-model configuration. Its vision configuration is
    ``orscale(lr, consistent_rms=None, calibrate=False, r_min=0.5, r_max=1.5)``.

    Args:
      learning_rate: :math:`\eta`, at least 0: a number, a traced scalar or a schedule.
      momentum: :math:`\mu` in [0, 1).
      nesterov: Whether Q is the polar factor of :math:`\tilde M` (True) or of M.
      mu_dtype: dtype of the momentum (and of AdamW's first moment) in the state, a float
        of 16 bits or more. None: the parameter's. float16 overflows where gradients stay
        above :math:`65504 (1 - \mu)`. ``"int8"``: 8-bit blocks
        (:class:`Int8TraceState`) for matrices, rounded to nearest after the direction is
        computed by the unrounded momentum, without error feedback; AdamW's moments as
        under None. Derivatives do not pass through the codes.
      weight_decay: :math:`\lambda`, at least 0, or a schedule. Coupled: D contains
        :math:`\lambda W`, so r scales the decay, too.
      weight_decay_mask: ``"matrices"``: nothing that takes AdamW decays. Or a tree of
        booleans (or a prefix of one, or a callable from the parameters to one): False for
        parameters that do not decay.
      consistent_rms: Root mean square of the entries of sQ; None for :math:`s = 1`.
      scale_mode: ``"spectral"``, as above; or ``"shape_scaling"`` for
        :math:`s = \sqrt{\max(1, n / m)}`, or ``"unit_rms_norm"`` for
        :math:`s = \sqrt{n / m}`, with m inputs and n outputs: then leave
        ``consistent_rms`` out. See :func:`scale_by_shape`.
      calibrate: Whether c is anchored; False for :math:`c = 1`.
      anchor: The rule that sets c: ``"first"`` as in the paper, or ``"full_rank"`` or
        ``"largest"`` for matrices whose first direction has low rank; see
        :func:`scale_by_calibrated_trust_ratio`.
      anchor_steps: The number of directions that ``"largest"`` considers, at least 1.
      r_min: Lower bound of the ratio.
      r_max: Upper bound of the ratio, at least 0.
      eps: The floor :math:`\varepsilon`, at least 0.
      ns_steps: Newton–Schulz steps k, at least 1.
      ns_coeffs: ``"polar_express"``, ``"jordan"``, ``"dion"``, ``"deepseek_v4"`` (with
        ``ns_steps=10``) or your own table; see :func:`polar_factor` and
        :func:`polar_express_coefficients`.
      ns_dtype: dtype of the Newton–Schulz products, which accumulate in float32. None:
        float16 on GPU, bfloat16 on TPU, float32 on CPU.
      ns_preconditioning: ``"frobenius"`` or ``"aol"``, which saves a step and changes Q;
        see :func:`polar_factor`.
      weight_dimension_numbers: Tree (or a prefix, or a callable from the parameters to
        one) of :class:`optax.contrib.MuonDimensionNumbers`, or of
        :class:`BlockDimensionNumbers` for fused weights, with None for AdamW. Axes they
        do not name are batch axes: each matrix has its own Q, c and r. If the argument is
        None, a 2-D leaf is a matrix, unless a name on its path contains ``embed`` or the
        word ``emb``, ``wte``, ``wpe``, ``vocab``, ``tok``, ``pos`` or ``logits``, or ends
        in the word ``head`` or ``classifier``, or its class is "embedding", "head",
        "norm", "scale" or "bias" (:func:`~orscale_jax.diagnostics.layer_classes`). Such
        leaves and leaves of fewer axes take AdamW; leaves of more axes are refused. A 2-D
        router or fused projection is then one matrix; the column "check" of
        :func:`describe` flags such names.
        :func:`by_path` makes dimension numbers from rules on paths.
      adam_learning_rate: AdamW's learning rate or schedule; None: ``learning_rate``.
      adam_b1: AdamW's decay rate of the first moment, in [0, 1).
      adam_b2: AdamW's decay rate of the second moment, in [0, 1).
      adam_eps: AdamW's :math:`\varepsilon`, at least 0.
      adam_eps_root: What AdamW adds to the second moment under the root, at least 0. More
        than 0 is for derivatives of updates, which are NaN where a gradient is 0.
      adam_nesterov: Whether AdamW, too, uses Nesterov's momentum (the default of
        :func:`optax.contrib.muon`).
      adam_weight_decay: AdamW's (decoupled) weight decay or schedule; None:
        ``weight_decay``.
      learning_rate_multipliers: Numbers by which the learning rate of some parameters is
        multiplied, those of AdamW, too: a mapping (or pairs) from regular expressions
        over the paths, as in :func:`by_path`, such as ``{"attention": 0.5, "^embed": 2}``
        (the first that matches applies; 1 where none does), or a tree of numbers like the
        parameters, a prefix of one, or a callable from the parameters to one. A mapping
        with the parameters' own keys is a tree. The decay follows:
        :math:`W \leftarrow W - \eta \rho \hat r D`. In place of a number, an array gives
        each layer of a stack its own: it has the lengths of the leaf's first axes, which
        are batch axes of matrices.
      mesh: The mesh over which Newton–Schulz is distributed, for parameters whose types
        do not name a mesh. None: the mesh of the context (``jax.set_mesh``), if any.
        Arrays on a mesh name it in their types, so None is enough as a rule.
      slow_axes: The axes of the mesh that lead from one slice of a TPU pod, or from one
        node of GPUs, to another: names such as ``("dcn",)``, or a mapping to the number
        of slices along each, such as ``{"fsdp": 2}`` for an axis that crosses slices part
        of the way. Work is shared over slow links only where that pays. None: what the
        devices say, if the mesh is that of the context (``jax.set_mesh``), a concrete
        ``mesh``, or the partitioner's. ``()``: no axis is slow.
      param_shardings: The shardings of the parameters (and gradients) on a mesh of Auto
        axes, where types do not hold them: a tree of :class:`jax.sharding.NamedSharding`
        or :class:`jax.sharding.PartitionSpec`, or of arrays or
        :class:`jax.ShapeDtypeStruct` with shardings; a prefix of such a tree; or a
        callable from the parameters to one. None: the annotations of Flax or Haliax that
        ``init`` last saw for parameters of these names and shapes. The argument only
        decides where Newton–Schulz runs: arrays with other shardings are resharded.
        Explicit axes do not need it.

    Returns:
      A transformation. Its updates have the gradients' shapes and, as in Optax's
      optimizers, the dtype to which gradient, parameter and ``mu_dtype`` promote. Norms,
      D, c and r are float32 (float64 for float64). The ratios are in the state:
      ``optax.tree.get_all_with_path(state, "trust_ratio")``, likewise
      ``"raw_trust_ratio"`` and ``"calibration"``.

    Raises:
      ValueError: At once, if a hyperparameter is not valid. From ``init``, if a leaf is
        ambiguous or does not fit its dimension numbers, or an expression of
        ``learning_rate_multipliers`` applies to no parameter. From ``update``, if
        ``params`` is missing, a gradient has another shape than its parameter, or the
        state is not one that ``init`` makes of these parameters. The checks happen while
        JAX traces.
      TypeError: If an argument is not known; the message suggests the nearest one.

    Example:
      >>> import jax, jax.numpy as jnp, optax
      >>> from orscale_jax import orscale
      >>> optimizer = orscale(learning_rate=1e-3)
      >>> params = {"kernel": jnp.ones((4, 8)), "bias": jnp.zeros(8)}
      >>> state = optimizer.init(params)
      >>> grads = jax.tree.map(jnp.ones_like, params)
      >>> updates, state = optimizer.update(grads, state, params)
      >>> params = optax.apply_updates(params, updates)
      >>> [(_, ratios)] = optax.tree.get_all_with_path(state, "trust_ratio")
      >>> print(ratios["kernel"].round(4))
      1.0

    References:
      Lou & You, *OrScale: Orthogonalized Optimization with Layer-Wise Trust-Ratio
      Scaling*, Algorithm 1.
    """
    return build(_orscale, Hyperparameters(**locals()))


def _orscale(stages: Stages) -> ChainTail:
    """D = λW + sQ and r̂D, then W ← W − ηr̂D."""
    return optax.chain(stages.coupled, stages.ratio), stages.learning_rate


# Arguments of the trust ratio alone.
RATIO = ("calibrate", "anchor", "anchor_steps", "r_min", "r_max", "eps")
_UNUSED = {name: inspect.signature(orscale).parameters[name].default for name in RATIO}


@_checks.suggests_arguments
def muon(
    learning_rate: ScalarOrSchedule,
    *,
    momentum: ArrayLike = 0.95,
    nesterov: bool = True,
    mu_dtype: DTypeLike | None = None,
    weight_decay: ScalarOrSchedule = 0.1,
    weight_decay_mask: Mask | None = None,
    consistent_rms: ArrayLike | None = 0.2,
    scale_mode: str = SPECTRAL,
    ns_steps: int | jax.Array = 5,
    ns_coeffs: Coefficients = "polar_express",
    ns_dtype: DTypeLike | None = None,
    ns_preconditioning: str = "frobenius",
    weight_dimension_numbers: WeightDimensionNumbers = None,
    adam_learning_rate: ScalarOrSchedule | None = None,
    adam_b1: ArrayLike = 0.9,
    adam_b2: ArrayLike = 0.95,
    adam_eps: ArrayLike = 1e-8,
    adam_eps_root: ArrayLike = 0.0,
    adam_nesterov: bool = False,
    adam_weight_decay: ScalarOrSchedule | None = None,
    learning_rate_multipliers: RateMultipliers = None,
    mesh: Mesh | AbstractMesh | None = None,
    slow_axes: SlowAxes | None = None,
    param_shardings: ParamShardings = None,
) -> optax.GradientTransformationExtraArgs:
    r"""Muon, the limit :math:`\hat r \equiv 1` of :func:`orscale`.

    The step is :math:`W \leftarrow W - \eta (\lambda W + s Q)`, with the stages of
    :func:`orscale` without the trust ratio. ``consistent_rms=0.2`` is Muon+Moonlight,
    ``consistent_rms=None`` is Muon with s = 1, and ``scale_mode="shape_scaling"`` is Muon
    with the scale of Keller Jordan's code and of :func:`optax.contrib.muon`.

    :func:`optax.contrib.muon` has other defaults: no decay, ``adam_b2=0.999``,
    ``adam_nesterov=True``, embeddings and heads among the matrices, and
    ``consistent_rms=None``, which there means ``scale_mode="shape_scaling"``.

    Args:
      learning_rate: :math:`\eta`, at least 0: a number, a traced scalar or a schedule.
      momentum: :math:`\mu` in [0, 1).
      nesterov: Whether Q is the polar factor of :math:`\tilde M = \mu M + G` (True) or of
        M, with :math:`M \leftarrow \mu M + G`.
      mu_dtype: dtype of the momentum (and of AdamW's first moment) in the state. None:
        the parameter's. ``"int8"``: 8-bit blocks
        (:class:`Int8TraceState`) for matrices, rounded to nearest after the direction is
        computed by the unrounded momentum, without error feedback; AdamW's moments as
        under None. Derivatives do not pass through the codes.
      weight_decay: :math:`\lambda`, at least 0, or a schedule. As in :func:`optax.adamw`,
        the learning rate multiplies it.
      weight_decay_mask: ``"matrices"``: nothing that takes AdamW decays. Or a tree of
        booleans (or a prefix of one, or a callable from the parameters to one): False for
        parameters that do not decay.
      consistent_rms: Root mean square of the entries of sQ: 0.2 for
        :math:`s = 0.2 \sqrt{\max(m, n)}`. None for :math:`s = 1`.
      scale_mode: ``"spectral"``, as above; or ``"shape_scaling"`` for
        :math:`s = \sqrt{\max(1, n / m)}`, or ``"unit_rms_norm"`` for
        :math:`s = \sqrt{n / m}`, with m inputs and n outputs: then leave
        ``consistent_rms`` out. See :func:`scale_by_shape`.
      ns_steps: Newton–Schulz steps k, at least 1.
      ns_coeffs: ``"polar_express"``, ``"jordan"``, ``"dion"``, ``"deepseek_v4"`` (with
        ``ns_steps=10``) or your own table, of shape (steps, 3) or (3,); see
        :func:`polar_factor` and :func:`polar_express_coefficients`.
      ns_dtype: dtype of the Newton–Schulz products, which accumulate in float32. None:
        float16 on GPU, bfloat16 on TPU, float32 on CPU.
      ns_preconditioning: ``"frobenius"`` or ``"aol"``, which saves a step and changes Q;
        see :func:`polar_factor`.
      weight_dimension_numbers: Tree (or a prefix, or a callable from the parameters to
        one) of :class:`optax.contrib.MuonDimensionNumbers`, or of
        :class:`BlockDimensionNumbers` for fused weights, with None for AdamW. Axes they
        do not name are batch axes: each matrix has its own Q. If the argument is None,
        2-D leaves are matrices unless they are named like embeddings or heads (see
        :func:`orscale` for the names), leaves of fewer axes take AdamW, and leaves of
        more axes are refused.
      adam_learning_rate: AdamW's learning rate or schedule; None: ``learning_rate``.
      adam_b1: AdamW's decay rate of the first moment, in [0, 1).
      adam_b2: AdamW's decay rate of the second moment, in [0, 1).
      adam_eps: AdamW's :math:`\varepsilon`, at least 0.
      adam_eps_root: What AdamW adds to the second moment under the root, at least 0. More
        than 0 is for derivatives of updates, which are NaN where a gradient is 0.
      adam_nesterov: Whether AdamW, too, uses Nesterov's momentum.
      adam_weight_decay: AdamW's (decoupled) weight decay or schedule; None:
        ``weight_decay``.
      learning_rate_multipliers: Numbers by which the learning rate of some parameters is
        multiplied, by path or as a tree; see :func:`orscale`.
      mesh: The mesh over which Newton–Schulz is distributed, for parameters whose types
        do not name a mesh. None: the mesh of the context (``jax.set_mesh``), if any.
      slow_axes: See :func:`orscale`.
      param_shardings: The shardings of the parameters (and gradients) on a mesh of Auto
        axes, where types do not hold them: a tree of :class:`jax.sharding.NamedSharding`
        or :class:`jax.sharding.PartitionSpec`, or of arrays or
        :class:`jax.ShapeDtypeStruct` with shardings; a prefix of such a tree; or a
        callable from the parameters to one. None: the annotations of Flax or Haliax.

    Returns:
      A transformation. Its updates have the gradients' shapes and, as in Optax's
      optimizers, the dtype to which gradient, parameter and ``mu_dtype`` promote.

    Raises:
      ValueError: In the same cases as :func:`orscale`.

    Example:
      >>> import jax.numpy as jnp
      >>> from orscale_jax import muon
      >>> optimizer = muon(1.0, consistent_rms=None, weight_decay=0.0, ns_steps=8)
      >>> params = {"kernel": jnp.eye(2)}
      >>> grads = {"kernel": jnp.array([[0.0, 1.0], [1.0, 0.0]])}
      >>> updates, _ = optimizer.update(grads, optimizer.init(params), params)
      >>> print(updates["kernel"].round(1) + 0.0)
      [[ 0. -1.]
       [-1.  0.]]

    References:
      Jordan et al. 2024, https://kellerjordan.github.io/posts/muon/; Liu et al. 2025,
      arXiv:2502.16982; Lou & You, *OrScale*, section 3, "degenerate cases".
    """
    return build(_muon, Hyperparameters(**_UNUSED, **locals()))


def _muon(stages: Stages) -> ChainTail:
    """D = λW + sQ, then W ← W − ηD."""
    return optax.chain(stages.coupled), stages.learning_rate
