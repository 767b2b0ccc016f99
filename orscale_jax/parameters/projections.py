"""One projection of attention: which of its axes hold heads, and its matrices by head."""

import dataclasses
import itertools
import math
import re
from typing import Any, NamedTuple

from optax.contrib import MuonDimensionNumbers

from orscale_jax.parameters.classes_by_name import module_and_array
from orscale_jax.parameters.dimension_numbers import (
    BlockDimensionNumbers,
    DimensionNumbers,
    block_sizes,
)
from orscale_jax.parameters.module_types import as_axis, as_tuple
from orscale_jax.parameters.per_head import PerHead


class Kind(NamedTuple):
    """What the projections of a class hold.

    Attributes:
      queries: How many times the query heads.
      keys_and_values: How many times the heads of keys or values.
      inputs: Whether the heads are inputs, as of the output projection.
    """

    queries: int = 1
    keys_and_values: int = 0
    inputs: bool = False

    @property
    def parts(self) -> int:
        """The number of projections that are fused."""
        return self.queries + self.keys_and_values


KINDS = {
    "attention query": Kind(),
    "attention key": Kind(0, 1),
    "attention value": Kind(0, 1),
    "attention qkv": Kind(1, 2),
    "attention kv": Kind(0, 2),
    "attention latent up": Kind(),
    "attention output": Kind(inputs=True),
}
_KEYS_AND_VALUES = re.compile(r"\b[wu]?kv\b")


class Misfit(ValueError):
    """The reason why a projection cannot be divided."""


class Blocks(NamedTuple):
    """Blocks along one axis of a leaf, of these sizes."""

    axis: int
    sizes: tuple[int, ...]

    @property
    def ends(self) -> set[int]:
        """Where each block ends."""
        return set(itertools.accumulate(self.sizes))


