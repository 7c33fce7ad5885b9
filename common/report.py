"""Tables with footnotes in Markdown, LaTeX, HTML and as a picture, and the page that shows everything."""

from __future__ import annotations

import base64
import html
import string
from dataclasses import dataclass, field
from pathlib import Path

from common.results import Stat
from common.runs import atomic_path

DASH = "-"


@dataclass
class Entry:
    """One place of a table: the text, notes that become footnotes, and whether it is set in bold.

    `beside`: at the start of a row that only stands beside the one above it (the paper's numbers, a control).
    """

    text: str
    notes: list[str] = field(default_factory=list)
    bold: bool = False
    beside: bool = False


def number(stat: Stat | None, digits: int = 4) -> str:
    """``0.2061 ± 0.0093``, without the deviation if there is none; a dash for nothing."""
    if stat is None:
        return DASH
    return f"{stat.mean:.{digits}f}" + (f" ± {stat.std:.{digits}f}" if stat.std is not None else "")


@dataclass
class Table:
    """Rows of entries under a head; footnotes are lettered in the order of their first use."""

    title: str
    head: list[str]
    rows: list[list[Entry]] = field(default_factory=list)
    caption: str = ""

    def footnotes(self) -> dict[str, str]:
        """Note to letter: a, b, ..., z, aa, ..."""
        found: dict[str, str] = {}
        letters = string.ascii_lowercase
        for row in self.rows:
            for entry in row:
                for note in entry.notes:
                    if note not in found:
                        index = len(found)
                        found[note] = (letters[index // 26 - 1] if index >= 26 else "") + letters[index % 26]
        return found

    def _marks(self, entry: Entry) -> str:
        letters = self.footnotes()
        return ",".join(letters[note] for note in entry.notes)

    def markdown(self) -> str:
        """A pipe table; footnotes as superscripts and a list."""
        cells = [
            [
                (f"**{entry.text}**" if entry.bold else entry.text)
                + (f" <sup>{self._marks(entry)}</sup>" if entry.notes else "")
                for entry in row
            ]
            for row in self.rows
        ]
        lines = [self.head, *cells]
        widths = [max(len(line[i]) for line in lines) for i in range(len(self.head))]
        text = ["| " + " | ".join(cell.ljust(width) for cell, width in zip(line, widths)) + " |" for line in lines]
        rule = "|" + "|".join("-" * (width + 2) for width in widths) + "|"
        notes = [f"<sup>{letter}</sup> {note}" for note, letter in self.footnotes().items()]
        parts = [f"**{self.title}**", "\n".join([text[0], rule, *text[1:]]), self.caption, "  \n".join(notes)]
        return "\n\n".join(part for part in parts if part) + "\n"

    def latex(self) -> str:
        """A table environment that needs booktabs; footnotes below the table."""

        def escape(text: str) -> str:
            for old, new in (("\\", r"\textbackslash{}"), ("&", r"\&"), ("%", r"\%"), ("_", r"\_"), ("#", r"\#")):
                text = text.replace(old, new)
            return text.replace("±", r"$\pm$")

        def cell(entry: Entry) -> str:
            text = rf"\textbf{{{escape(entry.text)}}}" if entry.bold else escape(entry.text)
            return text + (rf"\textsuperscript{{{self._marks(entry)}}}" if entry.notes else "")

        lines = [r"\begin{table}[t]", r"\centering", rf"\caption{{{escape(self.title)}. {escape(self.caption)}}}"]
        lines += [rf"\begin{{tabular}}{{l{'c' * (len(self.head) - 1)}}}", r"\toprule"]
        lines += [" & ".join(map(escape, self.head)) + r" \\", r"\midrule"]
        lines += [" & ".join(map(cell, row)) + r" \\" for row in self.rows]
        lines += [r"\bottomrule", r"\end{tabular}"]
        if self.footnotes():
            notes = [rf"\textsuperscript{{{letter}}} {escape(note)}" for note, letter in self.footnotes().items()]
            lines += [r"\par\smallskip\footnotesize", r" \quad ".join(notes)]
        return "\n".join([*lines, r"\end{table}"]) + "\n"

    def html(self) -> str:
        """A table element and its footnotes."""

        def cell(entry: Entry, tag: str = "td") -> str:
            text = html.escape(entry.text)
            text = f"<b>{text}</b>" if entry.bold else text
            return f"<{tag}>{text}" + (f"<sup>{self._marks(entry)}</sup>" if entry.notes else "") + f"</{tag}>"

        head = "".join(f"<th>{html.escape(name)}</th>" for name in self.head)
        kinds = [' class="beside"' if row[0].beside else "" for row in self.rows]
        rows = "".join(
            f"<tr{kind}>" + cell(row[0], "th") + "".join(map(cell, row[1:])) + "</tr>"
            for kind, row in zip(kinds, self.rows)
        )
        notes = "".join(f"<li><sup>{k}</sup> {html.escape(note)}</li>" for note, k in self.footnotes().items())
        caption = f"<p>{html.escape(self.caption)}</p>" if self.caption else ""
        return (
            f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div>{caption}'
            + (f'<ul class="notes">{notes}</ul>' if notes else "")
        )

    def picture(self, path: Path) -> Path:
        """Draws the table into a PNG."""
        import matplotlib

        matplotlib.use("Agg")
        import textwrap

        from matplotlib import pyplot as plt

        def text(entry: Entry) -> str:
            marks = self._marks(entry)
            return entry.text + (f" $^{{{marks}}}$" if marks else "")

        cells = [[text(entry) for entry in row] for row in self.rows]
        plain = [[entry.text + self._marks(entry) for entry in row] for row in self.rows]
        lengths = [max(len(line[i]) for line in [self.head, *plain]) + 2 for i in range(len(self.head))]
        width = 0.085 * sum(lengths) + 0.2
        below = [f"$^{{{letter}}}$ {note}" for note, letter in self.footnotes().items()]
        wrapped = [line for note in [self.caption, *below] if note for line in textwrap.wrap(note, int(width * 13))]
        rows = len(cells) + 1
        height = 0.26 * rows + 0.45 + 0.18 * len(wrapped)
        figure = plt.figure(figsize=(width, height))
        axis = figure.add_axes((0, 0.18 * len(wrapped) / height, 1, 0.26 * rows / height))
        axis.axis("off")
        drawn = axis.table(
            cells, colLabels=self.head, loc="center", cellLoc="center", bbox=(0, 0, 1, 1),
            colWidths=[length / sum(lengths) for length in lengths],
        )  # fmt: skip
        drawn.auto_set_font_size(False)
        drawn.set_fontsize(8)
        for (line, column), place in drawn.get_celld().items():
            place.set_linewidth(0)
            if column == 0:
                place.set_text_props(ha="left")
            if line == 0:
                place.set_text_props(weight="bold")
                place.set_facecolor("#e8e8e8")
            elif self.rows[line - 1][column].bold:
                place.set_text_props(weight="bold")
        figure.text(0.01, 1 - 0.12 / height, self.title, va="top", weight="bold", fontsize=9)
        for i, line in enumerate(wrapped):
            figure.text(0.01, (0.18 * (len(wrapped) - i) - 0.04) / height, line, va="top", fontsize=7)
        with atomic_path(path) as temporary:
            figure.savefig(temporary, dpi=160)
        plt.close(figure)
        return path

    def write(self, folder: Path, name: str) -> list[Path]:
        """Writes name.md, name.tex and name.png into a folder."""
        for suffix, content in ((".md", self.markdown()), (".tex", self.latex())):
            with atomic_path(folder / f"{name}{suffix}") as temporary:
                temporary.write_text(content)
        return [folder / f"{name}.md", folder / f"{name}.tex", self.picture(folder / f"{name}.png")]


# ---------------------------------------------------------------------------------------------------------------------


@dataclass
class Item:
    """Something on the page: a table, pictures, or what is missing; always with the command behind it."""

    name: str
    title: str
    section: str
    command: str
    text: str = ""
    table: Table | None = None
    pictures: list[Path] = field(default_factory=list)
    missing: str = ""


STYLE = """
:root { color-scheme: light dark; --line: #8884; --soft: #8881; }
body { font: 16px/1.5 system-ui, sans-serif; margin: 0 auto; max-width: 84rem; padding: 1rem; }
h1 { font-size: 1.5rem; } h3 { margin: 1.8rem 0 .3rem; }
h2 { margin-top: 2.5rem; border-bottom: 1px solid var(--line); }
nav a { margin-right: 1rem; white-space: nowrap; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-size: .85rem; font-variant-numeric: tabular-nums; }
th, td { padding: .25rem .6rem; text-align: right; white-space: nowrap; border-bottom: 1px solid var(--line); }
tr > th:first-child { text-align: left; position: sticky; left: 0; background: Canvas; }
tbody > tr > th { white-space: normal; min-width: 6.5rem; max-width: 12rem; }
thead > tr > th { white-space: normal; vertical-align: bottom; }
.beside { color: color-mix(in srgb, CanvasText 60%, Canvas); }
.beside > th { font-weight: normal; padding-left: 1.2rem; }
@media (max-width: 40rem) {
  table { font-size: .75rem; } th, td { padding: .2rem .4rem; }
  .wide > img { max-width: none; width: auto; max-height: 75vh; }
}
img { max-width: 100%; height: auto; background: white; display: block; margin: .5rem 0; }
pre { background: var(--soft); padding: .5rem .7rem; overflow-x: auto; font-size: .8rem; margin: .4rem 0; }
.notes { font-size: .8rem; padding-left: 1rem; list-style: none; }
.missing { border-left: 4px solid #c80; padding-left: .8rem; }
"""


def page(path: Path, title: str, about: str, items: list[Item]) -> Path:
    """Writes one HTML file that needs no other: tables as text, pictures inside, what is missing with its command."""
    sections: dict[str, list[Item]] = {}
    for item in items:
        sections.setdefault(item.section, []).append(item)
    slug = {name: f"s{i}" for i, name in enumerate(sections)}
    body = [f"<h1>{html.escape(title)}</h1><p>{html.escape(about)}</p><nav>"]
    body += [f'<a href="#{slug[name]}">{html.escape(name)}</a>' for name in sections] + ["</nav>"]
    for name, members in sections.items():
        body.append(f'<h2 id="{slug[name]}">{html.escape(name)}</h2>')
        for item in members:
            body.append(f'<section id="{html.escape(item.name)}"><h3>{html.escape(item.title)}</h3>')
            if item.text:
                body.append(f"<p>{html.escape(item.text)}</p>")
            for picture in item.pictures:
                data = base64.b64encode(picture.read_bytes()).decode()
                alt = html.escape(f"{item.title}: {picture.stem}")
                body.append(f'<div class="wide"><img alt="{alt}" src="data:image/png;base64,{data}"></div>')
            if item.table is not None:
                numbers = item.table.html()
                body.append(f"<details><summary>Numbers</summary>{numbers}</details>" if item.pictures else numbers)
            if item.missing:
                body.append(f'<p class="missing">{html.escape(item.missing)}</p>')
            body.append(f"<pre>{html.escape(item.command)}</pre></section>")
    text = "\n".join(
        [
            '<!doctype html><html lang="en"><head><meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>{html.escape(title)}</title><style>{STYLE}</style></head><body>",
            *body,
            "</body></html>",
        ]
    )
    with atomic_path(path) as temporary:
        temporary.write_text(text + "\n")
    return path
