"""Reasons to look at a matrix before a run."""

import collections
import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

from orscale_jax.audit.rows import ParameterRow
from orscale_jax.parameters.axes import MatrixAxes
from orscale_jax.parameters.heads import DIVIDED
from orscale_jax.parameters.layer_classes import (
    EMBEDDING_OR_HEAD,
    VECTORS,
    is_embedding_or_head,
    module_and_array,
)
from orscale_jax.trees.names import Path, dotted, keys_on, without_names, words

_FUSED_CLASS = re.compile(r"attention (qkvo?|kv)|.*gate up")
# Names say what a class does not: layers of class "other", and latent attention, whose
# projections are fused in their own way.
_UNKNOWN = re.compile(r"other|attention latent.*")
_FUSED = re.compile(r"\b(qkv|kv|fused)\b|(^|\.)(c attn|in proj|gate up( proj)?)(\.|$)")
_ROUTER = re.compile(r"\b(router|gating)\b|\bgate\d*( \d+)*(\.|$)")
_TABLE = re.compile(r"\b(output|out|table|lookup|codebook)\b")
_LORA = re.compile(r"\blora\b")
# Embeddings that no head undoes.
_NO_VOCABULARY = re.compile(r"\b(pos\w*|wpe|time\w*|type|patch|relative)\b|\btokens?$")
_PARTS = (2, 3, 4)  # Of a fused projection: keys and values; queries too; the output too.
_THIN = 16


class Checks(NamedTuple):
    """What the checks know of all parameters.

    Attributes:
      shapes: The shape of each, by path.
      axes: The axes of those that are matrices, by path.
      vocabularies: The names of embeddings, by their number of rows.
      below: The paths of the parameters below each module, by its keys in words.
    """

    shapes: Mapping[Any, tuple[int, ...]]
    axes: Mapping[Any, MatrixAxes]
    vocabularies: Mapping[int, str]
    below: Mapping[Path, list[Any]]

    @classmethod
    def of(
        cls,
        leaf_of: Mapping[Any, Any],
        axes_of: Mapping[Any, MatrixAxes],
        class_of: Mapping[Any, str],
    ) -> "Checks":
        """Collect shapes, axes and embeddings of a tree, by path."""
        shapes = {path: np.shape(leaf) for path, leaf in leaf_of.items()}
        vocabularies = {
            shape[0]: dotted(path)
            for path, shape in shapes.items()
            if class_of[path] == "embedding" and _is_vocabulary(path, shape)
        }
        below = collections.defaultdict(list)
        for path in shapes:
            module, _ = module_and_array(path)
            for depth in range(len(module)):
                below[module[:depth]].append(path)
        return cls(shapes, axes_of, vocabularies, below)

    def reasons(
        self, path: Any, row: ParameterRow, axes: MatrixAxes | None, layer: str
    ) -> tuple[str, ...]:
        """The reasons why a leaf that is taken for matrices may be something else.

        Args:
          path: The path of the leaf.
          row: Its row, or that of one of its blocks.
          axes: The axes of its matrices; None under AdamW.
          layer: The class of its layer.
        """
        return () if axes is None else tuple(self._reasons(path, row, axes, layer))

    def _reasons(
        self, path: Any, row: ParameterRow, axes: MatrixAxes, layer: str
    ) -> Iterator[str]:
        keys, name = keys_on(path), _in_words(path)
        unknown = layer == "other"
        if layer in EMBEDDING_OR_HEAD | VECTORS:
            yield f"{layer}?"
        fused = _UNKNOWN.fullmatch(layer) and _FUSED.search(name)
        if (fused or _FUSED_CLASS.fullmatch(layer)) and not self._is_split(path, axes):
            yield "fused?"
        # A gated MLP has another projection beside its gate.
        gate = unknown or (layer == "mlp gate" and not any(self._beside(path)))
        if layer == "router" or (gate and _ROUTER.search(name)):
            yield "router?"
        # Only near the root: deeper, "out" is an ordinary projection.
        if unknown and len(keys) <= 2 and _TABLE.search(name):
            yield "table or head?"
        if unknown and not {row.m, row.n}.isdisjoint(self.vocabularies):
            rows = row.m if row.m in self.vocabularies else row.n
            yield f"as long as {self.vocabularies[rows]}"
        if keys and without_names(keys):
            yield "no name"
        if layer != "router" and self._is_stack_of_vectors(path):
            yield "stack of vectors?"
        longer = max(row.m, row.n) // max(1, min(row.m, row.n))
        expected = {"router"} | EMBEDDING_OR_HEAD | VECTORS
        if layer in DIVIDED and np.prod(row.batch_shape) > 1:
            expected |= {layer}  # The heads, which are longer than they are wide.
        if longer >= _THIN and layer not in expected and not _LORA.search(name):
            yield f"{longer} times as long"
        if 1 in row.batch_shape:
            yield "batch of one"

    def _is_split(self, path: Any, axes: MatrixAxes) -> bool:
        """Whether blocks or a batch axis divide a fused projection into its parts.

        A batch axis that all neighbours have as well is one of layers or experts.
        """
        if axes.sizes:
            return True
        shape, beside = self.shapes[path], list(self._beside(path))

        def is_stacked(axis: int) -> bool:
            lengths = [self.shapes[other][axis : axis + 1] for other in beside]
            return set(lengths) == {(shape[axis],)}

        return any(
            shape[axis] in _PARTS and not is_stacked(axis) for axis in axes.within.batch
        )

    def _is_stack_of_vectors(self, path: Any) -> bool:
        """Whether everything beside a leaf of two axes is stacked along its first."""
        shape, stacks = self.shapes[path], 0
        for other in self._beside(path) if len(shape) == 2 else ():
            if self.shapes[other][:1] != shape[:1]:
                return False
            stacks += other in self.axes and 0 in _stacked(self.axes[other])
        return stacks > 0

    def _beside(self, path: Any) -> Iterator[Any]:
        """The paths of the parameters of the modules beside that of a leaf."""
        module, _ = module_and_array(path)
        for other in self.below[module[:-1]]:
            if module_and_array(other)[0][: len(module)] != module:
                yield other


def _stacked(axes: MatrixAxes) -> tuple[int, ...]:
    """The batch axes of a leaf: blocks lie side by side within a matrix of it."""
    return axes.batch


def _is_vocabulary(path: Any, shape: tuple[int, ...]) -> bool:
    """Whether an embedding is a table that an output head may have the length of."""
    module, _ = module_and_array(path)
    return (
        len(shape) == 2
        and shape[0] != shape[1]
        and (is_embedding_or_head(module[-1]) or module[-1] == "shared")
        and not _NO_VOCABULARY.search(_in_words(path))
    )


def _in_words(path: Any) -> str:
    return ".".join(map(words, keys_on(path)))
