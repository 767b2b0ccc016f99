"""OrScale for JAX: orthogonalized optimization with layer-wise trust-ratio scaling."""

from orscale_jax import ablations as ablations, family as family
from orscale_jax._convert import convert_state as convert_state
from orscale_jax._optimizers import muon as muon, orscale as orscale
from orscale_jax.audit.describe import describe as describe
from orscale_jax.audit.description import Description as Description
from orscale_jax.audit.plans import (
    Placed as Placed,
    Stack as Stack,
    StepCost as StepCost,
)
from orscale_jax.audit.rows import ParameterRow as ParameterRow, Total as Total
from orscale_jax.newton_schulz.polar import polar_factor as polar_factor
from orscale_jax.newton_schulz.polar_express import (
    polar_express_coefficients as polar_express_coefficients,
)
from orscale_jax.parameters.dimension_numbers import (
    BlockDimensionNumbers as BlockDimensionNumbers,
)
from orscale_jax.parameters.path_rules import by_path as by_path
from orscale_jax.sharding.state_shardings import state_shardings as state_shardings
from orscale_jax.transforms.decay import (
    add_cautious_decayed_weights as add_cautious_decayed_weights,
)
from orscale_jax.transforms.first_update import (
    FromFirstNonzeroUpdateState as FromFirstNonzeroUpdateState,
    from_first_nonzero_update as from_first_nonzero_update,
)
from orscale_jax.transforms.initial_norm import (
    InitialNormState as InitialNormState,
    keep_initial_norm as keep_initial_norm,
)
from orscale_jax.transforms.master_weights import (
    MasterWeightsState as MasterWeightsState,
    keep_master_weights as keep_master_weights,
    master_weights as master_weights,
)
from orscale_jax.transforms.momentum import Int8TraceState as Int8TraceState
from orscale_jax.transforms.neuron_rms import (
    NeuronRMSState as NeuronRMSState,
    scale_by_neuron_rms as scale_by_neuron_rms,
)
from orscale_jax.transforms.normalize import normalize_vectors as normalize_vectors
from orscale_jax.transforms.orthogonalize import orthogonalize as orthogonalize
from orscale_jax.transforms.pooled_ratio import pool_trust_ratios as pool_trust_ratios
from orscale_jax.transforms.qk_clip import (
    AttentionHeads as AttentionHeads,
    QKClipState as QKClipState,
    QueryKey as QueryKey,
    qk_clip as qk_clip,
)
from orscale_jax.transforms.recorded_ratio import (
    scale_by_recorded_trust_ratio as scale_by_recorded_trust_ratio,
)
from orscale_jax.transforms.shape import scale_by_shape as scale_by_shape
from orscale_jax.transforms.trust_ratio import (
    CalibratedTrustRatioState as CalibratedTrustRatioState,
    LargestDirectionState as LargestDirectionState,
    scale_by_calibrated_trust_ratio as scale_by_calibrated_trust_ratio,
)

__version__ = "0.1.0"
