"""Reasons to look at a matrix before a run."""

import collections
import math
import re
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from orscale_jax.audit.description import ParameterRow
from orscale_jax.parameters.axes import MatrixAxes
from orscale_jax.parameters.dimension_numbers import MODULE, OUTPUT
from orscale_jax.parameters.kinds import (
    EMBEDDING_OR_HEAD,
    NO_MATRIX,
    OTHER,
    in_words,
    kind_of,
    kinds,
)
from orscale_jax.trees.names import Path, dotted, keys_on, names_on, without_names

# Several projections in one. Of latent attention, kv a and kv down are one projection.
_FUSED = re.compile(
    r"\b(w?q?kvo?|qkv[a-z]+|fused|query key value|key value)\b(?! (a|down)\b)"
    r"|\b(gate (and )?up|up (and )?gate|gating einsum|w1[23])\b"
    r"|(^|\.)(net[ .]0\.proj|c attn|w pack|att proj|(x|bc|bcdt) proj)(\.|$)"
    r"|(^|\.)(?<!mlp\.)(?<!ffn\.)in proj( ba)?(\.|$)"
)
# The projections up and down of an MLP: a gate may be in the one up.
_UP = re.compile(
    r"\b(up|in(put)?|wi|w1|(fc|lin|linear)1|fc|(fc|dense|linear) 0|h to 4 h)\b"
    r"|\b(intermediate|ff proj)\b"
)
_DOWN = re.compile(
    r"\b(down|out(put)?|wo|w2|(fc|lin|linear)2|(fc|dense|linear) 1|4 h to h|c proj)\b"
)
_ATTENTION = re.compile(r"att(entio)?n|\b(w?([qkvo]|q?kv)|query|key|value)\b")
_HIDDEN = re.compile(r"att(entio)?n|\b(mlp\d*|ffn?|ffw|feed ?forward|experts?)\b")
_ROUTER = re.compile(r"\b(router|gating)\b(?! (einsum|linear))|\bgate\d*( \d+)*(\.|$)")
# Beside the gate of a gated MLP.
_GATED = re.compile(r"\bup\b|^wi\b|^(w3|v1|value linear|fc 2)$")
_TABLE = re.compile(r"\b(output|out|table|lookup|codebook)\b")
_LORA = re.compile(r"\blora\b")
# Embeddings that no head undoes.
_NO_VOCABULARY = re.compile(r"\b(pos\w*|wpe|time\w*|type|patch|relative)\b|\btokens?$")
_PARTS = (2, 3, 4)  # Of a fused projection: keys and values; queries too; the output too.
_THIN = 16
# Last keys that say nothing about the layer.
_ARRAY = re.compile(r"kernel|weights?|w|dense|layer|base layer")


def _module(path: Any) -> Path:
    """The keys of a module, or of an array without one, in words."""
    keys = in_words(path)
    while len(keys) > 1 and _ARRAY.fullmatch(keys[-1]):
        keys = keys[:-1]
    return keys


