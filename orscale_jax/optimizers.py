"""OrScale and its limit, Muon: Algorithm 1, and AdamW for all other parameters."""

from __future__ import annotations  # help() shows the names of types.

import dataclasses
import functools
import inspect
from collections.abc import Callable
from typing import Any, ParamSpec, TypeAlias, TypeVar

import jax
import numpy as np
import optax
from jax.sharding import AbstractMesh, Mesh, NamedSharding
from jax.typing import ArrayLike, DTypeLike

from orscale_jax import validate
from orscale_jax.distributed.placement import SlowAxes, without_devices
from orscale_jax.newton_schulz.coefficients import Coefficients
from orscale_jax.parameters.dimension_numbers import WeightDimensionNumbers
from orscale_jax.sharding.param_shardings import ParamShardings, ParamSpecs
from orscale_jax.transforms import trust_ratio
from orscale_jax.transforms.matrices import (
    ADAMW,
    MATRIX,
    Matrices,
    Optimizer,
    on_parameters,
)
from orscale_jax.transforms.momentum import (
    adam_stage,
    float_dtype,
    int8_adam_stage,
    is_int8,
    momentum_stage,
)
from orscale_jax.transforms.orthogonalize import PolarOptions, orthogonalize_stage
from orscale_jax.transforms.stages import (
    CONSISTENT_RMS,
    MATRICES_ONLY,
    SCALE_MODE,
    WEIGHT_DECAY,
    Mask,
    Scale,
    decay_stage,
    resolve_mask,
    shape_stage,
    where_nonzero_stage,
)
from orscale_jax.transforms.trust_ratio import TrustRatio, trust_ratio_stage
from orscale_jax.trees.boxes import PyTree, is_box

ScalarOrSchedule: TypeAlias = ArrayLike | optax.Schedule
Stage: TypeAlias = optax.GradientTransformation
Parameters = ParamSpec("Parameters")
Given = TypeVar("Given", bound="Arguments")


