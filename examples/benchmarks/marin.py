"""marin's Muon for plain arrays, which multiplies in bfloat16; extra `clients-marin`."""

import optax
from levanter.optim.grugmuon import _grug_scale_with_muon as scale_by_grug_muon


def marin_muon(ns_steps: int) -> optax.GradientTransformation:
    """An optimizer with Jordan's coefficients, and the scale and decay of the others.

    It is what marin's configuration builds, without the last stage, which needs a mesh.
    """
    return optax.chain(
        scale_by_grug_muon(
            steps=ns_steps, use_kimi_scaling=True, coefficient_type="simple"
        ),
        optax.add_decayed_weights(0.1),
        optax.scale(-1e-3),
    )