class Checks:
    """What the checks know of all parameters, by path."""

    def __init__(
        self,
        leaf_of: Mapping[Any, Any],
        axes_of: Mapping[Any, MatrixAxes],
        why_of: Mapping[Any, str],
    ) -> None:
        self.leaf_of = leaf_of
        self.shapes = {path: np.shape(leaf) for path, leaf in leaf_of.items()}
        by_name = kinds(leaf_of)
        self.axes = axes_of
        self.kinds = {path: by_name[names_on(path)] for path in leaf_of}
        # Modules by their keys in words, and the paths of all parameters below each.
        self.modules = {path: _module(path) for path in leaf_of}
        self.below: dict[Path, list[Any]] = collections.defaultdict(list)
        # Embeddings that a head may have the length of, by their number of rows.
        self.vocabularies: dict[int, str] = {}
        # By path, the keys above it, and the lengths that the outputs of a layer may fit:
        # sides of matrices, and widths.
        self.above = {path: keys_on(path)[:-1] for path in leaf_of}
        heads = {x for x in leaf_of if self.kinds[x] == "head" or why_of[x] == OUTPUT}
        self.sides = {
            path: shape if path in heads else shape[-1:]
            for path, shape in self.shapes.items()
        } | {
            path: self._channels(path, *axes.matrix_shape(leaf_of[path]))
            for path, axes in axes_of.items()
        }
        for path, module in self.modules.items():
            for depth in range(len(module)):
                self.below[module[:depth]].append(path)
            shape = self.shapes[path]
            if (
                self.kinds[path] == "embedding"
                and len(shape) == 2
                and shape[0] != shape[1]
                and (kind_of(module[-1]) in EMBEDDING_OR_HEAD or module[-1] == "shared")
                and not _NO_VOCABULARY.search(".".join(in_words(path)))
            ):
                self.vocabularies[shape[0]] = dotted(path)

    def reasons(self, path: Any, row: ParameterRow) -> Iterator[str]:
        """Why a leaf of matrices, or a block of it, may be something else."""
        keys, name = keys_on(path), ".".join(in_words(path))
        axes, shape, kind = self.axes[path], self.shapes[path], row.kind
        above, module = self.modules[path][:-1], self.modules[path][-1:]
        neighbours = {self.modules[other][len(above)] for other in self._beside(path)}
        is_up, is_down = (any(map(words.search, module)) for words in (_UP, _DOWN))
        if kind in NO_MATRIX:
            yield f"{kind}?"
        if _FUSED.search(name) or (is_up and self._is_twice_as_wide(path, row)):
            # Blocks or a batch axis divide it, but not one that all nearest neighbours
            # have as well, of layers or experts.
            depths = range(1, len(self.modules[path]) + 1)
            nearest = (list(self._beside(path, depth)) for depth in depths)
            beside = [self.shapes[other] for other in next(filter(None, nearest), [])]
            if not axes.sizes and not any(
                shape[axis] in _PARTS
                and {other[axis : axis + 1] for other in beside} != {(shape[axis],)}
                for axis in axes.batch
            ):
                yield "fused?"
        router = _ROUTER.search(name) and not any(map(_GATED.search, neighbours))
        if router:
            yield "router?"
        long = [size for size in (row.m, row.n) if size in self.vocabularies]
        out_of_attention = is_down and any(map(_ATTENTION.search, neighbours))
        hidden = any(map(_HIDDEN.search, above)) or out_of_attention
        attention = any(map(_ATTENTION.search, above)) or out_of_attention
        unknown, lora = kind == OTHER and not hidden, _LORA.search(name)
        # Only near the root: deeper, "out" is an ordinary projection.
        if unknown and len(keys) <= 2 and _TABLE.search(name):
            yield "table or head?"
        elif not (kind in NO_MATRIX or attention or router or long or lora) and (
            self._ends(path, row)  # Also in a module "mlp".
        ):
            yield "output layer?"
        if unknown and long:
            yield f"as long as {self.vocabularies[long[0]]}"
        if keys and without_names(keys):
            yield "no name"
        # All that stands beside a leaf of two axes is stacked along its first one.
        if (
            not router
            and len(shape) == 2
            and all(self.shapes[x][:1] == shape[:1] for x in self._beside(path))
            and any(0 in self.axes[x].batch for x in self._beside(path) if x in self.axes)
        ):
            yield "stack of vectors?"
        sides = (row.m, row.n), self._channels(path, row.m, row.n)
        longer = min(max(x) // max(1, min(x)) for x in sides)
        heads = row.matrices > 1 and _ATTENTION.search(name)
        expected = router or heads or kind in NO_MATRIX or lora
        if longer >= _THIN and not expected:
            yield f"{longer} times as long"
        if any(shape[axis] == 1 for axis in axes.batch):
            yield "batch of one"

    def _channels(self, path: Any, m: int, n: int) -> tuple[int, int]:
        """Rows and columns, without the window of a convolution of 2 or 3 axes."""
        rows = [self.shapes[path][axis] for axis in self.axes[path].rows]
        window = math.prod(rows) // max(1, *rows) if len(rows) > 2 else 1
        return m // max(1, window), n

    def _is_twice_as_wide(self, path: Any, row: ParameterRow) -> bool:
        """Whether a projection up makes two numbers for each that its down one takes."""
        for other in self._beside(path):
            *above, name = self.modules[other]
            is_down = [*self.modules[path][:-1]] == above and _DOWN.search(name)
            if is_down and (axes := self.axes.get(other)):
                wide, out = axes.matrix_shape(self.leaf_of[other])
                if (row.m, row.n) in ((out, 2 * wide), (2 * out, wide)):
                    return True
        return False

    def _ends(self, path: Any, row: ParameterRow) -> bool:
        """Whether its inputs fit other layers, and its outputs fit none.

        What is split or joined between two layers fits as a multiple.
        """
        m, n = self._channels(path, row.m, row.n)
        own, others = list[tuple[int, ...]](), list[tuple[int, ...]]()
        for other, sizes in self.sides.items():
            beside = self.above[other] == self.above[path]
            (own if beside else others).append(sizes)
        lengths = {size for sizes in others for size in sizes if size > 1}
        transposed = row.why != MODULE and keys_on(path)[-1:] == ("weight",)
        if (m,) in own or (transposed and (n,) not in own):
            m, n = n, m
        wide = {size for size in lengths if size > max(_PARTS)}  # Not colours, say.
        fits = any(n % size == 0 or size % n == 0 for size in wide)
        flattened = any(m % size == 0 for size in lengths)
        return row.matrices == 1 and flattened and not fits

    def _beside(self, path: Any, depth: int = 1) -> Iterator[Any]:
        """The paths of the parameters in a module around that of a leaf, but its own."""
        module = self.modules[path]
        for other in self.below[module[:-depth]]:
            if self.modules[other][: len(module)] != module:
                yield other
