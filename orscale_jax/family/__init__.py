r"""Relatives of OrScale, which add a stage to OrScale or Muon, or replace one.

Each function below is a chain of the stages of :func:`orscale_jax.orscale`, with
the same Newton–Schulz, the same meshes and the same AdamW: a comparison with OrScale or
Muon differs in one stage and nothing else.

==================  ==================================================================
hyperball           Muon on the sphere of each matrix's initial norm (MuonH)
normuon             Muon that divides neurons by their running root mean square
orscale_on_normuon  OrScale with NorMuon's direction
aurora              Muon with a Q whose vectors on the longer side have nearly one norm
==================  ==================================================================

All are optimizers with the arguments of :func:`orscale_jax.orscale`, without those of
stages that they do not have, and with a few more.
"""

from orscale_jax.family.balanced import aurora as aurora
from orscale_jax.family.neurons import (
    normuon as normuon,
    orscale_on_normuon as orscale_on_normuon,
)
from orscale_jax.family.sphere import hyperball as hyperball
