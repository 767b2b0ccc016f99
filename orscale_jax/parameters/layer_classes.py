"""The classes of layers, by the names of the parameters: query, router, expert up, ...

Names are read in words, in lower case and without underscores: "blocks.0.mlp.gate_proj"
is "blocks.0.mlp.gate proj", and "MultiHeadAttention_0" is "multi head attention 0".
"""

import collections
import functools
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, NamedTuple, TypeAlias

import jax
import numpy as np

from orscale_jax import validate
from orscale_jax.parameters import expressions
from orscale_jax.trees.boxes import PyTree, unbox
from orscale_jax.trees.names import Path, keys_on, names_on, words
from orscale_jax.trees.nodes import is_masked, leaves_and_masks

ClassRules: TypeAlias = expressions.ByExpression[str]

# The classes whose parameters are no matrices, whatever their shape.
EMBEDDING_OR_HEAD = frozenset({"embedding", "head"})
VECTORS = frozenset({"norm", "scale", "bias"})

# Last keys that say nothing about the layer.
_ARRAY = re.compile(r"kernel|weights?|w|dense|layer|base layer")

_NET = r"(?!.*\b(proj\w*|linear|dense|fc\d*|conv\d*|net|mod(ulation)?)\b)"
# Words that name an embedding or a head anywhere in a key, and those that end its name.
_TABLE = re.compile(
    r"embed|\b(wte|wpe|emb|vocab|logits)\d*\b"
    rf"|^{_NET}(?!.*\b(ffn?|ff|mlp\d*|mixer)\b).*\b(tok|pos)\d*\b"
)
_HEAD = re.compile(r"\b(?<!multi )(head|classifier)\d*( \d+)*( (w|kernel|weights?))?$")
_OUTPUT = re.compile(rf"{_HEAD.pattern}|unembed|\b(logits|vocab|output embed)")

# Classes by the whole path: the first that matches applies.
_MODULE = r"\b[^.]*(\.\d+)?(\.[^.]+)?$"  # In the last key, or the last but one.
_VECTOR = r"(scales?|gains?|gammas?|betas?|offsets?)"
# Standard deviations and the like, by entry; time constants of state-space models and of
# linear attention; RWKV's interpolations between tokens.
_SPREAD = r"((log ?)?(std|std ?dev|sigma|variance)|log ?var|rho)"
_DECAY = (
    r"a logs?|log a( real| imag)?|(a|lambda) (real|re|imag|im)|lambda|(nu|theta) log|"
    r"log (nu|theta|step|dt|lambda|decay)|time (decay|first|faaaa)|"
    r"time (mix|maa)( (key|value|receptance|[kvrwgx]))?"
)
_BY_PATH = (
    ("embedding", r"\btokens?$|(^|\.)cls$|^(\w+\.)?shared\.weight$"),
    ("embedding", r"\b(mask|iou|cls|class|register|prompt|query) tokens?\.weight$"),
    ("embedding", r"\brelative (position|attention) bias\b|(^|\.)positions?$"),
    (
        "norm",
        r"(?!.*\bkernel)\b(\w*norm(alization)?s?\d*|ln\d*|bn\d*|rms)\b"
        rf"({_NET}|(?=.*\b{_VECTOR}$)){_MODULE}",
    ),
    ("norm", r"(?<!weight )(?<!spectral )\b(\w*norms?\d*|ln)( (\d+|f))?\.kernel$"),
    ("norm", r"norm\.(scale|shift)\.weights$"),
    ("bias", rf"\bbias(es)?\b{_NET}[^.]*(\.b)?$"),
    ("scale", rf"\b{_VECTOR}( ?\d+)?$|\blayer scale\b(?!.*\bkernel){_MODULE}"),
    ("scale", rf"\b{_SPREAD}( (w|kernel|weights?))?$|\benvelopes?(\.\d+)?\.(pi|zeta)$"),
    ("scale", rf"\b({_DECAY})$"),
    ("other", r"\b(lora|adapters?|indexer)\b"),
    ("attention gate", r"\battention\.gating w$"),
    ("router", r"\b(router|gating)\b(?! (einsum|linear))"),
    ("head", r"\b(logits|unembed|embed out|logitdense|head dist\b)"),
    ("head", r"(^|\.)heads(\.\d+)?\.(w|kernel|weights?)$"),
    ("head", r"^(params\.)?(score|(\w+\.)?output layer)\.(kernel|weight)$"),
)