# Hashed by identity: arrays and dictionaries among the arguments have no hash.
@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Arguments:
    r"""The arguments of every optimizer.

    Args:
      learning_rate: :math:`\eta`, at least 0. A number, a traced scalar or a schedule.
      weight_decay: :math:`\lambda`, at least 0. A number or a schedule. A step shrinks
        the parameter by :math:`\eta \lambda`, times the trust ratio if there is one.
      weight_decay_mask: Which parameters decay. None: all of them. ``"matrices"``: only
        the matrices. Or a tree of booleans, a prefix of one, or a callable from the
        parameters to one.
      weight_dimension_numbers: Which parameters are matrices, along which axes. A tree
        (or a prefix of one, or a callable from the parameters to one) of
        :class:`optax.contrib.MuonDimensionNumbers`, or of
        :class:`~orscale_jax.BlockDimensionNumbers` for fused weights, with None for
        AdamW. Axes that they do not name are batch axes: each matrix along them has its
        own update. :func:`~orscale_jax.by_path` and the functions for Flax, Equinox and
        Haliax make them.

        If the argument is None, a 2-D leaf is a matrix, unless its names say that it is
        an embedding, an output head, a norm, a scale or a bias
        (:doc:`a page </names>` lists the names). AdamW trains such leaves and leaves of
        fewer axes, and leaves of more axes raise an error. A 2-D router or fused
        projection is then one matrix, and the column "check" of
        :func:`~orscale_jax.describe` flags it.
      momentum: :math:`\mu` in [0, 1).
      nesterov: Whether Q is the polar factor of :math:`\tilde M` (True) or of M.
      mu_dtype: The dtype of the momentum, and of AdamW's first moment, in the state: a
        float of 16 bits or more. None: the dtype of the parameter. float16 overflows if
        gradients stay above :math:`65504 (1 - \mu)`. ``"int8"`` keeps the momentum of
        matrices in blocks of 8-bit integers (:class:`~orscale_jax.Int8TraceState`), and
        treats AdamW's moments as None does. The step uses the momentum before it is
        rounded. Derivatives do not pass through the integers.
      adam_learning_rate: The learning rate or schedule of the parameters that AdamW
        trains. None: ``learning_rate``.
      adam_b1: AdamW's decay rate of the first moment, in [0, 1).
      adam_b2: AdamW's decay rate of the second moment, in [0, 1).
      adam_eps: AdamW's :math:`\varepsilon`, at least 0.
      adam_eps_root: A number that AdamW adds to the second moment under the root, at
        least 0. Pass more than 0 if you need derivatives of updates, which are otherwise
        NaN where a gradient is 0.
      adam_nesterov: Whether AdamW uses Nesterov's momentum as well, as
        :func:`optax.contrib.muon` does by default.
      adam_moments_dtype: ``"int8"`` keeps both of AdamW's moments in blocks of 8-bit
        integers (:class:`~orscale_jax.Int8AdamState`), for parameters of two or more
        axes. It needs ``adam_b2`` below 0.996. None: the moments are floats.
      adam_weight_decay: The weight decay of the parameters that AdamW trains: a number
        or a schedule. None: ``weight_decay``.
      ns_steps: The number of Newton–Schulz steps, at least 1. None: 5. A traced number
        takes the plain iteration, which is slower.
      ns_coeffs: The coefficients: ``"polar_express"``, ``"jordan"``, ``"dion"``,
        ``"deepseek_v4"`` (with ``ns_steps=10``) or a table of your own. See
        :func:`~orscale_jax.polar_factor`.
      ns_dtype: The dtype of the operands of Newton–Schulz's products, which accumulate
        in float32. None: float16 on GPU, bfloat16 on TPU, float32 on CPU.
      ns_preconditioning: ``"frobenius"`` or ``"aol"``, which saves a step and changes Q;
        see :func:`~orscale_jax.polar_factor`.
      mesh: The mesh over which Newton–Schulz is distributed, for parameters whose types
        do not name a mesh. It must have the devices of the arrays. None: the mesh of the
        context (``jax.set_mesh``), if there is one. None is usually right, because the
        types of arrays on a mesh name the mesh.
      slow_axes: The axes of the mesh that lead from one slice of a TPU pod, or from one
        node of GPUs, to another. Pass names such as ``("dcn",)``, or a mapping to the
        number of slices along each axis, such as ``{"fsdp": 2}`` for an axis that spans
        two slices. Work is shared over slow links only if sharing takes less time. None:
        the devices tell which axes are slow, if the mesh is the mesh of the context
        (``jax.set_mesh``) or a concrete ``mesh``. ``()``: no axis is slow.
      param_shardings: The shardings of the parameters (and gradients) on a mesh of Auto
        axes, where their types do not hold the shardings. A tree of
        :class:`jax.sharding.NamedSharding` or :class:`jax.sharding.PartitionSpec`, or of
        arrays or :class:`jax.ShapeDtypeStruct` with shardings; a prefix of such a tree;
        or a callable from the parameters to one. None: the shardings of parameters with
        these names and shapes that ``init`` of this optimizer, or
        :func:`~orscale_jax.state_shardings`, has seen, placed or annotated. If they have
        seen none, shardings are assumed, with a warning. The argument only decides where
        Newton–Schulz runs, and how updates are sharded if ``out_shardings`` do not say
        it. Arrays with other shardings are resharded. Explicit axes do not need it.
    """

    learning_rate: ScalarOrSchedule = dataclasses.field(kw_only=False)
    weight_decay: ScalarOrSchedule = WEIGHT_DECAY
    weight_decay_mask: Mask | None = None
    weight_dimension_numbers: WeightDimensionNumbers = None
    momentum: ArrayLike = 0.95
    nesterov: bool = True
    mu_dtype: DTypeLike | None = None
    adam_learning_rate: ScalarOrSchedule | None = None
    adam_b1: ArrayLike = 0.9
    adam_b2: ArrayLike = 0.95
    adam_eps: ArrayLike = 1e-8
    adam_eps_root: ArrayLike = 0.0
    adam_nesterov: bool = False
    adam_moments_dtype: DTypeLike | None = None
    adam_weight_decay: ScalarOrSchedule | None = None
    ns_steps: int | jax.Array | None = None
    ns_coeffs: Coefficients = "polar_express"
    ns_dtype: DTypeLike | None = None
    ns_preconditioning: str = "frobenius"
    mesh: Mesh | AbstractMesh | None = None
    slow_axes: SlowAxes | None = None
    param_shardings: ParamShardings = None

    def __post_init__(self) -> None:
        """Check the arguments; the stages check those that are missing here."""
        for field in dataclasses.fields(self):
            name, value = field.name, getattr(self, field.name)
            if isinstance(value, np.generic | np.ndarray) and not value.ndim:
                validate.not_rounded(name, value)
                # NumPy's scalars would promote arrays to float64, where it is enabled.
                value = value.item()
            if name in validate.SCHEDULED:
                value = validate.scheduled(name, value)
            object.__setattr__(self, name, value)
        if not callable(self.param_shardings):
            specs = jax.tree.map(_spec_of, self.param_shardings, is_leaf=is_box)
            object.__setattr__(self, "param_shardings", specs)
        number = functools.partial(validate.number, at_least=0)
        ascent = "; to ascend, put optax.scale(-1) before it in an optax.chain"
        number("learning_rate", self.learning_rate, schedule=True, instead=ascent)
        number("adam_learning_rate", self.adam_rate, schedule=True, instead=ascent)
        number("momentum", self.momentum, below=1)
        validate.flag("nesterov", self.nesterov)
        if not is_int8(self.mu_dtype):
            validate.dtype("mu_dtype", self.mu_dtype, also='"int8" ')
        number("weight_decay", self.weight_decay, schedule=True)
        mask = self.weight_decay_mask
        if isinstance(mask, str) and mask != MATRICES_ONLY:
            remedy = f"pass {MATRICES_ONLY!r}, a tree of booleans or a function to one"
            validate.refuse("weight_decay_mask", mask, remedy)
        number("adam_b1", self.adam_b1, below=1)
        moments = self.adam_moments_dtype
        if not (moments is None or is_int8(moments)):
            validate.refuse("adam_moments_dtype", moments, 'pass "int8" or None')
        number("adam_b2", self.adam_b2, below=1 if moments is None else 0.996)
        number("adam_eps", self.adam_eps)
        number("adam_eps_root", self.adam_eps_root)
        validate.flag("adam_nesterov", self.adam_nesterov)
        number("adam_weight_decay", self.adam_decay, schedule=True)
        decay = self.adam_weight_decay
        known = decay is not None and not isinstance(decay, jax.core.Tracer)
        decays = known and (callable(decay) or jax.device_get(decay) != 0)
        if decays and isinstance(mask, str):
            remedy = "it has no effect with weight_decay_mask='matrices'; leave one out"
            validate.refuse("adam_weight_decay", decay, remedy)

    def __getstate__(self) -> dict[str, Any]:
        """What is sent to another process."""
        return vars(self) | without_devices(self.mesh, self.slow_axes)

    @property
    def adam_rate(self) -> ScalarOrSchedule:
        rate = self.adam_learning_rate
        return self.learning_rate if rate is None else rate

    @property
    def adam_decay(self) -> ScalarOrSchedule:
        decay = self.adam_weight_decay
        return self.weight_decay if decay is None else decay

    @functools.cached_property
    def polar_options(self) -> PolarOptions:
        settings = self.ns_steps, self.ns_coeffs, self.ns_dtype, self.ns_preconditioning
        return PolarOptions.of(*settings, self.mesh, self.slow_axes)

    @property
    def scale(self) -> Scale:
        return Scale(rms=None, square=None)

    @property
    def ratio(self) -> TrustRatio | None:
        return None


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class MuonArguments(Arguments):
    r"""The arguments of Muon, which scales its direction.

    Args:
      consistent_rms: The root mean square of the entries of sQ. None: :math:`s = 1`.
      scale_mode: ``"spectral"``, for :math:`s = \text{rms} \cdot \sqrt{\max(m, n)}`, or
        ``"shape_scaling"`` or ``"unit_rms_norm"``, without ``consistent_rms``. See
        :func:`~orscale_jax.scale_by_shape`.
    """

    consistent_rms: ArrayLike | None = CONSISTENT_RMS
    scale_mode: str = SCALE_MODE

    @functools.cached_property
    def scale(self) -> Scale:
        return Scale.of(self.consistent_rms, self.scale_mode)


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class OrScaleArguments(MuonArguments):
    r"""The arguments of OrScale, which has a trust ratio.

    Args:
      calibrate: Whether c is anchored. False: :math:`c = 1`.
      anchor: The rule that sets c: ``"first"`` as in the paper, or ``"largest"`` for
        matrices whose first direction has low rank. See
        :func:`~orscale_jax.scale_by_calibrated_trust_ratio`.
      anchor_steps: The number of directions that ``"largest"`` considers, at least 1.
      r_min: Lower bound of the ratio.
      r_max: Upper bound of the ratio, at least 0.
      eps: The floor :math:`\varepsilon`, at least 0.
    """

    calibrate: bool = True
    anchor: str = trust_ratio.ANCHOR
    anchor_steps: ArrayLike = trust_ratio.ANCHOR_STEPS
    r_min: ArrayLike = trust_ratio.R_MIN
    r_max: ArrayLike = trust_ratio.R_MAX
    eps: ArrayLike = trust_ratio.EPS

    @functools.cached_property
    def ratio(self) -> TrustRatio:
        rule = self.calibrate, self.anchor, self.anchor_steps
        return TrustRatio(*rule, self.r_min, self.r_max, self.eps)


