"""OrScale for JAX: orthogonalized optimization with layer-wise trust-ratio scaling."""

from orscale_jax._attention import (
    AttentionHeads as AttentionHeads,
    QueryKey as QueryKey,
)
from orscale_jax._convert import convert_state as convert_state
from orscale_jax._describe import describe as describe
from orscale_jax._description import (
    Description as Description,
    ParameterRow as ParameterRow,
    Placed as Placed,
    Stack as Stack,
    Total as Total,
)
from orscale_jax._matrix import BlockDimensionNumbers as BlockDimensionNumbers
from orscale_jax._optimizers import muon as muon, orscale as orscale
from orscale_jax._polar import polar_factor as polar_factor
from orscale_jax._polar_express import (
    polar_express_coefficients as polar_express_coefficients,
)
from orscale_jax._qk_clip import QKClipState as QKClipState, qk_clip as qk_clip
from orscale_jax._rules import by_path as by_path
from orscale_jax._state_shardings import state_shardings as state_shardings
from orscale_jax._transforms import (
    CalibratedTrustRatioState as CalibratedTrustRatioState,
    FromFirstNonzeroUpdateState as FromFirstNonzeroUpdateState,
    from_first_nonzero_update as from_first_nonzero_update,
    orthogonalize as orthogonalize,
    scale_by_calibrated_trust_ratio as scale_by_calibrated_trust_ratio,
    scale_by_shape as scale_by_shape,
)

__version__ = "0.1.0"
