"""OrScale and its limit, Muon: Algorithm 1, and AdamW for all other parameters."""

from __future__ import annotations  # help() shows the names of types.

import dataclasses
import functools
import inspect
import types
from collections.abc import Callable
from typing import Any, ParamSpec, TypeAlias

import jax
import numpy as np
import optax
from jax.sharding import AbstractMesh, Mesh
from jax.typing import ArrayLike, DTypeLike

from orscale_jax import _checks
from orscale_jax.distributed.slow_links import SlowAxes
from orscale_jax.newton_schulz.coefficients import Coefficients
from orscale_jax.parameters.dimension_numbers import WeightDimensionNumbers
from orscale_jax.sharding.param_shardings import ParamShardings, ParamSpecs
from orscale_jax.transforms.matrices import (
    ADAMW,
    MATRIX,
    Matrices,
    Optimizer,
    Stage,
    on_parameters,
)
from orscale_jax.transforms.momentum import (
    float_dtype,
    is_int8,
    momentum_stage,
    with_float32_squares,
)
from orscale_jax.transforms.orthogonalize import orthogonalize_stage, polar_options
from orscale_jax.transforms.stages import (
    CONSISTENT_RMS,
    MATRICES,
    SPECTRAL,
    WEIGHT_DECAY,
    Mask,
    Scale,
    decay_stage,
    first_update_stage,
    resolve_mask,
    shape_stage,
    told,
)
from orscale_jax.transforms.trust_ratio import (
    ANCHOR_STEPS,
    EPS,
    FIRST,
    R_MAX,
    R_MIN,
    TrustRatio,
    trust_ratio_stage,
)
from orscale_jax.trees.boxes import PyTree

ScalarOrSchedule: TypeAlias = ArrayLike | optax.Schedule
Parameters = ParamSpec("Parameters")

#: The arguments of the trust ratio alone.
RATIO = ("calibrate", "anchor", "anchor_steps", "r_min", "r_max", "eps")