def _spec_of(node: Any) -> Any:
    sharding = getattr(node, "sharding", node)
    return sharding.spec if isinstance(sharding, NamedSharding) else node


def takes(
    arguments: Callable[Parameters, Given],
) -> Callable[[Callable[[Given], Optimizer]], Callable[Parameters, Optimizer]]:
    """Make an optimizer of a function of such arguments, with their descriptions.

    The descriptions come from the docstrings of the class and of its bases, and stand
    before the section "Returns" of the function's own docstring.
    """
    signature = inspect.signature(arguments)
    mro: tuple[type, ...] = getattr(arguments, "__mro__", ())
    docs = [inspect.cleandoc(cls.__doc__ or "") for cls in reversed(mro)]
    shared, *own = [doc.split("Args:\n")[1] for doc in docs if "Args:\n" in doc]
    # Those of the step stand together, before those of AdamW.
    of_step, adam, rest = shared.partition("  adam_learning_rate: ")
    described = [of_step.rstrip(), *own, adam + rest]
    fields, count = [*signature.parameters.values()], len(dataclasses.fields(Arguments))
    first = [*signature.parameters].index("adam_learning_rate")
    ordered = fields[:first] + fields[count:] + fields[first:count]
    signature = signature.replace(parameters=ordered)

    def decorate(make: Callable[[Given], Optimizer]) -> Callable[Parameters, Optimizer]:
        name = make.__name__  # Copies of a closure may wrap its functions.

        @functools.wraps(make)
        def optimizer(*args: Parameters.args, **kwargs: Parameters.kwargs) -> Optimizer:
            validate.bound(name, signature, args, kwargs)
            return make(arguments(*args, **kwargs))

        head, returns, rest = (inspect.getdoc(make) or "").partition("\nReturns:")
        parts = [f"{head.rstrip()}\n\nArgs:", *described, f"{returns}{rest}"]
        optimizer.__doc__ = "\n".join(parts)
        result = "optax.GradientTransformationExtraArgs"
        shown = signature.replace(return_annotation=result)
        optimizer.__signature__ = shown  # type: ignore[attr-defined]
        return optimizer

    return decorate


