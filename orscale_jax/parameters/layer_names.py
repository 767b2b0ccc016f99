"""The names of layers in transformers, mixtures and convolutional networks, as rules.

Names are read in words, in lower case and without underscores: "blocks.0.mlp.gate_proj"
is "blocks.0.mlp.gate proj", and "MultiHeadAttention_0" is "multi head attention 0".
"""

import re
from typing import NamedTuple

# Last keys that say nothing about the layer.
ARRAY = re.compile(r"kernel|weights?|w|dense|layer|base layer")

# Words that name an embedding or a head anywhere in a key, and those that end its name.
_TABLE = re.compile(r"embed|\b(wte|wpe|emb|vocab|tok|pos|logits)\d*\b")
_HEAD = re.compile(r"\b(head|classifier)\d*( \d+)*$")


def is_embedding_or_head(key: str) -> bool:
    """Whether a key in words is the name of an embedding table or an output head."""
    return bool(_TABLE.search(key) or _HEAD.search(key))


# Classes by the whole path: the first that matches applies.
_MODULE = r"\b[^.]*(\.\d+)?(\.[^.]+)?$"  # In the last key, or the last but one.
_NET = r"(?!.*\b(proj\w*|linear|dense|fc\d*|conv\d*|net|mod(ulation)?)\b)"
_VECTOR = r"(scales?|gains?|gammas?|betas?|offsets?)"
BY_PATH = (
    ("embedding", r"\btokens?$|(^|\.)cls$|^(\w+\.)?shared\.weight$"),
    ("embedding", r"\b(mask|iou|cls|class|register|prompt|query) tokens?\.weight$"),
    ("embedding", r"\brelative (position|attention) bias\b"),
    (
        "norm",
        r"(?!.*\bkernel)\b(\w*norm(alization)?s?\d*|ln\d*|bn\d*|rms)\b"
        rf"({_NET}|(?=.*\b{_VECTOR}$)){_MODULE}",
    ),
    ("norm", r"(?<!weight )(?<!spectral )\b(\w*norms?\d*|ln)( (\d+|f))?\.kernel$"),
    ("norm", r"norm\.(scale|shift)\.weights$"),
    ("bias", rf"\bbias(es)?\b{_NET}[^.]*(\.b)?$"),
    ("scale", rf"\b{_VECTOR}( ?\d+)?$|\blayer scale\b(?!.*\bkernel){_MODULE}"),
    ("other", r"\b(lora|adapters?|indexer)\b"),
    ("attention gate", r"\battention\.gating w$"),
    ("router", r"\b(router|gating)\b(?! (einsum|linear))"),
    ("head", r"\b(head|classifier)\d*( \d+)?(\.|$)|\blogits"),
    ("head", r"\b(unembed|embed out|logitdense)"),
)

# Keys that are parts of a model.
ATTENTION = re.compile(r"att(entio)?n|\bm[hlq]a\b")
EXPERT = re.compile(r"\b(experts?|mo ?e(?! layers?))\b")
MLP = re.compile(rf"{EXPERT.pattern}|mlp\d*\b|\b(ffn?|ffw|feed ?forward|swi ?glu)\b")
SHARED = re.compile(r"\bshared (expert|mlp)|^shared$")
# Keys side by side that show a mixture, or attention, without a module of its own.
EXPERTS_THEMSELVES = re.compile(r"(?!.*\bexperts?\b).*\brouter\b")
QUERY_AND_KEY = re.compile(r"(?=.*\b(w?q\b|quer))(?=.*\b(w?kv?\b|key))|.*\bw?qkvo?\b")


class NameRule(NamedTuple):
    """A rule that gives the class of a module, or of an array without one, by its name.

    Attributes:
      layer: The class; "{mlp}" stands for "mlp", "routed expert" or "shared expert".
      within: The parts of a model in which the rule holds: "attention", "mlp", "routed
        expert", "shared expert", or "block" for everything else; an "attention block" has
        the projections of attention among its own keys.
      name: A pattern of the name. For a numbered layer, the name begins with the key
        above: "layers 0".
      beside: A pattern of all keys in the same place, sorted and joined by "|".
    """

    layer: str
    within: str
    name: str
    beside: str = ""