# Keys that are parts of a model.
_ATTENTION_KEY = re.compile(r"att(entio)?n|\bm[hlq]a\b")
_EXPERT = re.compile(r"\b(experts?|mo ?e(?! layers?))\b")
_MLP_KEY = re.compile(
    rf"{_EXPERT.pattern}|mlp\d*\b|\b(ffn?|ffw|feed ?forward|swi ?glu)\b"
)
_SHARED = re.compile(r"\bshared (expert|mlp)|^shared$")
# Keys side by side that show a mixture, or attention, without a module of its own.
_EXPERTS_THEMSELVES = re.compile(r"(?!.*\bexperts?\b).*\brouter\b")
_QKV = re.compile(r"\b(w?(q|k|v|kv|qkv)|quer(y|ies)|keys?|values?)\b")
_QUERY_AND_KEY = re.compile(r"(?=.*\b(w?q\b|quer))(?=.*\b(w?kv?\b|key))|.*\bw?qkvo?\b")


# The classes of modules, or of arrays without one, by their names: the first rule that
# matches applies. In its columns: the class ("{mlp}" stands for "mlp", "routed expert" or
# "shared expert"); the parts of a model in which it holds ("block": everything else, and
# "attention block": one with the projections of attention among its own keys); the name,
# "layers 0" for a numbered layer; all keys in the same place, sorted and joined by "|".
_ATTENTION, _ATTENTION_OR_BLOCK = "attention.*", "attention|.*block"
_MLP, _MLP_OR_BLOCK = "mlp|.*expert", "mlp|.*expert|.*block"
_TWO = r"^(\w+ )?0\|(\w+ )?\d$"  # Dense_0 and Dense_1, or the 0 and 2 of a sequence.
_BY_NAME: tuple[tuple[str, ...], ...] = (
    ("convolution", ".*", r"conv"),
    ("attention latent down", _ATTENTION_OR_BLOCK, r"\bw?(q|kv) (a|down)\b|^w d(q|kv)$"),
    ("attention latent up", _ATTENTION_OR_BLOCK, r"\bw?(q|kv?|v) (b|up)\b"),
    ("attention latent up", _ATTENTION_OR_BLOCK, r"^w u(q|kv?|v)$"),
    ("attention qkvo", _ATTENTION_OR_BLOCK, r"\bqkvo\b"),
    ("attention kv", "attention", r"^c attn$", r"\bq attn\b"),
    ("attention qkv", _ATTENTION_OR_BLOCK, r"\bw?qkv\b|query key value|^c attn$"),
    ("attention qkv", ".*block", r"^att proj$", r"\battn out\b"),
    ("attention qkv", "attention", r"^w pack$"),
    ("attention qkv", "attention", r"^in proj( weight)?$"),
    ("attention qkv", "attention", r"^(dense|linear) 0$", _TWO),
    ("attention output", "attention", r"^(dense|linear) \d$", _TWO),
    ("attention kv", _ATTENTION_OR_BLOCK, r"\bw?kv\b|key value"),
    ("attention query", _ATTENTION, r"\bw?q\b"),
    ("attention query", _ATTENTION_OR_BLOCK, r"\bquer(y|ies)\b|\bq proj\b"),
    ("attention key", _ATTENTION, r"\b(w?k|keys?)\b"),
    ("attention key", _ATTENTION_OR_BLOCK, r"\bk proj\b"),
    ("attention value", _ATTENTION, r"\b(w?v|values?)\b"),
    ("attention value", _ATTENTION_OR_BLOCK, r"\bv proj\b"),
    ("attention gate", "attention", r"\b(g|gate)\b"),
    ("{mlp} down", "attention block", r"^wo$", r"\bwi\b"),
    (
        "attention output",
        _ATTENTION,
        r"^((to|linear|att(entio)?n) )?out(put)?\b|^(w ?)?o$",
    ),
    ("attention output", _ATTENTION, r"^((c|linear) )?proj(ection)?$"),
    ("attention output", _ATTENTION, r"^linear$|^proj out$", r"\b(q|query)\b"),
    ("attention output", "attention", r"^attn vec\b|^((cross|self) )?attention$"),
    ("attention output", _ATTENTION_OR_BLOCK, r"\bo proj\b"),
    ("head", _MLP, r"^ff out$", r"\bwte\b"),
    ("{mlp} up", _MLP, r"^ff proj$", r"\bff out\b"),
    ("router", _MLP, r"\bexpert gate$", r"^(?!.*\bexpert up\b)"),
    ("router", _MLP_OR_BLOCK, r"^(moe )?gate$", r"\bexperts?\b|\bgate up\b"),
    ("router", "routed expert", r"^(moe )?gate$", r"^(?!.*\b(up|down)\b)"),
    ("{mlp} gate up", _MLP_OR_BLOCK, r"\bgate (and )?up\b|\bup (and )?gate\b"),
    ("{mlp} gate up", _MLP_OR_BLOCK, r"^gating einsum$|^w1[23]$"),
    ("{mlp} gate", _MLP, r"\bgate\b|^gating linear$"),
    ("{mlp} up", _MLP, r"^value linear$", r"\bgating linear\b"),
    ("{mlp} gate", _MLP_OR_BLOCK, r"\bgate\b", r"\bup\b"),
    ("{mlp} gate", _MLP_OR_BLOCK, r"^wi 0$", r"\bwi 1\b"),
    ("{mlp} gate", _MLP_OR_BLOCK, r"^w1$", r"\b(w3|v1)\b"),
    ("{mlp} up", _MLP_OR_BLOCK, r"^w2$", r"\bw1 like w2\b"),
    ("{mlp} down", _MLP_OR_BLOCK, r"^w3$", r"\b(w1 like w2|w12)\b"),
    ("{mlp} up", _MLP_OR_BLOCK, r"\bup\b|^wi\b|^(w[13]|v1)$|^c fc$|^fc in$"),
    ("{mlp} down", _MLP_OR_BLOCK, r"\bdown\b|^(wo|w2)\b|^fc out$|\b4 h to h$"),
    ("{mlp} up", _MLP_OR_BLOCK, r"\bh to 4 h$|^intermediate$"),
    ("{mlp} down", _MLP_OR_BLOCK, r"^output$", r"\bintermediate\b"),
    ("{mlp} up", _MLP, r"^(linear )?(fc|lin|linear)1$|^fc$|^(w |linear )?in\b"),
    ("{mlp} up", _MLP, r"^input linear$"),
    ("{mlp} down", _MLP, r"^(linear )?(fc|lin|linear)2$|\bout(put)?\b"),
    ("{mlp} gate", _MLP, r"^fc 1$", r"\bfc 2\|proj$"),
    ("{mlp} up", _MLP, r"^fc 2$", r"\bfc 2\|proj$"),
    ("{mlp} down", _MLP, r"^(c )?proj$", r"\bfc\b"),
    ("{mlp} down", _MLP, r"^linear$", r"^gating einsum\b"),
    ("{mlp} up", ".*block", r"^(fc|lin|linear)1$", r"att(entio)?n\b"),
    ("{mlp} down", ".*block", r"^(fc|lin|linear)2$", r"att(entio)?n\b"),
    ("{mlp} up", _MLP, r"^(?!experts?\b).* 0$", _TWO),
    ("{mlp} down", _MLP, r"^(?!experts?\b).* \d$", _TWO),
    ("head", ".*block", r"^output( (proj(ection)?|layer))?$", r"\b(embed|(wte|emb)\b)"),
)


