"""A table of strings, for terminals and notebooks."""

import html
from typing import TYPE_CHECKING, Literal, NamedTuple, TypeAlias

if TYPE_CHECKING:
    import rich.table

Cells: TypeAlias = tuple[str, ...]


class Table(NamedTuple):
    """A table and the lines below it.

    Attributes:
      headings: The headings of the columns.
      rows: The rows, with a cell for each column.
      totals: The last rows, below a rule.
      notes: The lines below.
      words: The number of leading columns that hold words; the others hold numbers.
    """

    headings: Cells
    rows: list[Cells]
    totals: list[Cells]
    notes: list[str]
    words: int

    def text(self) -> str:
        """The table as fixed-width text."""
        columns = zip(self.headings, *self.rows, *self.totals, strict=True)
        widths = [max(map(len, column)) for column in columns]
        rule = tuple("─" * width for width in widths)
        lines = [
            "  ".join(
                f"{cell:{'<' if self._side(i) == 'left' else '>'}{width}}"
                for i, (cell, width) in enumerate(zip(cells, widths, strict=True))
            ).rstrip()
            for cells in (self.headings, rule, *self.rows, rule, *self.totals)
        ]
        return "\n".join([*lines, "", *self.notes]).rstrip()

    def html(self) -> str:
        """The table in HTML, and its notes in a paragraph."""
        return "\n".join(
            [
                "<table>",
                f"<thead>{self._html_row('th', self.headings)}</thead>",
                "<tbody>",
                *(self._html_row("td", cells) for cells in self.rows),
                "</tbody>",
                "<tfoot>",
                *(self._html_row("td", cells) for cells in self.totals),
                "</tfoot>",
                "</table>",
                f"<p>{'<br>'.join(map(html.escape, self.notes))}</p>",
            ]
        )

    def rich(self) -> "rich.table.Table":
        """The table for rich, which may not be installed."""
        try:
            import rich.table
            import rich.text
        except ImportError as error:
            raise ImportError(
                "Description.table() needs rich: pip install orscale-jax[describe]. "
                "print(description) works without it."
            ) from error
        notes = rich.text.Text("\n".join(self.notes))
        table = rich.table.Table(caption=notes, caption_justify="left")
        for index, heading in enumerate(self.headings):
            table.add_column(heading, justify=self._side(index), overflow="fold")
        for cells in self.rows:
            table.add_row(*map(rich.text.Text, cells))
        table.add_section()
        for cells in self.totals:
            table.add_row(*map(rich.text.Text, cells))
        return table

    def _side(self, index: int) -> Literal["left", "right"]:
        return "left" if index < self.words else "right"

    def _html_row(self, tag: str, cells: Cells) -> str:
        columns = (
            f'<{tag} style="text-align: {self._side(index)}">{html.escape(cell)}</{tag}>'
            for index, cell in enumerate(cells)
        )
        return f"<tr>{''.join(columns)}</tr>"