@dataclasses.dataclass(frozen=True)
class Projection:
    """A projection of attention, and how to divide it.

    Attributes:
      path: Its path in the tree.
      shape: Its shape.
      numbers: Its dimension numbers without heads.
      kind: What its class holds.
      given: What is known of its heads.
    """

    path: Any
    shape: tuple[int, ...]
    numbers: DimensionNumbers
    kind: Kind
    given: PerHead

    def by_head(self) -> DimensionNumbers:
        """Its dimension numbers, with a matrix for each head or group of heads.

        Raises:
          Misfit: If its shape, or what is known of its heads, does not allow it.
        """
        count = self._heads_per_position()
        if self.features_of_head * count != self._size_of_features():
            raise Misfit(
                f"{count} heads do not divide its {self._size_of_features()} features"
            )
        if self.given.heads_per_matrix > 1:
            return self._grouped(count)
        sizes = self._key_and_value() or (self.features_of_head,)
        blocks = Blocks(self._features[-1], sizes * count)
        return self._numbers(self._features, blocks)

    @property
    def features_of_head(self) -> int:
        """The number of features of each head, if the heads divide them."""
        return self._size_of_features() // self._heads_per_position()

    # The axes. The heads lie on one side of the matrix: along one axis with their
    # features, or along axes of their own.

    @property
    def _sides(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The axes of the rows and those of the columns, in the order of the leaf."""
        rank = len(self.shape)
        rows, columns = (
            tuple(sorted(int(axis) % rank for axis in as_tuple(axes)))
            for axes in (self.numbers.reduction_axis, self.numbers.output_axis)
        )
        return rows, columns

    @property
    def _in_rows(self) -> bool:
        axis = self.given.axis
        if axis is None:
            return self.kind.inputs
        rows, columns = self._sides
        rank = len(self.shape)
        if not -rank <= axis < rank or axis % rank not in rows + columns:
            raise Misfit(f"axis={axis} is not among the axes of its rows or columns")
        return axis % rank in rows

    @property
    def _side(self) -> tuple[int, ...]:
        return self._sides[0 if self._in_rows else 1]

    @property
    def _heads(self) -> tuple[int, ...]:
        """The axes that count heads alone."""
        if len(self._side) > 1 and self.given.axis is not None:
            return (self.given.axis % len(self.shape),)
        return self._side[:-1]

    @property
    def _features(self) -> tuple[int, ...]:
        """The other axes of that side."""
        return tuple(axis for axis in self._side if axis not in self._heads)

    def _size_of_features(self) -> int:
        return math.prod(self.shape[axis] for axis in self._features)

    @property
    def _parts_axis(self) -> int | None:
        """The axis that counts query, key and value, if there is one."""
        of_keys = self.given.key_value_heads
        grouped = self.kind.queries and of_keys not in (None, self.given.heads)
        if self.kind.parts == 1 or len(self._heads) < 2 or grouped:
            return None
        found = [axis for axis in self._heads if self.shape[axis] == self.kind.parts]
        return found[0] if len(found) == 1 else None

    @property
    def _blocks(self) -> Blocks | None:
        """The blocks that the numbers without heads name."""
        if not isinstance(self.numbers, BlockDimensionNumbers):
            return None
        axis = self.numbers.block_axis % len(self.shape)
        return Blocks(axis, block_sizes(self.numbers.blocks, self.shape[axis]))

    # How many heads.

    @property
    def _total(self) -> int | None:
        """The number of heads of all projections in the leaf, if it is given."""
        heads, of_keys = self.given.heads, self.given.key_value_heads
        if heads is None or self.given.axis is not None:
            return heads
        return self.kind.queries * heads + self.kind.keys_and_values * (of_keys or heads)

    def _heads_per_position(self) -> int:
        """How many heads the axis of the features holds, at each index of the others."""
        counted = math.prod(self.shape[axis] for axis in self._heads)
        if self._total is None:
            return self._heads_by_shape()
        alone = len(self._heads) > 0 and self.kind.parts == 1
        if self._total != counted if alone else self._total % counted:
            raise Misfit(
                f"it has {counted} heads by its shape, not {self._total}: pass heads=, "
                "and key_value_heads= if keys and values have others"
            )
        count = self._total // counted
        if count > 1:
            self._refuse_unclear_batch()
        return count

    def _heads_by_shape(self) -> int:
        if not self._heads:
            raise Misfit(
                f"nothing says how many heads axis {self._features[0]} of length "
                f"{self._size_of_features()} holds: pass heads="
            )
        blocks = self._blocks
        if blocks is not None and blocks.axis in self._features:
            return len(blocks.sizes)
        if self.kind.parts > 1 and self._parts_axis is None and blocks is None:
            raise Misfit(
                f"nothing says where its {self.kind.parts} projections lie: pass heads="
            )
        return 1

    def _refuse_unclear_batch(self) -> None:
        """Refuse a batch axis that may count layers, or query, key and value."""
        rows, columns = self._sides
        parts = self.kind.parts
        unclear = [
            axis
            for axis, size in enumerate(self.shape)
            if axis not in rows + columns and size == parts > 1
        ]
        if unclear and self._blocks is None:
            side = "reduction_axis" if self._in_rows else "output_axis"
            raise Misfit(
                f"its axis {unclear[0]} may count layers or its {parts} projections: "
                f"add it to {side} if it counts projections; otherwise divide these by "
                f"BlockDimensionNumbers with block_axis={self._features[-1]}"
            )

    # The matrices.

    def _key_and_value(self) -> tuple[int, int] | None:
        """The sizes of key and value in each head of a projection up."""
        sizes = self.given.key_value_features
        module, _ = module_and_array(self.path)
        named = bool(module) and _KEYS_AND_VALUES.search(module[-1]) is not None
        if sizes is None or self.kind.parts > 1 or not named:
            return None
        if sum(sizes) != self.features_of_head:
            raise Misfit(
                f"key_value_features={sizes} do not add up to the "
                f"{self.features_of_head} features of a head"
            )
        return sizes

    def _grouped(self, count: int) -> DimensionNumbers:
        """A matrix for a few heads that are neighbours along one axis."""
        group = self.given.heads_per_matrix
        if self._key_and_value():
            raise Misfit("with key_value_features, pass heads_per_matrix=1")
        if self.kind.parts > 1 and self._parts_axis is None and self._blocks is None:
            raise Misfit(
                "heads of several projections may be neighbours: divide these by "
                "BlockDimensionNumbers, and heads_per_matrix divides the blocks"
            )
        own = [axis for axis in self._heads if axis != self._parts_axis]
        if count > 1 or not own:
            side, axis, heads = self._features, self._features[-1], count
        else:
            side, axis, heads = (own[-1], *self._features), own[-1], self.shape[own[-1]]
        if heads % group:
            raise Misfit(f"heads_per_matrix={group} does not divide its {heads} heads")
        size = self.shape[axis] // heads * group
        return self._numbers(side, Blocks(axis, (size,) * (heads // group)))

    def _numbers(self, side: tuple[int, ...], blocks: Blocks) -> DimensionNumbers:
        """The numbers with these axes on the side of the heads, divided into blocks."""
        self._check_blocks(side, blocks)
        rows, columns = (as_axis(axes) for axes in self._sides)
        if self._in_rows:
            rows = as_axis(side)
        else:
            columns = as_axis(side)
        sizes = blocks.sizes
        if len(sizes) == 1:
            return MuonDimensionNumbers(rows, columns)
        return BlockDimensionNumbers(
            rows,
            columns,
            block_axis=blocks.axis,
            blocks=len(sizes) if len(set(sizes)) == 1 else sizes,
        )

    def _check_blocks(self, side: tuple[int, ...], blocks: Blocks) -> None:
        """Refuse matrices that would lie across the blocks of the numbers."""
        own = self._blocks
        if own is None or own.axis in set(self._heads) - set(side):
            return
        if own.axis != blocks.axis or not own.ends <= blocks.ends:
            raise Misfit(f"its blocks by {self.numbers} cut heads, or groups of them")
