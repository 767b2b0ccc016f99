"""Rules on which projections of attention are divided into heads, for a whole tree."""

import collections
import dataclasses
import re
from collections.abc import Iterable, Mapping
from typing import Any, TypeAlias

import jax
import numpy as np

from orscale_jax import _checks
from orscale_jax.parameters.classes_by_name import ClassesByName, module_and_array
from orscale_jax.parameters.dimension_numbers import DimensionNumbers
from orscale_jax.parameters.expressions import ByExpression, Expressions
from orscale_jax.parameters.per_head import PerHead
from orscale_jax.parameters.projections import KINDS, Kind, Misfit, Projection
from orscale_jax.trees.names import Path, names_on, quoted
from orscale_jax.trees.nodes import is_masked

HeadRule: TypeAlias = bool | int | PerHead
PerHeadRules: TypeAlias = HeadRule | ByExpression[HeadRule]

# Of latent attention: one rotated key for all heads.
_SHARED = re.compile(r"\b(rope|rotary|pe)\b")
# Classes whose heads have the same number of features.
_SAME_FEATURES = (
    ("attention query", "attention key"),
    ("attention output", "attention value"),
)


_Projections: TypeAlias = dict[tuple[Path, str], Projection]


@dataclasses.dataclass(frozen=True)
class HeadRules(Expressions[PerHead | None]):
    """The rules of ``per_head``: None for a projection that stays whole.

    Attributes:
      default: The rule of projections of attention that no expression matches.
    """

    default: PerHead | None = dataclasses.field(default_factory=PerHead)
    kind = "numbers of heads"

    @staticmethod
    def checked(name: str, value: Any) -> PerHead | None:
        """Refuse what says nothing about heads."""
        if isinstance(value, bool):
            return PerHead() if value else None
        if isinstance(value, PerHead):
            return value
        if not _checks.is_whole(value) or value < 1:
            remedy = "pass a number of heads, an orscale_jax.PerHead, True or False"
            _checks.refuse(name, value, remedy)
        return PerHead(heads=int(value))

    @classmethod
    def of(cls, per_head: PerHeadRules) -> "HeadRules":
        """Check the argument ``per_head``."""
        values = str, np.ndarray, jax.Array
        if isinstance(per_head, Iterable) and not isinstance(per_head, values):
            return cls.compile(per_head, "per_head", "per_head")
        return cls((), "per_head", cls.checked("per_head", per_head))

    def divide(
        self,
        leaves: Iterable[tuple[Any, Any]],
        numbers: Mapping[Path, Any],
        heads_of: Mapping[Path, int],
    ) -> dict[Path, DimensionNumbers]:
        """The dimension numbers of the projections that are divided into heads, by path.

        Args:
          leaves: All leaves and masked nodes, with their paths.
          numbers: The dimension numbers of the leaves without heads.
          heads_of: The numbers of heads that modules declare, by path.

        Raises:
          ValueError: If no projection is divided, an expression applies to no matrix, or
            a projection cannot be divided (one error lists all of these).
        """
        if not self.pairs and self.default is None:
            return {}
        leaves = list(leaves)
        projections = self._projections(leaves, numbers, heads_of)
        if not projections and not any(map(_is_masked, leaves)):
            raise ValueError(
                "per_head divides no parameter: none has the class of a projection of "
                "attention (orscale_jax.diagnostics.layer_classes). Leave per_head out, "
                'or pass {"expression for a path": orscale_jax.PerHead(axis=...)}.'
            )
        divided = _divided(projections)
        _check_features(projections)
        return divided

    def _projections(
        self,
        leaves: list[tuple[Any, Any]],
        numbers: Mapping[Path, Any],
        heads_of: Mapping[Path, int],
    ) -> _Projections:
        """The projections to divide, by path and class."""
        matrices = [
            (path, leaf)
            for path, leaf in leaves
            if isinstance(numbers.get(names_on(path)), DimensionNumbers)
        ]
        # Expressions may be meant for what is masked.
        given = self.values([*matrices, *filter(_is_masked, leaves)])
        names = ClassesByName.of(leaves)
        found: _Projections = {}
        for entries, leaf in matrices:
            path, layer = names_on(entries), names.layer_class(entries)
            rule = given.get(path, self.default)
            if rule is None:
                continue
            if rule.heads is None and rule.axis is None and path in heads_of:
                rule = dataclasses.replace(rule, heads=heads_of[path])
            shape = np.shape(leaf)
            kind = _kind(entries, shape, layer, rule, path in given)
            if kind is not None:
                found[path, layer] = Projection(entries, shape, numbers[path], kind, rule)
        return found


def _is_masked(leaf: tuple[Any, Any]) -> bool:
    return is_masked(leaf[1])


def _kind(
    path: Any, shape: tuple[int, ...], layer: str, rule: PerHead, named: bool
) -> Kind | None:
    """What a projection holds; None: it has no heads of its own."""
    if rule.axis is not None:
        return Kind() if named or layer in KINDS else None
    if layer == "attention qkvo" or (named and layer == "other"):
        raise ValueError(
            f"per_head does not know along which axis the heads of {quoted(path)} of "
            f'shape {shape}, class {layer!r}, lie: pass per_head={{"expression for its '
            'path": rule} with orscale_jax.PerHead(axis=...), or with False if it stays '
            "whole."
        )
    if layer == "attention key" and _SHARED.search(module_and_array(path)[0][-1]):
        return None
    return KINDS.get(layer)


def _check_features(projections: _Projections) -> None:
    """Refuse heads of other sizes in queries than in keys, or in outputs than in values.

    A number of heads may divide the features of both where it is not that of one.
    """
    beside: dict[Path, dict[str, list[Projection]]] = collections.defaultdict(dict)
    for (_, layer), projection in projections.items():
        module, _ = module_and_array(projection.path)
        beside[module[:-1]].setdefault(layer, []).append(projection)
    for layers in beside.values():
        for first, second in _SAME_FEATURES:
            match layers.get(first), layers.get(second):
                case [one], [other]:
                    _check_same_features(one, other)


def _check_same_features(one: Projection, other: Projection) -> None:
    if one.features_of_head != other.features_of_head:
        raise ValueError(
            f"by per_head, a head has {one.features_of_head} features in "
            f"{quoted(one.path)} of shape {one.shape}, and {other.features_of_head} in "
            f"{quoted(other.path)} of shape {other.shape}: correct heads or "
            "key_value_heads of orscale_jax.PerHead."
        )


def _divided(projections: _Projections) -> dict[Path, DimensionNumbers]:
    divided, misfits = {}, []
    for (path, layer), projection in projections.items():
        try:
            divided[path] = projection.by_head()
        except Misfit as misfit:
            leaf = f"{quoted(projection.path)} of shape {projection.shape}"
            misfits.append(f"  {leaf}, class {layer!r}: {misfit}")
    if misfits:
        raise ValueError(
            "per_head does not divide these parameters into heads:\n"
            + "\n".join(misfits)
            + '\nPass per_head={"expression for its path": rule} for each: an '
            "orscale_jax.PerHead with these arguments, or False if it stays whole."
        )
    return divided