@takes(OrScaleArguments)
def orscale(h: OrScaleArguments) -> Optimizer:
    r"""OrScale: Muon with a calibrated trust ratio for each matrix.

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

    where c is set at the first step of the matrix, so that the first r is 1: that step
    is the same as with :func:`muon`. AdamW trains all other parameters.

    The defaults are the paper's configuration for language models. Its configuration for
    vision is ``orscale(lr, consistent_rms=None, calibrate=False, r_min=0.5, r_max=1.5)``.

    Returns:
      A transformation. Its updates have the shapes of the gradients. As in Optax, their
      dtype is the one to which gradient, parameter and ``mu_dtype`` promote. The state
      holds c, r and the norms of each matrix, in float32 (float64 for float64), and
      :func:`orscale_jax.diagnostics.read` gives them by name.

    Raises:
      ValueError: At once, if a hyperparameter is not valid. From ``init``, if a leaf is
        ambiguous or does not fit its dimension numbers. From ``update``, if ``params`` is
        missing, a gradient has another shape than its parameter, or ``init`` would not
        make this state of these parameters. The checks run while JAX traces.
      TypeError: If an argument is not known. The message suggests the nearest one.

    Example:
      >>> import jax, jax.numpy as jnp, optax
      >>> from orscale_jax import diagnostics, orscale
      >>> optimizer = orscale(learning_rate=1e-3)
      >>> params = {"kernel": jnp.ones((4, 8)), "bias": jnp.zeros(8)}
      >>> state = optimizer.init(params)
      >>> grads = jax.tree.map(jnp.ones_like, params)
      >>> updates, state = optimizer.update(grads, state, params)
      >>> params = optax.apply_updates(params, updates)
      >>> print(diagnostics.read(state, params).trust_ratio["kernel"].round(4))
      1.0

    References:
      Lou & You, *OrScale: Orthogonalized Optimization with Layer-Wise Trust-Ratio
      Scaling*, Algorithm 1.
    """
    return build(orscale_chain, h)


