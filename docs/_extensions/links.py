"""Names of JAX, Optax, Flax and Orbax in pages link to their documentation."""

import re

from docutils import nodes
from sphinx.ext.intersphinx import InventoryAdapter
from sphinx.transforms.post_transforms import SphinxPostTransform

SHORT = {"nnx": "flax.nnx", "nn": "flax.linen", "ocp": "orbax.checkpoint"}
NAME = re.compile(r"(\w+)(\.[\w.]+)(\(.*)?")  # Perhaps with arguments.


class LinkNames(SphinxPostTransform):
    default_priority = 700

    def run(self):
        known = InventoryAdapter(self.env).main_inventory
        known = {name: item for kind in known.values() for name, item in kind.items()}
        for code in list(self.document.findall(nodes.literal)):
            match = NAME.fullmatch(code.astext())
            linked = isinstance(code.parent, nodes.reference)
            if not match or linked or "xref" in code["classes"]:
                continue
            name = SHORT.get(match[1], match[1]) + match[2]
            if name in known:
                link = nodes.reference(refuri=known[name].uri, internal=False)
                code.replace_self(link)
                link += code


def setup(app):
    app.add_post_transform(LinkNames)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
