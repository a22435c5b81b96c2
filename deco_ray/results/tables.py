"""One table, every way people read it: terminal, Markdown, CSV, LaTeX; the HTML report takes the same object."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from deco_ray.artefacts import write_atomically

DASH = "–"  # shown for a value that does not exist


@dataclass(frozen=True)
class Estimate:
    """A mean with the spread over runs (none for a single run)."""

    mean: float
    std: float | None = None

    def text(self, digits: int = 2) -> str:
        mean = decimal(self.mean, digits)
        return mean if self.std is None else f"{mean} ± {decimal(self.std, digits)}"


def estimate(values: Sequence[float], scale: float = 1.0) -> Estimate | None:
    """Mean and sample standard deviation (ddof = 1: the paper does not say which); none without finite values."""
    finite = np.asarray([value for value in values if value is not None and math.isfinite(value)], dtype=float) * scale
    if not len(finite):
        return None
    return Estimate(float(finite.mean()), float(finite.std(ddof=1)) if len(finite) > 1 else None)


@dataclass(frozen=True)
class Column:
    title: str
    digits: int = 2
    best: Literal["high", "low"] | None = None  # which value wins when the best is to be bold
    group: str = ""  # heading above neighbouring columns, e.g. the paper's


@dataclass(frozen=True)
class Table:
    """Rows of strings, numbers, Estimates or None under typed columns."""

    columns: tuple[Column, ...]
    rows: list[list[Any]]
    caption: str = ""
    note: str = ""

    def text(self, row: int, column: int) -> str:
        return " ".join(show(self.rows[row][column], self.columns[column].digits).split())

    def titles(self) -> list[str]:
        return [f"{column.title} ({column.group})" if column.group else column.title for column in self.columns]

    def numeric(self, column: int) -> bool:
        """True when the column holds numbers only: right-aligned, sorted by value."""
        cells = [row[column] for row in self.rows if row[column] is not None]
        return bool(cells) and all(sort_value(cell) is not None for cell in cells)

    def best_rows(self, column: int) -> set[int]:
        """Rows whose shown value is the column's best (ties share it)."""
        rule = self.columns[column].best
        values = {row: v for row in range(len(self.rows)) if (v := sort_value(self.rows[row][column])) is not None}
        if rule is None or not values:
            return set()
        digits = self.columns[column].digits
        target = (max if rule == "high" else min)(round(value, digits) for value in values.values())
        return {row for row, value in values.items() if round(value, digits) == target}

    def plain(self) -> str:
        """For a terminal: aligned columns, a rule below the heads."""
        cells = [self.titles(), *([self.text(r, c) for c in range(len(self.columns))] for r in range(len(self.rows)))]
        widths = [max(len(line[c]) for line in cells) for c in range(len(self.columns))]
        right = [self.numeric(c) for c in range(len(self.columns))]
        lines = [
            "  ".join(
                text.rjust(width) if side else text.ljust(width) for text, width, side in zip(line, widths, right)
            )
            for line in cells
        ]
        lines.insert(1, "  ".join("─" * width for width in widths))
        head = [self.caption] if self.caption else []
        foot = [self.note] if self.note else []
        return "\n".join(line.rstrip() for line in head + lines + foot) + "\n"

    def markdown(self) -> str:
        def line(cells: list[str]) -> str:
            return "| " + " | ".join(cells) + " |"

        rule = ["---:" if self.numeric(c) else "---" for c in range(len(self.columns))]
        body = [
            line([_markdown_text(self.text(r, c)) for c in range(len(self.columns))]) for r in range(len(self.rows))
        ]
        head = [f"**{_markdown_text(self.caption)}**", ""] if self.caption else []
        foot = ["", _markdown_text(self.note)] if self.note else []
        return "\n".join([*head, line([_markdown_text(t) for t in self.titles()]), line(rule), *body, *foot]) + "\n"

    def csv(self) -> str:
        """Full precision; an Estimate becomes two columns, its mean and its std."""
        spread = [any(isinstance(row[c], Estimate) for row in self.rows) for c in range(len(self.columns))]
        buffer = io.StringIO()
        writer = csv.writer(buffer, lineterminator="\n")
        head: list[str] = []
        for title, wide in zip(self.titles(), spread):
            head += [title, f"{title} std"] if wide else [title]
        writer.writerow(head)
        for row in self.rows:
            line: list[Any] = []
            for cell, wide in zip(row, spread):
                mean, std = (cell.mean, cell.std) if isinstance(cell, Estimate) else (cell, None)
                line += [mean, std] if wide else [mean]
            writer.writerow(["" if cell is None else cell for cell in line])
        return buffer.getvalue()

    def latex(self, bold_best: bool = False) -> str:
        """booktabs; the std as a subscript, as in the paper; the best in bold only when asked."""
        best = [self.best_rows(c) if bold_best else set() for c in range(len(self.columns))]
        layout = "".join("c" if self.numeric(c) else "l" for c in range(len(self.columns)))
        lines = [r"\begin{table}[t]", r"\centering", r"\small"]
        if self.caption:
            lines.append(rf"\caption{{{latex_text(self.caption)}}}")
        lines += [rf"\begin{{tabular}}{{{layout}}}", r"\toprule", *self._latex_heads(), r"\midrule"]
        for r, row in enumerate(self.rows):
            cells = [_latex_cell(cell, self.columns[c].digits, r in best[c]) for c, cell in enumerate(row)]
            lines.append(" & ".join(cells) + r" \\")
        lines += [r"\bottomrule", r"\end{tabular}"]
        spread = any(isinstance(cell, Estimate) and cell.std is not None for row in self.rows for cell in row)
        note = " ".join(filter(None, [self.note, "The subscript is the std." if spread else ""]))
        if note:
            lines.append(rf"\par\smallskip\footnotesize {latex_text(note)}")
        return "\n".join([*lines, r"\end{table}"]) + "\n"

    def _latex_heads(self) -> list[str]:
        titles = " & ".join(latex_text(column.title) for column in self.columns) + r" \\"
        if not any(column.group for column in self.columns):
            return [titles]
        spans: list[list[Any]] = []  # heading, first column, last column
        for c, column in enumerate(self.columns, start=1):
            if spans and spans[-1][0] == column.group:
                spans[-1][2] = c
            else:
                spans.append([column.group, c, c])
        above = " & ".join(
            rf"\multicolumn{{{last - first + 1}}}{{c}}{{{latex_text(name)}}}" for name, first, last in spans
        )
        rules = "".join(rf"\cmidrule(lr){{{first}-{last}}}" for name, first, last in spans if name)
        return [above + r" \\", rules, titles]

    def save(self, folder: str | Path, name: str, bold_best: bool = False) -> Path:
        """Write <name>.md, .csv and .tex into the folder; returns the Markdown file's path."""
        path = Path(folder) / f"{name}.md"
        write_atomically(path, self.markdown())
        write_atomically(path.with_suffix(".csv"), self.csv())
        write_atomically(path.with_suffix(".tex"), self.latex(bold_best))
        return path