@dataclasses.dataclass(frozen=True)
class Stages:
    """What an optimizer of the matrices is chained from, for given parameters."""

    h: Arguments
    specs: ParamSpecs
    matrices: Matrices  # Which of the parameters are matrices.
    mask: PyTree | None  # Which of them decay.

    @property
    def momentum(self) -> Stage:
        """G to M̃."""
        h = self.h
        return momentum_stage(h.momentum, h.nesterov, h.mu_dtype, self.matrices)

    @property
    def orthogonalize(self) -> Stage:
        """M̃ to Q."""
        return self.polar(self.matrices)

    def polar(self, matrices: Matrices) -> Stage:
        """M̃ to Q, for any of the matrices."""
        return orthogonalize_stage(self.h.polar_options, self.specs, matrices)

    def direction(self, q: Stage) -> Stage:
        """M̃ to D = λW + sQ, and to D = 0 where M̃ is zero, with a stage from M̃ to Q."""
        decay = decay_stage(self.h.weight_decay, self.mask)
        stages = q, shape_stage(self.h.scale, self.matrices), decay
        return where_nonzero_stage(optax.chain(*stages), self.matrices)

    @property
    def scale_by_trust_ratio(self) -> Stage:
        """D to r̂D."""
        assert self.h.ratio is not None
        return trust_ratio_stage(self.h.ratio, self.matrices)

    @property
    def scale_by_learning_rate(self) -> Stage:
        return optax.scale_by_learning_rate(self.h.learning_rate)


# An optimizer of matrices from its stages. The nesting of chains is the state's tree:
# changing it breaks checkpoints.
Chain: TypeAlias = Callable[[Stages], Stage]


def orscale_chain(s: Stages, q: Stage | None = None) -> Stage:
    """OrScale: M ← μM + G, D = λW + sQ and W ← W − η r̂ D, with Q or another direction."""
    return optax.chain(
        s.momentum,  # M̃ = μM + G
        s.direction(q or s.orthogonalize),  # D = λW + sQ, Q = NS(M̃)
        s.scale_by_trust_ratio,  # r̂D
        s.scale_by_learning_rate,  # −η r̂D
    )