class Names(NamedTuple):
    """The names of all parameters of a tree, which give each its class."""

    below: Mapping[Path, set[str]]  # The keys below each path.
    shapes: Mapping[Path, tuple[int, ...]]  # Of the arrays that are not masked.

    @classmethod
    def of(cls, leaves: Iterable[tuple[Any, Any]]) -> "Names":
        """Collect the names on the paths of leaves and of masked nodes."""
        below = collections.defaultdict(set)
        shapes = {}
        for path, leaf in leaves:
            keys = in_words(path)
            if not is_masked(leaf):
                shapes[keys] = np.shape(leaf)
            for depth, key in enumerate(keys):
                below[keys[:depth]].add(key)
        return cls(below, shapes)

    def take_adamw(self, path: Any) -> bool:
        """Whether they say that a parameter is no matrix."""
        return self._say(path, is_embedding_or_head, EMBEDDING_OR_HEAD | VECTORS)

    def say_head(self, path: Any) -> bool:
        """Whether they say that a parameter is an output head's."""
        return self._say(path, _OUTPUT.search, {"head"})

    def _say(
        self, path: Any, named: Callable[[str], Any], classes: Collection[str]
    ) -> bool:
        """Whether a key on the path, or the class, is one of these."""
        keys = in_words(path)
        inside = self._is_inside_head(keys) or self._is_of_attention_head(keys)
        return self.layer_class(path) in classes or (not inside and any(map(named, keys)))

    def layer_class(self, path: Any) -> str:
        keys = in_words(path)
        layer = "other" if self._is_inside_head(keys) else _by_path(keys)
        if layer == "head" and self._is_of_attention_head(keys):
            layer = None
        # A tree of log standard deviations beside that of the means.
        if "rho" in keys and self.below[keys[: keys.index("rho")]] & {
            "mu",
            "mean",
            "loc",
        }:
            return "scale"
        number = re.search(r"\bb(\d*)$", keys[-1]) if keys else None
        if number and layer != "norm":  # Haiku's modules have w and b; LoRA has a and b.
            a, w = (keys[-1][: number.start()] + letter + number[1] for letter in "aw")
            others = self.below[keys[:-1]]
            if a not in others and others & {w, "kernel", "weight", "weights"}:
                return "bias"
        if layer:
            return layer
        module, array = module_and_array(path)
        beside = "|".join(sorted(self.below[module[:-1]]))
        w1, w2, w3 = (self.shapes.get((*module[:-1], f"w{i}", *array)) for i in (1, 2, 3))
        if w1 is not None and w3 is not None and w1 == w2 != w3:
            beside += "|w1 like w2"
        mlp = "mlp"
        if any(map(_SHARED.search, module)):
            mlp = "shared expert"
        elif any(map(_EXPERT.search, module)) or _EXPERTS_THEMSELVES.match(beside):
            mlp = "routed expert"
        # The part of the model, by the last key that names one, or by the keys beside.
        within = "attention block" if _QUERY_AND_KEY.match(beside) else "block"
        for key in reversed(module):
            if _ATTENTION_KEY.search(key):
                within = "attention"
                break
            if _MLP_KEY.search(key) or _SHARED.search(key):
                within = mlp
                break
        numbered = module[-1:] and module[-1].isdigit()
        name = " ".join(module[-2 if numbered else -1 :])
        return _by_rules(within, name, beside).format(mlp=mlp)

    def _is_of_attention_head(self, keys: Path) -> bool:
        """Whether it makes the queries, keys or values of a head that has such layers."""
        depths = (i for i, key in enumerate(keys[:-1], 1) if _HEAD.search(key))
        if (depth := next(depths, None)) is None or not _QKV.search(keys[depth]):
            return False
        return bool(_QUERY_AND_KEY.match("|".join(sorted(self.below[keys[:depth]]))))

    def _is_inside_head(self, keys: Path) -> bool:
        """Whether a later layer below the same head takes this layer's outputs."""
        shape = self.shapes.get(keys, ())
        depth = next((i for i, key in enumerate(keys) if _HEAD.search(key)), len(keys))
        if len(shape) < 2 or depth > len(keys) - 3:
            return False

        def place(path: Path) -> tuple[bool, list[int]]:
            name = ".".join(path[depth + 1 :])
            last = re.search(r"\b(out|output|decoder|last)\b", name)
            return bool(last), [int(number) for number in re.findall(r"\d+", name)]

        for path, other in self.shapes.items():
            beside = path[: depth + 1] == keys[: depth + 1] and path[-1] == keys[-1]
            chained = len(other) == len(shape) and (
                shape[-1] == other[-2] or shape[0] == other[1]
            )
            if beside and chained and place(path) > place(keys):
                return True
        return False


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
    - ``"convolution"``, ``"embedding"``, ``"head"``, ``"norm"``, ``"bias"``; ``"scale"``
      for gains and offsets outside norms, such as LayerScale's ``gamma``, and for other
      parameters that act entry by entry, such as ``log_std``, ``rho`` and Mamba's
      ``A_log``;
    - ``"other"``: everything else.

    Some names depend on their neighbours. A ``gate`` is the router if there are experts
    beside it, or if it is in a mixture without ``up`` and ``down``; otherwise it is half
    of a gated MLP. ``w1``, ``w2`` and ``w3`` are gate, down and up, as in Llama, or gate,
    up and down if only ``w3`` has another shape. Two numbered layers, such as ``Dense_0``
    and ``Dense_1``, are up and down in an MLP, and qkv and output in attention.

    Args:
      params: The parameters, which may be abstract, boxed or masked.
      rules: A mapping, or a sequence of pairs, from regular expressions over the paths,
        as in :func:`orscale_jax.by_path`, to names of classes, which may be new. The
        first expression that matches applies. Where no expression matches, the names
        decide as above.

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

    def checked(name: str, value: Any) -> str:
        named = isinstance(value, str) and value
        return named or validate.refuse(name, value, "pass the name of a class")

    rules = () if rules is None else rules
    pairs = expressions.compiled(rules, "rules", "names of classes", checked)
    bare = unbox(params)
    if not jax.tree.leaves(bare):
        return bare
    expressions.refuse_step_count(bare, "classes")
    leaves = leaves_and_masks(bare)
    by_rule = expressions.values(pairs, leaves, "layer_classes")
    names = Names.of(leaves)
    return jax.tree.map_with_path(
        lambda path, _: by_rule.get(names_on(path)) or names.layer_class(path), bare
    )


