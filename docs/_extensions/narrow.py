"""Two versions of a figure: NAME_narrow.png beside NAME.png is what a phone shows.

The style sheet shows one of the two.
"""

from pathlib import Path

from docutils import nodes
from sphinx.transforms import SphinxTransform


class AddNarrowVersions(SphinxTransform):
    default_priority = 400

    def apply(self):
        for image in list(self.document.findall(nodes.image)):
            wide = Path(image["uri"])
            narrow = wide.with_stem(f"{wide.stem}_narrow")
            if (Path(self.document["source"]).parent / narrow).exists():
                other = image.deepcopy()
                other["uri"] = str(narrow)
                for version, name in ((image, "wide"), (other, "narrow")):
                    version["classes"].append(name)
                    version["loading"] = "lazy"  # So that one of the two is loaded.
                image.parent.insert(image.parent.index(image) + 1, other)


def setup(app):
    app.add_transform(AddNarrowVersions)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