def muon_chain(s: Stages, q: Stage | None = None) -> Stage:
    """Muon: OrScale without the ratio, r̂ = 1."""
    return optax.chain(
        s.momentum, s.direction(q or s.orthogonalize), s.scale_by_learning_rate
    )


def adamw_chain(h: Arguments, mask: PyTree | None) -> Stage:
    """:func:`optax.adamw`, for the parameters that are no matrices."""
    moments = optax.scale_by_adam(
        b1=h.adam_b1,
        b2=h.adam_b2,
        eps=h.adam_eps,
        eps_root=h.adam_eps_root,
        nesterov=h.adam_nesterov,
    )
    adam = adam_stage(moments, float_dtype(h.mu_dtype))
    return optax.chain(
        adam if h.adam_moments_dtype is None else int8_adam_stage(adam),
        decay_stage(h.adam_decay, mask),
        optax.scale_by_learning_rate(h.adam_rate),
    )


def build(chain: Chain, h: Arguments) -> Optimizer:
    """The optimizer whose matrices take a chain of stages, and all others AdamW."""
    specs = ParamSpecs(h.param_shardings)

    def optimizer_of(params: PyTree) -> Optimizer:
        # Functions among the arguments see the whole tree, not just one group of it.
        matrices = Matrices.of(h.weight_dimension_numbers, params)
        mask = resolve_mask(h.weight_decay_mask, params, matrices.mask)
        matrix = chain(Stages(h, specs, matrices, mask))
        labels = jax.tree.map(
            lambda is_matrix: MATRIX if is_matrix else ADAMW, matrices.mask
        )
        # Labels replace whole boxes: no box is without an array. In a function, since
        # optax.partition would call a tree of labels that is callable.
        return optax.partition(
            {MATRIX: matrix, ADAMW: adamw_chain(h, mask)}, lambda _: labels
        )

    optimizer_of(())  # Checks the arguments of the stages.
    return on_parameters(optimizer_of, float_dtype(h.mu_dtype))


@takes(MuonArguments)
def muon(h: MuonArguments) -> Optimizer:
    r"""Muon for the matrices, and AdamW for all other parameters.

    Each matrix :math:`W \in \mathbb{R}^{m \times n}` with gradient G takes the step

    .. math::

      M &\leftarrow \mu M + G, \\
      \tilde M &= \mu M + G, \\
      Q &\approx U V^\top \text{ for } \tilde M = U \Sigma V^\top, \\
      s &= 0.2 \sqrt{\max(m, n)}, \\
      W &\leftarrow W - \eta \, (\lambda W + s Q),

    with the learning rate :math:`\eta`, the momentum :math:`\mu` and the weight decay
    :math:`\lambda`. Newton–Schulz iterations compute the polar factor Q. The entries of a
    step have a root mean square of :math:`0.2 \eta`, as with Moonlight. Start with twice
    AdamW's rate, and pass AdamW's ``weight_decay``: ``muon(2 * lr, weight_decay=wd)``.

    ``consistent_rms=None`` makes s = 1. ``scale_mode="shape_scaling"`` is the scale of
    Keller Jordan's code and of :func:`optax.contrib.muon`, which has other defaults: no
    decay, ``adam_b2=0.999`` and ``adam_nesterov=True``, and embeddings and heads are
    matrices. Its ``consistent_rms=None`` means ``scale_mode="shape_scaling"``.

    Returns:
      A transformation. Its updates have the shapes of the gradients. As in Optax, their
      dtype is the one to which gradient, parameter and ``mu_dtype`` promote.

    Raises:
      ValueError: At once, if a hyperparameter is not valid. From ``init``, if a leaf is
        ambiguous or does not fit its dimension numbers. From ``update``, if ``params`` is
        missing, a gradient has another shape than its parameter, or ``init`` would not
        make this state of these parameters.
      TypeError: If an argument is not known. The message suggests the nearest one.

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
    return build(muon_chain, h)
