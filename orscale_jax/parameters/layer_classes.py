"""The classes of layers, by the names of the parameters: query, router, expert up, ..."""

import collections
import re
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple, TypeAlias

import jax
import numpy as np
import optax

from orscale_jax import _checks
from orscale_jax.parameters import layer_names
from orscale_jax.parameters.default_rule import names_embedding_or_head
from orscale_jax.parameters.dimension_numbers import refuse_step_count
from orscale_jax.parameters.expressions import Expressions, leaves_and_masks
from orscale_jax.parameters.layer_names import keys_in_words
from orscale_jax.trees.boxes import PyTree, unbox
from orscale_jax.trees.names import dotted

ClassRules: TypeAlias = (
    Mapping[str, str]
    | Mapping[re.Pattern[str], str]
    | Mapping[str | re.Pattern[str], str]
    | Iterable[tuple[str | re.Pattern[str], str]]
)


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
    - ``"convolution"``, ``"embedding"``, ``"head"``, ``"norm"``, ``"bias"``;
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
      ``classes`` to :func:`summarize` or to :func:`orscale_jax.family.pooled`; the latter
      also takes this function itself.

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
    names = _Names.of(leaves)
    return jax.tree_util.tree_map_with_path(
        lambda path, _: given.get(dotted(path)) or names.layer_class(dotted(path)), bare
    )


class _ClassRules(Expressions[str]):
    """The rules of :func:`layer_classes`."""

    kind = "names of classes"

    @staticmethod
    def checked(name: str, value: Any) -> str:
        if not isinstance(value, str) or not value:
            _checks.refuse(name, value, "pass the name of a class")
        return value


class _Names(NamedTuple):
    """The names of all parameters, in words.

    Attributes:
      below: The keys below each path.
      shapes: The shapes of the arrays that are not masked, by path.
    """

    below: Mapping[str, set[str]]
    shapes: Mapping[str, tuple[int, ...]]

    @classmethod
    def of(cls, leaves: Iterable[tuple[Any, Any]]) -> "_Names":
        below = collections.defaultdict(set)
        shapes = {}
        for path, leaf in leaves:
            keys = keys_in_words(dotted(path))
            if not isinstance(leaf, optax.MaskedNode):
                shapes[".".join(keys)] = np.shape(leaf)
            for depth, key in enumerate(keys):
                below[".".join(keys[:depth])].add(key)
        return cls(below, shapes)

    def layer_class(self, path: str) -> str:
        """The class of the parameter with a dotted path."""
        keys = keys_in_words(path)
        for layer, expression in layer_names.BY_PATH:
            if re.search(expression, ".".join(keys)):
                return layer
        if any(map(names_embedding_or_head, path.split("."))):
            return "embedding"
        end = len(keys)
        while end > 1 and layer_names.ARRAY.fullmatch(keys[end - 1]):
            end -= 1
        return self._by_name(keys[:end], keys[end:])

    def _by_name(self, keys: list[str], array: list[str]) -> str:
        """The class, by the name of a module and the array's keys below it."""
        beside = self._beside(keys[:-1], array)
        mlp = _kind_of_mlp(keys, beside)
        within = _part(keys, beside, mlp)
        name = " ".join(keys[-2:] if keys[-1:] and keys[-1].isdigit() else keys[-1:])
        for rule in layer_names.BY_NAME:
            if (
                re.fullmatch(rule.within, within)
                and re.search(rule.name, name)
                and re.search(rule.beside, beside)
            ):
                return rule.layer.format(mlp=mlp)
        return "other"

    def _beside(self, above: list[str], array: list[str]) -> str:
        """The keys in a place, and whether w3 has another shape than w1 and w2."""
        w1, w2, w3 = (
            self.shapes.get(".".join([*above, key, *array])) for key in ("w1", "w2", "w3")
        )
        alike = w1 is not None and w3 is not None and w1 == w2 != w3
        return "|".join(sorted(self.below[".".join(above)]) + ["w1 like w2"] * alike)


def _kind_of_mlp(keys: list[str], beside: str) -> str:
    if any(map(layer_names.SHARED.search, keys)):
        return "shared expert"
    mixture = any(map(layer_names.EXPERT.search, keys))
    stacked = layer_names.EXPERTS_THEMSELVES.match(beside)
    return "routed expert" if mixture or stacked else "mlp"


def _part(keys: list[str], beside: str, mlp: str) -> str:
    """The part of the model, by the last key that names one, or by the keys beside."""
    for key in reversed(keys):
        if layer_names.ATTENTION.search(key):
            return "attention"
        if layer_names.MLP.search(key) or layer_names.SHARED.search(key):
            return mlp
    return "attention block" if layer_names.QUERY_AND_KEY.match(beside) else "block"
