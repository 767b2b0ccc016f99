"""Options for tests that look at compiled programs."""

import importlib.metadata

# Programs as users have them, where the flags of conftest.py change what is fused.
WITH_FUSION_EMITTERS = (
    {"xla_cpu_use_fusion_emitters": True}
    if importlib.metadata.version("jaxlib") < "0.11"
    else {}
)
