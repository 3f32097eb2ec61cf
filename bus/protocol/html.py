"""Tables as HTML, for the `_repr_html_` by which notebooks show results."""

from collections.abc import Iterable, Sequence
from html import escape


def as_html(title: str, rows: Iterable[Sequence[object]], columns: Sequence[str] = ()) -> str:
    """Return a table with a title. All text is escaped, because workers and users choose names."""
    body = "".join(f"<tr>{''.join(f'<td>{_text(cell)}</td>' for cell in row)}</tr>" for row in rows)
    head = f"<tr>{''.join(f'<th>{_text(name)}</th>' for name in columns)}</tr>" if columns else ""
    return f"<table><caption>{_text(title)}</caption>{head}{body}</table>"


def _text(value: object) -> str:
    return escape("" if value is None else str(value))
