"""Printed lines wrap in a block without columns, such as a message."""

import re

from docutils import nodes
from sphinx.transforms.post_transforms import SphinxPostTransform

COLUMNS = re.compile(r"─|│|┐|   ")


class WrapMessages(SphinxPostTransform):
    default_priority = 700

    def run(self):
        for block in self.document.findall(nodes.literal_block):
            printed = block.get("language") == "text"
            if printed and not COLUMNS.search(block.astext()):
                block["classes"].append("message")


def setup(app):
    app.add_post_transform(WrapMessages)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
