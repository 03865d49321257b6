"""Formulas as MathML, by the converter of docutils.

Browsers render MathML themselves, so that pages load no external fonts and scripts.
"""

from __future__ import annotations

from docutils import nodes
from docutils.utils.math import MathError
from docutils.utils.math.latex2mathml import tex2mathml
from sphinx.application import Sphinx
from sphinx.errors import ExtensionError
from sphinx.writers.html5 import HTML5Translator


def _mathml(node: nodes.Element, *, as_block: bool) -> str:
    try:
        return tex2mathml(node.astext(), as_block=as_block)
    except (MathError, SyntaxError) as error:
        raise ExtensionError(
            f"the formula {node.astext()!r} is not understood: {error}"
        ) from error


def visit_inline(translator: HTML5Translator, node: nodes.math) -> None:
    """Write an inline formula (`$...$`)."""
    translator.body.append(_mathml(node, as_block=False))
    raise nodes.SkipNode


def visit_block(translator: HTML5Translator, node: nodes.math_block) -> None:
    """Write a displayed formula (`$$...$$`)."""
    translator.body.append(
        f'<div class="formula">{_mathml(node, as_block=True)}</div>\n'
    )
    raise nodes.SkipNode


def setup(app: Sphinx) -> dict[str, bool]:
    """Register the renderer with Sphinx."""
    app.add_html_math_renderer("mathml", (visit_inline, None), (visit_block, None))
    app.config.html_math_renderer_name = "mathml"
    return {"parallel_read_safe": True, "parallel_write_safe": True}
