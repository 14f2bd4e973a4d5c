"""Tables, and pages of sentences and tables, as text and as HTML for notebooks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from itertools import zip_longest
from typing import NamedTuple

__all__ = ["Table", "as_html", "as_text"]


class Table(NamedTuple):
    """A table of text: the first columns are names, the others numbers.

    >>> print(Table(["name", "bytes"], [["weight", "64"], ["bias", "8"]], title="Sizes").text())
    Sizes
    ┏━━━━━━━━┳━━━━━━━┓
    ┃ name   ┃ bytes ┃
    ┡━━━━━━━━╇━━━━━━━┩
    │ weight │    64 │
    │ bias   │     8 │
    └────────┴───────┘
    >>> Table(["name", "bytes"], [["a<b", "1"]]).html()
    '<table><thead><tr>...<tbody><tr><td style="text-align:left">a&lt;b</td><td>1</td></tr>...'
    """

    headings: Sequence[str]
    rows: Sequence[Sequence[str]]
    title: str = ""
    footer: Sequence[str] = ()
    notes: Sequence[str] = ()
    names: int = 1  # columns of names, aligned to the left

    def text(self) -> str:
        """Return it with lines around the cells, as wide as it is."""
        rows = [self.headings, *self.rows, self.footer]
        columns = zip_longest(*(map(_width, row) for row in rows), fillvalue=0)
        widths = [max(column) for column in columns]
        lines = [self.title] if self.title else []
        lines += [_rule("┏━┳┓", widths), *self._lines("┃", self.headings, widths)]
        lines += [_rule("┡━╇┩", widths)]
        for row in self.rows:
            lines += self._lines("│", row, widths)
        if self.footer:
            lines += [_rule("├─┼┤", widths), *self._lines("│", self.footer, widths)]
        return "\n".join([*lines, _rule("└─┴┘", widths), *self.notes])

    def _lines(self, side: str, row: Sequence[str], widths: Sequence[int]) -> Iterable[str]:
        cells = [*row, *[""] * (len(widths) - len(row))]
        for parts in zip_longest(*(cell.split("\n") for cell in cells), fillvalue=""):
            filled = [
                part.rjust(width) if number >= self.names else part.ljust(width)
                for number, (part, width) in enumerate(zip(parts, widths, strict=True))
            ]
            yield f"{side} {f' {side} '.join(filled)} {side}"

    def html(self) -> str:
        """Return it for a notebook."""
        caption = f"<caption>{escape(self.title)}</caption>" if self.title else ""
        head = f"<thead>{self._row(self.headings, 'th')}</thead>"
        body = f"<tbody>{''.join(self._row(row, 'td') for row in self.rows)}</tbody>"
        foot = f"<tfoot>{self._row(self.footer, 'th')}</tfoot>" if self.footer else ""
        return f"<table>{caption}{head}{body}{foot}</table>{as_html(self.notes)}"

    def _row(self, cells: Sequence[str], tag: str) -> str:
        left = ' style="text-align:left"'
        filled = (
            f"<{tag}{left if number < self.names else ''}>{escape(cell)}</{tag}>"
            for number, cell in enumerate(cells)
        )
        return f"<tr>{''.join(filled)}</tr>"


def _width(cell: str) -> int:
    return max(map(len, cell.split("\n")))


def _rule(drawn: str, widths: Sequence[int]) -> str:
    line = drawn[2].join(drawn[1] * (width + 2) for width in widths)
    return f"{drawn[0]}{line}{drawn[3]}"


def as_text(page: Iterable[str | Table]) -> str:
    """Return sentences and tables below one another."""
    return "\n".join(part if isinstance(part, str) else part.text() for part in page)


def as_html(page: Iterable[str | Table]) -> str:
    """Return sentences and tables for a notebook."""
    return "".join(
        f"<p>{escape(part)}</p>" if isinstance(part, str) else part.html() for part in page
    )