def decimal(value: float, digits: int) -> str:
    """A number as every notation shows it; what rounds to zero has no sign."""
    return f"{value:z.{digits}f}"


def show(cell: Any, digits: int) -> str:
    if cell is None or (isinstance(cell, float) and not math.isfinite(cell)):
        return DASH
    if isinstance(cell, Estimate):
        return cell.text(digits) if math.isfinite(cell.mean) else DASH
    if isinstance(cell, (float, np.floating)):
        return decimal(float(cell), digits)
    if isinstance(cell, (int, np.integer)) and not isinstance(cell, bool):
        return f"{cell:,}"
    return str(cell)


def sort_value(cell: Any) -> float | None:
    """The number a cell sorts by; none for text and for missing values."""
    if isinstance(cell, Estimate):
        cell = cell.mean
    if isinstance(cell, (bool, str)) or cell is None:
        return None
    return float(cell) if math.isfinite(float(cell)) else None


def _markdown_text(text: str) -> str:
    text = text.replace("\\", "\\\\").replace("|", "\\|").replace("<", "&lt;")
    return " ".join(text.split())


LATEX_SPECIALS = {
    "\\": r"\textbackslash{}",
    "&": r"\&",
    "%": r"\%",
    "$": r"\$",
    "#": r"\#",
    "_": r"\_",
    "{": r"\{",
    "}": r"\}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "±": r"$\pm$",
    "×": r"$\times$",
    "→": r"$\rightarrow$",
    "−": r"$-$",
    "λ": r"$\lambda$",
    "α": r"$\alpha$",
    "β": r"$\beta$",
    "τ": r"$\tau$",
    "ρ": r"$\rho$",
    "–": "--",
}


def latex_text(text: str) -> str:
    return "".join(LATEX_SPECIALS.get(character, character) for character in " ".join(text.split()))


def _latex_cell(cell: Any, digits: int, bold: bool) -> str:
    """Numbers as mathematics, where a minus is no hyphen; only they can be best, and so bold."""
    if sort_value(cell) is None:
        return latex_text(show(cell, digits))
    mean, std = (cell.mean, cell.std) if isinstance(cell, Estimate) else (cell, None)
    text = show(mean, digits).replace(",", "{,}")
    below = "" if std is None else rf"_{{\scriptscriptstyle {decimal(std, digits)}}}"
    return rf"$\mathbf{{{text}}}{below}$" if bold else f"${text}{below}$"
