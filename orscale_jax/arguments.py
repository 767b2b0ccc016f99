"""The arguments of the optimizers: names, types, defaults, descriptions and checks."""

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
from orscale_jax.distributed.engine import PolarOptions
from orscale_jax.distributed.slow_links import SlowAxes, without_devices
from orscale_jax.newton_schulz.coefficients import Coefficients
from orscale_jax.parameters.dimension_numbers import WeightDimensionNumbers
from orscale_jax.sharding.param_shardings import ParamShardings
from orscale_jax.transforms.matrices import Optimizer
from orscale_jax.transforms.momentum import is_int8
from orscale_jax.transforms.orthogonalize import polar_options
from orscale_jax.transforms.stages import (
    CONSISTENT_RMS,
    MATRICES_ONLY,
    SCALE_MODE,
    WEIGHT_DECAY,
    Mask,
    Scale,
)
from orscale_jax.transforms.trust_ratio import (
    ANCHOR,
    ANCHOR_STEPS,
    EPS,
    R_MAX,
    R_MIN,
    TrustRatio,
)
from orscale_jax.trees.boxes import is_box

ScalarOrSchedule: TypeAlias = ArrayLike | optax.Schedule
Parameters = ParamSpec("Parameters")
Given = TypeVar("Given", bound="Arguments")


# Hashed by identity: arrays and dictionaries among the arguments have no hash.
@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Arguments:
    r"""The arguments of every optimizer.

    Args:
      learning_rate: :math:`\eta`, at least 0. A number, a traced scalar or a schedule.
      momentum: :math:`\mu` in [0, 1).
      nesterov: Whether Q is the polar factor of :math:`\tilde M` (True) or of M.
      mu_dtype: The dtype of the momentum, and of AdamW's first moment, in the state: a
        float of 16 bits or more. None: the dtype of the parameter. float16 overflows if
        gradients stay above :math:`65504 (1 - \mu)`. ``"int8"`` keeps the momentum of
        matrices in blocks of 8-bit integers (:class:`~orscale_jax.Int8TraceState`), and
        treats AdamW's moments as None does. The step uses the momentum before it is
        rounded. Derivatives do not pass through the integers.
      weight_decay: :math:`\lambda`, at least 0. A number or a schedule. A step shrinks
        the parameter by :math:`\eta \lambda`, times :math:`\hat r` if there is a ratio.
      weight_decay_mask: Which parameters decay. None: all of them. ``"matrices"``: only
        the matrices. Or a tree of booleans, a prefix of one, or a callable from the
        parameters to one.
      ns_steps: The number k of Newton–Schulz steps, at least 1.
      ns_coeffs: The coefficients: ``"polar_express"``, ``"jordan"``, ``"dion"``,
        ``"deepseek_v4"`` (with ``ns_steps=10``) or a table of your own. See
        :func:`~orscale_jax.polar_factor`.
      ns_dtype: The dtype of the operands of Newton–Schulz's products, which accumulate
        in float32. None: float16 on GPU, bfloat16 on TPU, float32 on CPU.
      ns_preconditioning: ``"frobenius"`` or ``"aol"``, which saves a step and changes Q;
        see :func:`~orscale_jax.polar_factor`.
      weight_dimension_numbers: Which parameters are matrices, along which axes. A tree
        (or a prefix of one, or a callable from the parameters to one) of
        :class:`optax.contrib.MuonDimensionNumbers`, or of
        :class:`~orscale_jax.BlockDimensionNumbers` for fused weights, with None for
        AdamW. Axes that they do not name are batch axes: each matrix has its own Q, c and
        r. :func:`~orscale_jax.by_path` and the functions for Flax, Equinox and Haliax
        make them.

        If the argument is None, a 2-D leaf is a matrix, unless its names say that it is
        an embedding, an output head, a norm, a scale or a bias
        (:func:`~orscale_jax.diagnostics.layer_classes`; ``docs/parameters.md`` lists the
        names). AdamW trains such leaves and leaves of fewer axes, and leaves of more axes
        raise an error. A 2-D router or fused projection is then one matrix, and the
        column "check" of :func:`~orscale_jax.describe` flags it.
      adam_learning_rate: The learning rate or schedule of AdamW. None:
        ``learning_rate``.
      adam_b1: AdamW's decay rate of the first moment, in [0, 1).
      adam_b2: AdamW's decay rate of the second moment, in [0, 1).
      adam_eps: AdamW's :math:`\varepsilon`, at least 0.
      adam_eps_root: A number that AdamW adds to the second moment under the root, at
        least 0. Pass more than 0 if you need derivatives of updates, which are otherwise
        NaN where a gradient is 0.
      adam_nesterov: Whether AdamW uses Nesterov's momentum as well, as
        :func:`optax.contrib.muon` does by default.
      adam_weight_decay: The weight decay of the parameters that AdamW trains: a number
        or a schedule. None: ``weight_decay``.
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
    momentum: ArrayLike = 0.95
    nesterov: bool = True
    mu_dtype: DTypeLike | None = None
    weight_decay: ScalarOrSchedule = WEIGHT_DECAY
    weight_decay_mask: Mask | None = None
    ns_steps: int | jax.Array = 5
    ns_coeffs: Coefficients = "polar_express"
    ns_dtype: DTypeLike | None = None
    ns_preconditioning: str = "frobenius"
    weight_dimension_numbers: WeightDimensionNumbers = None
    adam_learning_rate: ScalarOrSchedule | None = None
    adam_b1: ArrayLike = 0.9
    adam_b2: ArrayLike = 0.95
    adam_eps: ArrayLike = 1e-8
    adam_eps_root: ArrayLike = 0.0
    adam_nesterov: bool = False
    adam_weight_decay: ScalarOrSchedule | None = None
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
        number("adam_b2", self.adam_b2, below=1)
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
        return polar_options(*settings, self.mesh, self.slow_axes)

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
    anchor: str = ANCHOR
    anchor_steps: ArrayLike = ANCHOR_STEPS
    r_min: ArrayLike = R_MIN
    r_max: ArrayLike = R_MAX
    eps: ArrayLike = EPS

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
    described = [doc.split("Args:\n")[1] for doc in docs if "Args:\n" in doc]

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
