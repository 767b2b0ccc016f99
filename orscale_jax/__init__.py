"""Muon and OrScale for JAX: Optax optimizers for the weight matrices of a network."""

from orscale_jax import family as family
from orscale_jax.audit.certificate import (
    Certificate as Certificate,
    CertificateRow as CertificateRow,
    Sent as Sent,
    assert_same_on as assert_same_on,
)
from orscale_jax.audit.describe import describe as describe
from orscale_jax.audit.description import (
    Description as Description,
    ParameterRow as ParameterRow,
    Total as Total,
)
from orscale_jax.audit.plan import Group as Group, Plan as Plan
from orscale_jax.convert import (
    check_state as check_state,
    convert_state as convert_state,
)
from orscale_jax.family.neurons import NeuronRMSState as NeuronRMSState
from orscale_jax.family.sphere import InitialNormState as InitialNormState
from orscale_jax.layers import init_layers as init_layers, vjp_layers as vjp_layers
from orscale_jax.newton_schulz.coefficients import (
    polar_express_coefficients as polar_express_coefficients,
)
from orscale_jax.newton_schulz.polar import polar_factor as polar_factor
from orscale_jax.optimizers import muon as muon, orscale as orscale
from orscale_jax.parameters.dimension_numbers import (
    BlockDimensionNumbers as BlockDimensionNumbers,
)
from orscale_jax.parameters.path_rules import by_path as by_path
from orscale_jax.sharding.state_shardings import state_shardings as state_shardings
from orscale_jax.transforms.master_weights import (
    MasterWeightsState as MasterWeightsState,
    keep_master_weights as keep_master_weights,
    master_weights as master_weights,
)
from orscale_jax.transforms.momentum import (
    Int8AdamState as Int8AdamState,
    Int8TraceState as Int8TraceState,
)
from orscale_jax.transforms.orthogonalize import orthogonalize as orthogonalize
from orscale_jax.transforms.qk_clip import QKFactors as QKFactors, qk_clip as qk_clip
from orscale_jax.transforms.scale_by_path import scale_by_path as scale_by_path
from orscale_jax.transforms.stages import (
    scale_by_shape as scale_by_shape,
    where_nonzero as where_nonzero,
)
from orscale_jax.transforms.trust_ratio import (
    CalibratedTrustRatioState as CalibratedTrustRatioState,
    scale_by_calibrated_trust_ratio as scale_by_calibrated_trust_ratio,
)

__version__ = "0.1.0"