@_checks.suggests_arguments
def orscale(
    learning_rate: ScalarOrSchedule,
    *,
    momentum: ArrayLike = 0.95,
    nesterov: bool = True,
    mu_dtype: DTypeLike | None = None,
    weight_decay: ScalarOrSchedule = WEIGHT_DECAY,
    weight_decay_mask: Mask | None = None,
    consistent_rms: ArrayLike | None = CONSISTENT_RMS,
    scale_mode: str = SPECTRAL,
    calibrate: bool = True,
    anchor: str = FIRST,
    anchor_steps: ArrayLike = ANCHOR_STEPS,
    r_min: ArrayLike = R_MIN,
    r_max: ArrayLike = R_MAX,
    eps: ArrayLike = EPS,
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
    mesh: Mesh | AbstractMesh | None = None,
    slow_axes: SlowAxes | None = None,
    param_shardings: ParamShardings = None,
) -> optax.GradientTransformationExtraArgs:
    r"""OrScale: Muon with a calibrated trust ratio per matrix.

    Each matrix :math:`W \in \mathbb{R}^{m \times n}` with gradient G takes the step

    .. math::

      M &\leftarrow \mu M + G, \\
      \tilde M &= \mu M + G, \\
      Q &= \mathrm{NS}_k(\tilde M), \\
      s &= 0.2 \sqrt{\max(m, n)}, \\
      D &= \lambda W + s Q, \\
      r &= \|W\|_F / (c \|D\|_F + \varepsilon), \\
      \hat r &= \mathrm{clip}(r, r_{\min}, r_{\max}), \\
      W &\leftarrow W - \eta \, \hat r \, D,

    with c set at the matrix's first step so that the first r is 1: that step is
    :func:`muon`'s (Muon+Moonlight). AdamW trains every other parameter.

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
      weight_decay_mask: ``"matrices"``: nothing that AdamW trains decays. Or a tree of
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
        word ``emb``, ``wte``, ``wpe``, ``vocab`` or ``logits``, or ``tok`` or ``pos``
        without that of a network (``pos_ffn``), or ends in the word ``head`` or
        ``classifier``, or its class is "embedding", "head", "norm", "scale" or "bias"
        (:func:`~orscale_jax.diagnostics.layer_classes`). Such leaves and leaves of fewer
        axes are AdamW's; leaves of more axes raise an error. A 2-D router or fused
        projection is then one matrix; the column "check" of :func:`describe` flags such
        names.
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
        ambiguous or does not fit its dimension numbers. From ``update``, if ``params`` is
        missing, a gradient has another shape than its parameter, or the state is not one
        that ``init`` makes of these parameters. The checks happen while JAX traces.
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
    return build(orscale_chain, Hyperparameters(**locals()))


class Hyperparameters(types.SimpleNamespace):
    """The arguments of :func:`orscale`, under their names, checked."""

    def __init__(self, **arguments: Any) -> None:
        """Convert NumPy's scalars, give AdamW the matrices' rate and decay, and check.

        Where float64 is enabled, NumPy's scalars would promote JAX's arrays to it. The
        stages check the arguments that are missing here.
        """
        values = {k: as_python_scalar(k, v) for k, v in arguments.items()}
        own_decay = values["adam_weight_decay"] is not None
        for name in ("learning_rate", "weight_decay"):
            for argument in (name, f"adam_{name}"):
                values[argument] = _checks.scheduled(argument, values[argument])
            if values[f"adam_{name}"] is None:
                values[f"adam_{name}"] = values[name]
        super().__init__(**values)
        number = functools.partial(_checks.number, at_least=0)
        ascent = "; to ascend, put optax.scale(-1) before it in an optax.chain"
        for name in ("learning_rate", "adam_learning_rate"):
            number(name, getattr(self, name), schedule=True, instead=ascent)
        number("momentum", self.momentum, below=1)
        _checks.flag("nesterov", self.nesterov)
        if not is_int8(self.mu_dtype):
            _checks.dtype("mu_dtype", self.mu_dtype, also='"int8" ')
        number("weight_decay", self.weight_decay, schedule=True)
        mask = self.weight_decay_mask
        if isinstance(mask, str) and mask != MATRICES:
            remedy = f"pass {MATRICES!r}, a tree of booleans or a function to one"
            _checks.refuse("weight_decay_mask", mask, remedy)
        number("adam_b1", self.adam_b1, below=1)
        number("adam_b2", self.adam_b2, below=1)
        number("adam_eps", self.adam_eps)
        number("adam_eps_root", self.adam_eps_root)
        _checks.flag("adam_nesterov", self.adam_nesterov)
        number("adam_weight_decay", self.adam_weight_decay, schedule=True)
        decay = self.adam_weight_decay
        if own_decay and isinstance(mask, str):
            known = not isinstance(decay, jax.core.Tracer)
            if known and (callable(decay) or jax.device_get(decay) != 0):
                remedy = (
                    "it has no effect with weight_decay_mask='matrices'; leave one out"
                )
                _checks.refuse("adam_weight_decay", decay, remedy)


def as_python_scalar(name: str, value: Any) -> Any:
    """Convert a scalar of NumPy; refuse one of fewer than 32 bits."""
    if not isinstance(value, np.generic | np.ndarray) or value.ndim:
        return value
    _checks.not_rounded(name, value)
    return value.item()


@dataclasses.dataclass(frozen=True)
class Stages:
    """What an optimizer of the matrices is chained from, for given parameters."""

    hyperparameters: Hyperparameters
    params: PyTree  # Or, without them, the updates.
    matrices: Matrices  # Which of them are matrices.
    momentum: optax.GradientTransformation  # G to M̃.
    orthogonalize: optax.GradientTransformation  # M̃ to Q.
    scale_by_shape: optax.GradientTransformation  # Q to sQ.
    add_decayed_weights: optax.GradientTransformation  # Adds λW.
    scale_by_trust_ratio: optax.GradientTransformation  # D to r̂D.
    scale_by_learning_rate: optax.GradientTransformation  # By −η.
    polar: Stage  # M̃ to Q, for any of the matrices.

    def from_first_update(
        self, *stages: optax.GradientTransformation
    ) -> optax.GradientTransformation:
        """The stages in a chain, once a matrix has received an update; 0 before."""
        return first_update_stage(optax.chain(*stages), self.matrices)

    def told(self, *stages: optax.GradientTransformation) -> optax.GradientTransformation:
        """The stages in a chain; the ratio is told whether M̃ ≠ 0, and λ now."""
        weight_decay = self.hyperparameters.weight_decay
        return told(optax.chain(*stages), weight_decay, self.matrices)


# An optimizer of matrices from its stages. The nesting of chains is the state's tree:
# changing it breaks checkpoints.
Chain: TypeAlias = Callable[[Stages], optax.GradientTransformation]


def orscale_chain(s: Stages) -> optax.GradientTransformation:
    """OrScale: M ← μM + G, D = λW + sQ and W ← W − η r̂ D."""
    return optax.chain(
        s.momentum,  # M̃ = μM + G
        s.told(
            s.from_first_update(
                optax.chain(s.orthogonalize, s.scale_by_shape),  # sQ, Q = NS(M̃)
                s.add_decayed_weights,  # D = λW + sQ
            ),
            s.scale_by_trust_ratio,  # r̂D
        ),
        s.scale_by_learning_rate,  # −η r̂D
    )


def muon_chain(s: Stages) -> optax.GradientTransformation:
    """Muon: OrScale without the ratio, r̂ = 1."""
    direction = optax.chain(s.orthogonalize, s.scale_by_shape)
    update = s.told(s.from_first_update(direction, s.add_decayed_weights))
    return optax.chain(s.momentum, update, s.scale_by_learning_rate)


def adamw_chain(h: Hyperparameters, mask: PyTree | None) -> optax.GradientTransformation:
    """:func:`optax.adamw`, for the parameters that are no matrices."""
    moments = optax.scale_by_adam(
        b1=h.adam_b1,
        b2=h.adam_b2,
        eps=h.adam_eps,
        eps_root=h.adam_eps_root,
        mu_dtype=float_dtype(h.mu_dtype),
        nesterov=h.adam_nesterov,
    )
    return optax.chain(
        with_float32_squares(moments),
        decay_stage(h.adam_weight_decay, mask),
        optax.scale_by_learning_rate(h.adam_learning_rate),
    )


def build(chain: Chain, h: Hyperparameters) -> Optimizer:
    """The optimizer whose matrices take a chain of stages, and all others AdamW."""
    settings = h.ns_steps, h.ns_coeffs, h.ns_dtype, h.ns_preconditioning
    options = polar_options(*settings, h.mesh, h.slow_axes)
    specs = ParamSpecs(h.param_shardings)
    polar = functools.partial(orthogonalize_stage, options, specs)
    scale = Scale.of(h.consistent_rms, h.scale_mode)
    given = {name: getattr(h, name) for name in RATIO}
    ratio = TrustRatio(**given, scale=scale, weight_decay=h.weight_decay)

    def optimizer_of(params: PyTree) -> Optimizer:
        # Functions among the arguments see the whole tree, not just one group of it.
        matrices = Matrices.of(h.weight_dimension_numbers, params)
        mask = resolve_mask(h.weight_decay_mask, params, matrices.mask)
        stages = Stages(
            hyperparameters=h,
            params=params,
            matrices=matrices,
            momentum=momentum_stage(h.momentum, h.nesterov, h.mu_dtype, matrices),
            orthogonalize=polar(matrices),
            scale_by_shape=shape_stage(scale, matrices),
            add_decayed_weights=decay_stage(h.weight_decay, mask),
            scale_by_trust_ratio=trust_ratio_stage(ratio, mask, matrices),
            scale_by_learning_rate=optax.scale_by_learning_rate(h.learning_rate),
            polar=polar,
        )
        groups = {MATRIX: chain(stages), ADAMW: adamw_chain(h, mask)}
        labels = jax.tree.map(lambda own: MATRIX if own else ADAMW, matrices.mask)
        # Labels replace whole boxes: no box is without an array. In a function, since
        # optax.partition would call a tree of labels that is callable.
        return optax.partition(groups, lambda _: labels)

    optimizer_of(())  # Checks the arguments of the stages.
    return on_parameters(optimizer_of, float_dtype(h.mu_dtype))


def with_arguments_of(
    optimizer: Callable[..., Optimizer],
    without: tuple[str, ...] = (),
    **defaults: Any,
) -> Callable[[Callable[..., optax.GradientTransformation]], Callable[..., Optimizer]]:
    """Make an optimizer from a chain, with its arguments and most of another optimizer's.

    The defaults of those that are left out apply; others may have new ``defaults``.
    """
    inherited = inspect.signature(optimizer)
    fixed = {name: inherited.parameters[name].default for name in without}
    kept = [
        parameter.replace(default=defaults.get(name, parameter.default))
        for name, parameter in inherited.parameters.items()
        if name not in without
    ]

    def decorate(
        chain: Callable[..., optax.GradientTransformation],
    ) -> Callable[..., Optimizer]:
        _, *own = inspect.signature(chain).parameters.values()
        signature = inherited.replace(parameters=[*kept, *own])

        def built(*args: Any, **kwargs: Any) -> Optimizer:
            bound = signature.bind(*args, **kwargs)
            bound.apply_defaults()
            given = dict(bound.arguments)
            added = {p.name: as_python_scalar(p.name, given.pop(p.name)) for p in own}
            hyperparameters = Hyperparameters(**fixed, **given)
            return build(functools.partial(chain, **added), hyperparameters)

        functools.update_wrapper(built, chain)
        built.__signature__ = signature  # type: ignore[attr-defined]
        return _checks.suggests_arguments(built)

    return decorate


def _typed_as(
    _: Callable[Parameters, Optimizer],
) -> Callable[[Callable[..., Optimizer]], Callable[Parameters, Optimizer]]:
    """Tell editors and type checkers the arguments of another optimizer."""
    return lambda optimizer: optimizer


@_typed_as(orscale)
@with_arguments_of(orscale, RATIO)
def muon(s: Stages) -> optax.GradientTransformation:
    r"""Muon, the limit :math:`\hat r \equiv 1` of :func:`orscale`.

    The step is :math:`W \leftarrow W - \eta (\lambda W + s Q)`, with the stages of
    :func:`orscale` without the trust ratio. ``consistent_rms=0.2`` is Muon+Moonlight,
    ``consistent_rms=None`` is Muon with s = 1, and ``scale_mode="shape_scaling"`` is Muon
    with the scale of Keller Jordan's code and of :func:`optax.contrib.muon`.

    :func:`optax.contrib.muon` has other defaults: no decay, ``adam_b2=0.999``,
    ``adam_nesterov=True``, embeddings and heads among the matrices, and
    ``consistent_rms=None``, which there means ``scale_mode="shape_scaling"``.

    Returns:
      An optimizer with the arguments of :func:`orscale` except ``calibrate``, ``anchor``,
      ``anchor_steps``, ``r_min``, ``r_max`` and ``eps``.

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
    return muon_chain(s)