_ATTENTION, _ATTENTION_OR_BLOCK = "attention.*", "attention|.*block"
_MLP, _MLP_OR_BLOCK = "mlp|.*expert", "mlp|.*expert|.*block"
_LAYER = r"( (proj(ection)?|layer))?"
_TWO = r"^(\w+ )?0\|(\w+ )?\d$"  # Dense_0 and Dense_1, or the 0 and 2 of a sequence.
BY_NAME = (
    NameRule("convolution", ".*", r"conv"),
    NameRule("attention latent down", _ATTENTION_OR_BLOCK, r"\bw?(q|kv) (a|down)\b"),
    NameRule("attention latent down", _ATTENTION_OR_BLOCK, r"^w d(q|kv)$"),
    NameRule("attention latent up", _ATTENTION_OR_BLOCK, r"\bw?(q|kv?|v) (b|up)\b"),
    NameRule("attention latent up", _ATTENTION_OR_BLOCK, r"^w u(q|kv?|v)$"),
    NameRule("attention qkvo", _ATTENTION_OR_BLOCK, r"\bqkvo\b"),
    NameRule("attention kv", "attention", r"^c attn$", r"\bq attn\b"),
    NameRule("attention qkv", _ATTENTION_OR_BLOCK, r"\bw?qkv\b|query key value|^c attn$"),
    NameRule("attention qkv", "attention", r"^in proj( weight)?$"),
    NameRule("attention qkv", "attention", r"^(dense|linear) 0$", _TWO),
    NameRule("attention output", "attention", r"^(dense|linear) \d$", _TWO),
    NameRule("attention kv", _ATTENTION_OR_BLOCK, r"\bw?kv\b|key value"),
    NameRule("attention query", _ATTENTION, r"\bw?q\b"),
    NameRule("attention query", _ATTENTION_OR_BLOCK, r"\bquer(y|ies)\b|\bq proj\b"),
    NameRule("attention key", _ATTENTION, r"\b(w?k|keys?)\b"),
    NameRule("attention key", _ATTENTION_OR_BLOCK, r"\bk proj\b"),
    NameRule("attention value", _ATTENTION, r"\b(w?v|values?)\b"),
    NameRule("attention value", _ATTENTION_OR_BLOCK, r"\bv proj\b"),
    NameRule("attention gate", "attention", r"\b(g|gate)\b"),
    NameRule("{mlp} down", "attention block", r"^wo$", r"\bwi\b"),
    NameRule(
        "attention output", _ATTENTION, r"^((to|linear|attention) )?out(put)?\b|^(w ?)?o$"
    ),
    NameRule("attention output", _ATTENTION, r"^((c|linear) )?proj(ection)?$"),
    NameRule("attention output", _ATTENTION, r"^linear$|^proj out$", r"\b(q|query)\b"),
    NameRule("attention output", "attention", r"^attn vec\b"),
    NameRule("attention output", "attention", r"^((cross|self) )?attention$"),  # .dense
    NameRule("attention output", _ATTENTION_OR_BLOCK, r"\bo proj\b"),
    NameRule("router", _MLP, r"\bexpert gate$", r"^(?!.*\bexpert up\b)"),
    NameRule("router", _MLP_OR_BLOCK, r"^(moe )?gate$", r"\bexperts?\b|\bgate up\b"),
    NameRule("router", "routed expert", r"^(moe )?gate$", r"^(?!.*\b(up|down)\b)"),
    NameRule("{mlp} gate up", _MLP_OR_BLOCK, r"\bgate (and )?up\b|\bup (and )?gate\b"),
    NameRule("{mlp} gate up", _MLP_OR_BLOCK, r"^gating einsum$|^w1[23]$"),
    NameRule("{mlp} gate", _MLP, r"\bgate\b|^gating linear$"),
    NameRule("{mlp} up", _MLP, r"^value linear$", r"\bgating linear\b"),
    NameRule("{mlp} gate", _MLP_OR_BLOCK, r"\bgate\b", r"\bup\b"),
    NameRule("{mlp} gate", _MLP_OR_BLOCK, r"^wi 0$", r"\bwi 1\b"),
    NameRule("{mlp} gate", _MLP_OR_BLOCK, r"^w1$", r"\b(w3|v1)\b"),
    NameRule("{mlp} up", _MLP_OR_BLOCK, r"^w2$", r"\bw1 like w2\b"),
    NameRule("{mlp} down", _MLP_OR_BLOCK, r"^w3$", r"\b(w1 like w2|w12)\b"),
    NameRule("{mlp} up", _MLP_OR_BLOCK, r"\bup\b|^wi\b|^(w[13]|v1)$|^c fc$|^fc in$"),
    NameRule("{mlp} down", _MLP_OR_BLOCK, r"\bdown\b|^(wo|w2)\b|^fc out$"),
    NameRule("{mlp} up", _MLP_OR_BLOCK, r"\bh to 4 h$|^intermediate$"),
    NameRule("{mlp} down", _MLP_OR_BLOCK, r"\b4 h to h$"),
    NameRule("{mlp} down", _MLP_OR_BLOCK, r"^output$", r"\bintermediate\b"),
    NameRule("{mlp} up", _MLP, r"^(linear )?(fc|lin|linear)1$|^fc$|^(w |linear )?in\b"),
    NameRule("{mlp} down", _MLP, r"^(linear )?(fc|lin|linear)2$|\bout(put)?\b"),
    NameRule("{mlp} up", _MLP, r"^input linear$"),
    NameRule("{mlp} gate", _MLP, r"^fc 1$", r"\bfc 2\|proj$"),
    NameRule("{mlp} up", _MLP, r"^fc 2$", r"\bfc 2\|proj$"),
    NameRule("{mlp} down", _MLP, r"^(c )?proj$", r"\bfc\b"),
    NameRule("{mlp} down", _MLP, r"^linear$", r"^gating einsum\b"),
    NameRule("{mlp} up", ".*block", r"^(fc|lin|linear)1$", r"att(entio)?n\b"),
    NameRule("{mlp} down", ".*block", r"^(fc|lin|linear)2$", r"att(entio)?n\b"),
    NameRule("{mlp} up", _MLP, r"^(?!experts?\b).* 0$", _TWO),
    NameRule("{mlp} down", _MLP, r"^(?!experts?\b).* \d$", _TWO),
    NameRule("head", ".*block", rf"^output{_LAYER}$", r"\b(embed|(wte|emb)\b)"),
)