def is_embedding_or_head(key: str) -> bool:
    """Whether a key in words is the name of an embedding table or an output head."""
    return bool(_TABLE.search(key) or _HEAD.search(key))


def module_and_array(path: Any) -> tuple[Path, Path]:
    """The keys of a module, or of an array without one, and those of its array below."""
    keys = in_words(path)
    end = len(keys)
    while end > 1 and _ARRAY.fullmatch(keys[end - 1]):
        end -= 1
    return keys[:end], keys[end:]


def in_words(path: Any) -> Path:
    return tuple(key for key in map(words, keys_on(path)) if key)


# Cached, since an optimizer that is not compiled asks at every step.
@functools.lru_cache(maxsize=2**16)
def _by_path(keys: Path) -> str | None:
    path = ".".join(keys)
    for layer, expression in _BY_PATH:
        if re.search(expression, path):
            return layer
    if any(map(_HEAD.search, keys)):
        return "head"
    return "embedding" if any(map(_TABLE.search, keys)) else None


@functools.lru_cache(maxsize=2**16)
def _by_rules(within: str, name: str, beside: str) -> str:
    for layer, parts, expression, *others in _BY_NAME:
        if (
            re.fullmatch(parts, within)
            and re.search(expression, name)
            and all(re.search(other, beside) for other in others)
        ):
            return layer
    return "other"
