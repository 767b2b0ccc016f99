"""The default rule: what a name says of a parameter that is no matrix.

Names are read in words, in lower case and without underscores: "blocks.0.mlp.gate_proj"
is "blocks.0.mlp.gate proj", and "MultiHeadAttention_0" is "multi head attention 0".
"""

import functools
import re
from collections.abc import Iterable
from typing import Any

from orscale_jax.trees.names import Path, keys_on, words

# The kinds whose parameters are no matrices, whatever their shape.
EMBEDDING_OR_HEAD = frozenset({"embedding", "head"})
VECTORS = frozenset({"norm", "scale", "bias"})
MATRIX, OTHER = "matrix", "other"  # What is one by its name, and what it does not tell.

_NET = r"(?!.*\b(proj\w*|linear|dense|fc\d*|conv\d*|net|mod(ulation)?)\b)"
# Words that name an embedding or a head anywhere in a key, and those that end its name.
_EMBEDDING = re.compile(
    r"embed|\b(wte|wpe|emb|vocab|logits)\d*\b"
    rf"|^{_NET}(?!.*\b(ffn?|ff|mlp\d*|mixer)\b).*\b(tok|pos)\d*\b"
)
_HEAD = re.compile(r"\b(?<!multi )(head|classifier)\d*( \d+)*( (w|kernel|weights?))?$")
_OUTPUT = re.compile(rf"{_HEAD.pattern}|unembed|\b(logits|vocab|output embed)")

# Kinds by the whole path: the first that matches applies.
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
TABLE = (
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
    ("other", r"\b(lora|adapters?|indexer)\b|\battention\.gating w$"),
    ("bias", r"(^|\.)((gating|output) )?b\d*$"),
    ("other", r"\b(router|gating)\b(?! (einsum|linear))"),
    # Projections of a head of attention, or of a head that has attention.
    (MATRIX, r"\b(heads?|classifier)[. ]?\d*\.(w?(q|k|v|kv|qkv)|query|key|value)\b"),
    ("head", r"\b(logits|unembed|embed out|logitdense|head dist\b)"),
    ("head", r"(^|\.)heads(\.\d+)?\.(w|kernel|weights?)$"),
    ("head", r"^(params\.)?(score|(\w+\.)?output layer)\.(kernel|weight)$"),
    (
        "head",
        r"^(params\.)?((transformer|decoder)\.)?(output( proj(ection)?)?|ff out)"
        r"(\.(w|weight|kernel))?$",
    ),
)

_ATTENTION = re.compile(r"att(entio)?n|\bm[hlq]a\b")
_QUERY_AND_KEY = re.compile(r"(?=.*\b(w?q\b|quer))(?=.*\b(w?kv?\b|key))|.*\bw?qkvo?\b")


def kind_of(path: Any) -> str:
    """The kind of parameter that a path names: one of those above."""
    return _kind(in_words(path))


def takes_adamw(path: Any) -> bool:
    """Whether a path says that a parameter is no matrix."""
    keys, kind = in_words(path), kind_of(path)
    named = kind == OTHER and any(map(is_embedding_or_head, keys))
    return named or kind in EMBEDDING_OR_HEAD | VECTORS


def says_head(path: Any) -> bool:
    """Whether a path says that a parameter is an output head's."""
    kind = kind_of(path)
    return kind == "head" or (kind != MATRIX and any(map(_OUTPUT.search, in_words(path))))


def in_attention(path: Any) -> bool:
    """Whether a key on a path is the name of an attention module."""
    return any(map(_ATTENTION.search, in_words(path)))


def shows_attention(names: Iterable[str]) -> bool:
    """Whether names side by side are the projections of attention."""
    return bool(_QUERY_AND_KEY.match("|".join(sorted(map(words, names)))))


def is_embedding_or_head(key: str) -> bool:
    """Whether a key in words is the name of an embedding table or an output head."""
    return bool(_EMBEDDING.search(key) or _HEAD.search(key))


def in_words(path: Any) -> Path:
    return tuple(key for key in map(words, keys_on(path)) if key)


# Cached, since an optimizer that is not compiled asks at every step.
@functools.lru_cache(maxsize=2**16)
def _kind(keys: Path) -> str:
    path = ".".join(keys)
    for kind, expression in TABLE:
        if re.search(expression, path):
            return kind
    if any(map(_HEAD.search, keys)):
        return "head"
    return "embedding" if any(map(_EMBEDDING.search, keys)) else OTHER
