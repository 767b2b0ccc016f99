"""What the name of a parameter says: embedding, head, norm, scale, bias, or other.

Names are read in words, in lower case and without underscores: "blocks.0.mlp.gate_proj"
is "blocks.0.mlp.gate proj", and "MultiHeadAttention_0" is "multi head attention 0".
"""

import functools
import re
from collections.abc import Iterable
from typing import Any

from orscale_jax.trees.names import Path, keys_on, names_on, words

# The kinds of parameters that are no matrices, whatever their shape.
EMBEDDING_OR_HEAD = frozenset({"embedding", "head"})
VECTORS = frozenset({"norm", "scale", "bias"})
NO_MATRIX = EMBEDDING_OR_HEAD | VECTORS
OTHER = "other"

_LAYER = r"\b(proj\w*|linear|dense|fc\d*|conv\d*|net|mod(ulation)?)\b"
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
# The kind by the whole path, in words: the first expression that has a match decides.
TABLE = (
    ("embedding", r"\btokens?$|(^|\.)(cls|latents)$|^(\w+\.)?shared\.weight$"),
    ("embedding", r"\b(mask|iou|cls|class|register|prompt|query) tokens?\.weight$"),
    ("embedding", r"\brelative (position|attention) bias\b|(^|\.)positions?$"),
    (
        "norm",
        r"(?!.*\bkernel)\b(\w*norm(alization)?s?\d*|ln\d*|bn\d*|rms)\b"
        rf"((?!.*{_LAYER})|(?=.*\b{_VECTOR}$)){_MODULE}",
    ),
    ("norm", r"(?<!weight )(?<!spectral )\b(\w*norms?\d*|ln)( (\d+|f))?\.kernel$"),
    ("norm", r"norm\.(scale|shift)\.weights$"),
    ("bias", rf"\bbias(es)?\b(?!.*{_LAYER})[^.]*(\.b)?$|\b(gating|output) b$"),
    ("scale", rf"\b{_VECTOR}( ?\d+)?$|\blayer scale\b(?!.*\bkernel){_MODULE}"),
    ("scale", rf"\b{_SPREAD}( (w|kernel|weights?))?$|\benvelopes?(\.\d+)?\.(pi|zeta)$"),
    ("scale", rf"\b({_DECAY}|phases?|omegas?|freqs?|frequencies|angles?)$"),
    ("scale", r"(?<!block )\bdiag( kernel)?$"),
    # The queries, keys and values of a head that pools by attention.
    (OTHER, r"\b(heads?|classifier)[. ]?\d*\.(w?(q|k|v|kv|qkv)|query|key|value)\b"),
    ("head", r"\b(logits|logitdense|unembed|output embed|embed out|head dist\b)"),
    ("head", r"\b(?<!multi )(head|classifier)\d*( \d+)*( (w|kernel|weights?))?(\.|$)"),
    ("head", r"(^|\.)heads(\.\d+)?\.(w|kernel|weights?)$|\bvocab\d*\b(?!.*embed)"),
    ("head", r"^(score|output|(\w+\.)?output layer)\.(kernel|weight)$|^output proj$"),
    ("head", r"^((transformer|decoder)\.)?(output projection|ff out)\.weight$"),
    ("embedding", r"embed|\b(wte|wpe|emb)\d*\b"),
    (
        "embedding",
        rf"(^|\.)(?![^.]*({_LAYER}|\b(ffn?|ff|mlp\d*|mixer)\b))[^.]*\b(tok|pos)\d*\b",
    ),
)


def kinds(paths: Iterable[Any]) -> dict[Path, str]:
    """The kind of each parameter of a tree, by the names on its path."""
    keys_of = {names_on(path): in_words(path) for path in paths}
    given = {".".join(keys) for keys in keys_of.values()}

    def kind(name: str) -> str:
        # A "b" beside a weight is a bias, and one beside an "a" is a matrix.
        if re.search(r"\bb\d*$", name):
            a, *weights = (
                re.sub(r"\bb(?=\d*$)", other, name)
                for other in ("a", "w", "kernel", "weight")
            )
            if a not in given and not given.isdisjoint(weights):
                return "bias"
        return kind_of(name)

    return {path: kind(".".join(keys)) for path, keys in keys_of.items()}


def in_words(path: Any) -> Path:
    return tuple(key for key in map(words, keys_on(path)) if key)


# Cached, since an optimizer that is not compiled asks at every step.
@functools.lru_cache(maxsize=2**16)
def kind_of(name: str) -> str:
    """The kind that one name says, which is in words."""
    found = (kind for kind, expression in TABLE if re.search(expression, name))
    return next(found, OTHER)
