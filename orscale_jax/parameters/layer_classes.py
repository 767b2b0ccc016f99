"""The classes of layers, by the names of the parameters: query, router, expert up, ..."""

from typing import Any, TypeAlias

import jax

from orscale_jax import _checks
from orscale_jax.parameters.classes_by_name import ClassesByName
from orscale_jax.parameters.dimension_numbers import refuse_step_count
from orscale_jax.parameters.expressions import ByExpression, Expressions
from orscale_jax.trees.boxes import PyTree, unbox
from orscale_jax.trees.names import names_on
from orscale_jax.trees.nodes import leaves_and_masks

ClassRules: TypeAlias = ByExpression[str]


def layer_classes(params: PyTree, rules: ClassRules | None = None) -> PyTree:
    r"""Name the class of layer that each parameter belongs to, such as "attention key".

    The class follows from the names on the parameter's path and from those beside it. The
    classes are:

    - ``"attention query"``, ``"attention key"``, ``"attention value"``, ``"attention
      output"``, ``"attention gate"``; fused, ``"attention qkv"``, ``"attention kv"`` and
      ``"attention qkvo"``; of latent attention, ``"attention latent down"`` and
      ``"attention latent up"``;
    - ``"mlp up"``, ``"mlp gate"``, ``"mlp down"``, and ``"mlp gate up"`` if fused; the
      same with ``"routed expert"`` and ``"shared expert"`` for ``"mlp"``; ``"router"``;
    - ``"convolution"``, ``"embedding"``, ``"head"``, ``"norm"``, ``"bias"``; ``"scale"``:
      gains and offsets outside norms, such as LayerScale's ``gamma``;
    - ``"other"``: everything else.

    Some names depend on their neighbours. A ``gate`` is the router if there are experts
    beside it, or if it is in a mixture without ``up`` and ``down``; otherwise it is half
    of a gated MLP. ``w1``, ``w2`` and ``w3`` are gate, down and up, as in Llama, or gate,
    up and down if only ``w3`` has another shape. Two numbered layers, such as ``Dense_0``
    and ``Dense_1``, are up and down in an MLP, and qkv and output in attention.

    Args:
      params: The parameters, which may be abstract, boxed or masked.
      rules: Mapping, or sequence of pairs, from regular expressions over the paths, as in
        :func:`orscale_jax.by_path`, to names of classes, which may be new. The first that
        matches applies; where none does, the names decide as above.

    Returns:
      A tree like the parameters, without boxes, with a string for each leaf. Pass it as
      ``classes`` to :func:`summarize`.

    Raises:
      ValueError: If ``rules`` is not valid, or an expression applies to no parameter.

    Example:
      >>> import jax.numpy as jnp
      >>> from orscale_jax.diagnostics import layer_classes
      >>> params = {
      ...     "attention": {"query": jnp.ones((8, 8)), "out": jnp.ones((8, 8))},
      ...     "moe": {"gate": jnp.ones((8, 4)), "experts": {"up": jnp.ones((4, 8, 16))}},
      ...     "mixer": jnp.ones((8, 8)),
      ... }
      >>> layer_classes(params)["attention"]
      {'out': 'attention output', 'query': 'attention query'}
      >>> layer_classes(params)["moe"]
      {'experts': {'up': 'routed expert up'}, 'gate': 'router'}
      >>> layer_classes(params)["mixer"], layer_classes(params, {"mixer": "ssm"})["mixer"]
      ('other', 'ssm')
    """
    compiled = _ClassRules.compile(
        () if rules is None else rules, "rules", "layer_classes"
    )
    bare = unbox(params)
    if not jax.tree.leaves(bare):
        return bare
    refuse_step_count(bare, "classes")
    leaves = leaves_and_masks(bare)
    given = compiled.values(leaves)
    names = ClassesByName.of(leaves)
    return jax.tree.map_with_path(
        lambda path, _: given.get(names_on(path)) or names.layer_class(path), bare
    )


class _ClassRules(Expressions[str]):
    """The rules of :func:`layer_classes`."""

    kind = "names of classes"

    @staticmethod
    def checked(name: str, value: Any) -> str:
        if not isinstance(value, str) or not value:
            _checks.refuse(name, value, "pass the name of a class")
        return value
