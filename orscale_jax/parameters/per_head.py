"""The public ``PerHead``: how to divide the projections of attention into heads."""

import dataclasses

from orscale_jax import _checks


@dataclasses.dataclass(frozen=True)
class PerHead:
    """How to divide the projections of attention into heads.

    Which axis is divided follows from the class of the layer
    (:func:`orscale_jax.diagnostics.layer_classes`): the outputs of queries, keys, values
    and of latent attention's projections up, and the inputs of the output projection.
    If that axis is one of the leaf's, it holds heads × features, head by head, and
    ``heads`` is needed. If it is several, the last holds the features, and the others
    count heads.

    Attributes:
      heads: The number of query heads. None: as the leaf's shape says.
      key_value_heads: The number of heads of keys and of values, if it is another one
        (grouped-query attention).
      heads_per_matrix: The number of neighbouring heads that are one matrix.
      key_value_features: The features of a key and of a value in each head of a fused
        projection up (``kv_up``, ``kv_b_proj``) of latent attention, which then is one
        matrix for the key and one for the value of each head. None: one for both.
      axis: The axis of the heads, for a leaf whose class does not say it. ``heads``
        is then the number of all heads in this leaf; None: as many as the axis is long.

    Raises:
      ValueError: If an attribute is not as described above.

    Example:
      >>> from orscale_jax import PerHead, by_path
      >>> llama = by_path({}, per_head=PerHead(heads=32, key_value_heads=8))
      >>> pairs = by_path({}, per_head=PerHead(heads=32, heads_per_matrix=2))
    """

    heads: int | None = None
    key_value_heads: int | None = None
    heads_per_matrix: int = 1
    key_value_features: tuple[int, int] | None = None
    axis: int | None = None

    def __post_init__(self) -> None:
        """Refuse attributes that no projection could fit."""
        _checks.count("heads_per_matrix", self.heads_per_matrix)
        for name in ("heads", "key_value_heads"):
            if getattr(self, name) is not None:
                _checks.count(name, getattr(self, name))
        if self.key_value_heads is not None and self.heads is None:
            _checks.refuse("heads", None, "pass it along with key_value_heads")
        features = self.key_value_features
        if features is not None and not (
            isinstance(features, tuple)
            and len(features) == 2
            and all(_checks.is_whole(size) and size > 0 for size in features)
        ):
            remedy = "pass (features of a key, features of a value), or None"
            _checks.refuse("key_value_features", features, remedy)
        if self.axis is not None and not _checks.is_whole(self.axis):
            _checks.refuse("axis", self.axis, "pass one axis, an integer")
