"""Formulas as MathML, which browsers draw without a script or a network."""

import re

from docutils import nodes
from latex2mathml.converter import convert
from sphinx.util import logging

# What the converter passes through: an unknown command, or & in an unknown environment.
NOT_CONVERTED = re.compile(r"<m(?:[io]|text)>(?:&(?!#)|\\)")

# The bars of a norm, which browsers would space as binary operators.
NORM = '<mo fence="false" stretchy="false"'

LOG = "<mi>log</mi>"  # Its argument follows without a space.


def mathml(node, display):
    tex = node.astext()
    if r"\\" in tex and r"\begin" not in tex:
        tex = rf"\begin{{split}}{tex}\end{{split}}"  # As Sphinx's own renderers do.
    formula = convert(tex, display=display)
    if NOT_CONVERTED.search(formula):
        logging.getLogger(__name__).warning("not converted: %s", tex, location=node)
    formula = formula.replace(LOG, f'<mrow>{LOG}<mspace width="0.17em"/></mrow>')
    return formula.replace(NORM, f'{NORM} lspace="0" rspace="0"')


def visit_inline(self, node):
    self.body.append(mathml(node, "inline"))
    raise nodes.SkipNode


def visit_block(self, node):
    self.body.append(self.starttag(node, "div", CLASS="math"))
    self.body.append(mathml(node, "block"))
    self.body.append("</div>\n")
    raise nodes.SkipNode


def setup(app):
    app.add_html_math_renderer("mathml", (visit_inline, None), (visit_block, None))
    return {"parallel_read_safe": True, "parallel_write_safe": True}
