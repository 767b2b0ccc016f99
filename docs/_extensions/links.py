"""Names of JAX, Optax, Flax, Orbax and this library link to their documentation."""

import re
from collections import Counter

from docutils import nodes
from sphinx.ext.intersphinx import InventoryAdapter
from sphinx.transforms.post_transforms import SphinxPostTransform

SHORT = {"nnx": "flax.nnx", "nn": "flax.linen", "ocp": "orbax.checkpoint"}
NAME = re.compile(r"(\w+)((?:\.\w+)*)(\(.*)?", re.DOTALL)  # Perhaps with arguments.
OURS = "orscale_jax."


class LinkNames(SphinxPostTransform):
    default_priority = 700

    def run(self):
        theirs = InventoryAdapter(self.env).main_inventory
        theirs = {name: item for kind in theirs.values() for name, item in kind.items()}
        ours, linked = self.names_of_ours(), set()
        for code in list(self.document.findall(nodes.literal)):
            match = NAME.fullmatch(code.astext())
            inside = isinstance(code.parent, nodes.reference | nodes.title)
            if not match or inside or "xref" in code["classes"]:
                continue
            name = match[1] + match[2]
            full = SHORT.get(match[1], match[1]) + match[2]
            if match[2] and full in theirs:
                code.replace_self(self.link(code, theirs[full].uri, internal=False))
            elif name in ours and name not in linked:  # Once on a page.
                linked.add(name)
                code.replace_self(self.link(code, ours[name], internal=True))

    def link(self, code, address, internal):
        link = nodes.reference(refuri=address, internal=internal)
        link += code.deepcopy()
        return link

    def names_of_ours(self):
        """The address of each function and class, by the names that pages use."""
        here = self.env.docname
        if here.startswith("api/"):
            return {}
        objects = {
            name.removeprefix(OURS): item
            for name, item in self.env.get_domain("py").objects.items()
            if name.startswith(OURS) and item.objtype in ("function", "class")
        }
        # `nnx_dimension_numbers` is `orscale_jax.flax.nnx_dimension_numbers`.
        last = Counter(name.rpartition(".")[2] for name in objects)
        objects |= {
            short: item
            for name, item in objects.items()
            if "_" in (short := name.rpartition(".")[2]) and last[short] == 1
        }
        address = self.app.builder.get_relative_uri
        return {
            name: f"{address(here, item.docname)}#{item.node_id}"
            for name, item in objects.items()
        }


def setup(app):
    app.add_post_transform(LinkNames)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
