"""Tables for notebooks, as HTML."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

__all__ = ["html_table"]


def html_table(
    headings: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    title: str = "",
    footer: Sequence[str] = (),
    notes: Sequence[str] = (),
) -> str:
    """Return a table, and notes below it; the first column is text, the others are numbers.

    >>> html_table(["name", "bytes"], [["a<b", "1"]])
    '<table><thead><tr>...<tbody><tr><td style="text-align:left">a&lt;b</td><td>1</td></tr>...'
    """
    caption = f"<caption>{escape(title)}</caption>" if title else ""
    head = f"<thead>{_row(headings, 'th')}</thead>"
    body = f"<tbody>{''.join(_row(row, 'td') for row in rows)}</tbody>"
    foot = f"<tfoot>{_row(footer, 'th')}</tfoot>" if footer else ""
    below = "".join(f"<p>{escape(note)}</p>" for note in notes)
    return f"<table>{caption}{head}{body}{foot}</table>{below}"


def _row(cells: Sequence[str], tag: str) -> str:
    styles = (' style="text-align:left"', *[""] * (len(cells) - 1))
    filled = (
        f"<{tag}{style}>{escape(cell)}</{tag}>" for cell, style in zip(cells, styles, strict=True)
    )
    return f"<tr>{''.join(filled)}</tr>"
