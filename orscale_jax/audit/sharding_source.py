"""Where an optimizer finds the shardings of the parameters on a mesh."""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import optax
from jax.sharding import Mesh, NamedSharding

from orscale_jax.parameters.blocks import LeafAxes
from orscale_jax.sharding import meshes
from orscale_jax.sharding.param_shardings import ParamSpecs
from orscale_jax.trees.boxes import PyTree, unbox

TYPES = "from the types of the arrays"


def sharding_source(
    specs: Sequence[ParamSpecs], params: PyTree, axes_of: Mapping[Any, LeafAxes]
) -> str:
    """Say where the shardings of the matrices come from.

    Args:
      specs: What the optimizer's parts know of the shardings of its parameters.
      params: The parameters.
      axes_of: The axes of the matrices, by path.

    Returns:
      :data:`TYPES` on Explicit axes. On Auto axes, the sources of
      :meth:`ParamSpecs.source`; empty without an optimizer that has any.
    """
    matrices = jax.tree.map_with_path(
        lambda path, leaf: leaf if path in axes_of else optax.MaskedNode(), unbox(params)
    )
    shardings = (getattr(leaf, "sharding", None) for leaf in jax.tree.leaves(matrices))
    found = next((s.mesh for s in shardings if isinstance(s, NamedSharding)), None)
    if found is None:
        return ""
    mesh = found.abstract_mesh if isinstance(found, Mesh) else found
    if not meshes.is_auto(mesh):
        return TYPES
    return " and ".join(sorted({known.source(mesh, matrices) for known in specs}))
