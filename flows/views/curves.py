"""Curves of the report as inline SVG: quiet lines whose colours are CSS variables, so they follow light and dark.

Contract: each function returns one `<svg>` element that holds no script, no style of its own, and no address of
anything outside; its label is escaped. Steps are on the x axis everywhere.
"""

import html
import io
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

# Drawn with these colours, which are then replaced by the page's own.
INK, FAINT, FIRST, SECOND, THIRD, QUIET = "#010203", "#010204", "#010205", "#010206", "#010207", "#010208"
VARIABLES = {INK: "--muted", FAINT: "--rule", FIRST: "--first", SECOND: "--second", THIRD: "--third", QUIET: "--quiet"}
SIZE_INCHES = (4.6, 2.2)
STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",
    "svg.hashsalt": "forebay",
    "font.size": 8.5,
    "text.color": INK,
    "axes.edgecolor": FAINT,
    "axes.labelcolor": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.spines.left": False,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.axisbelow": True,
    "grid.color": FAINT,
    "grid.linewidth": 0.7,
    "xtick.color": INK,
    "ytick.color": INK,
    "xtick.major.size": 0,
    "ytick.major.size": 0,
    "legend.frameon": False,
    "legend.fontsize": 8.5,
}


@dataclass(frozen=True, slots=True)
class Line:
    """One curve. With `errors` it is drawn as points with intervals. `smooth` adds a calm line over the raw one."""

    name: str
    x: Sequence[float]
    y: Sequence[float]
    colour: str = FIRST
    errors: Sequence[float] | None = None
    smooth: bool = False


def lines(label: str, curves: Sequence[Line], *, restarts: Sequence[int] = (), zero: bool = False) -> str:
    """Curves over steps; a dotted line where a later attempt took over.
    `zero` lets the y axis begin there unless a value is below."""
    with mpl.rc_context(STYLE):
        figure, axes = _axes()
        for curve in curves:
            _draw(axes, curve)
        for step in restarts:
            axes.axvline(step + 0.5, color=INK, linewidth=0.8, linestyle=(0, (1, 2)))
        if zero and all(value >= 0 for curve in curves for value in curve.y):
            axes.set_ylim(bottom=0)
        if len(curves) > 1:
            _legend(axes)
        return _svg(figure, label)


def stack(label: str, x: Sequence[float], layers: Mapping[str, Sequence[float]]) -> str:
    """Non-negative layers on top of each other, over steps."""
    with mpl.rc_context(STYLE):
        figure, axes = _axes()
        colours = (QUIET, FIRST, SECOND)
        axes.stackplot(
            x, *layers.values(), labels=list(layers), colors=colours, step="mid" if len(x) < 60 else None, linewidth=0
        )
        axes.set_ylim(bottom=0)
        _legend(axes)
        return _svg(figure, label)


def bars(label: str, heights: Mapping[int, float], *, x_label: str) -> str:
    """Shares by a whole number."""
    with mpl.rc_context(STYLE):
        figure, axes = _axes(x_label)
        drawn = axes.bar(list(heights), list(heights.values()), width=0.6, color=FIRST)
        axes.bar_label(
            drawn,
            labels=[f"{share:.0%}" if share >= 0.005 else "<1%" for share in heights.values()],
            padding=2,
            fontsize=8.5,
            color=INK,
        )
        axes.set_ylim(0, 1.15 * max(heights.values()))
        axes.set_xlim(min(heights) - 0.8, max(max(heights), min(heights) + 2) + 0.8)
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.0%}"))
        return _svg(figure, label)


def _axes(x_label: str = "step") -> tuple[Figure, Axes]:
    figure = Figure(figsize=SIZE_INCHES, layout="constrained")
    figure.patch.set_alpha(0)
    axes = figure.add_subplot()
    axes.patch.set_alpha(0)
    axes.set_xlabel(x_label)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=7))
    axes.yaxis.set_major_locator(MaxNLocator(nbins=5))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.4g}".replace("-", "−")))
    axes.margins(y=0.08)
    return figure, axes


def _draw(axes: Axes, curve: Line) -> None:
    if curve.errors is not None:
        axes.errorbar(
            curve.x,
            curve.y,
            yerr=curve.errors,
            fmt="o-",
            markersize=4,
            color=curve.colour,
            linewidth=0.8,
            elinewidth=1.2,
            label=curve.name,
        )
        return
    if len(curve.x) < 3:
        axes.plot(curve.x, curve.y, "o", markersize=4, color=curve.colour, label=curve.name)
        return
    if curve.smooth and len(curve.y) >= 20:
        axes.plot(curve.x, curve.y, color=curve.colour, linewidth=0.8, alpha=0.35)
        axes.plot(curve.x, _smoothed(curve.y), color=curve.colour, linewidth=1.7, label=curve.name)
        return
    axes.plot(curve.x, curve.y, color=curve.colour, linewidth=1.4, label=curve.name)


def _smoothed(values: Sequence[float]) -> list[float]:
    """The mean of each value and its neighbours: a centred window of a twentieth of the curve."""
    half = max(1, len(values) // 40)
    windows = [values[max(0, i - half) : i + half + 1] for i in range(len(values))]
    return [sum(window) / len(window) for window in windows]


def _legend(axes: Axes) -> None:
    axes.legend(
        loc="lower left",
        bbox_to_anchor=(-0.02, 1.0),
        ncols=4,
        borderpad=0,
        handlelength=1.2,
        columnspacing=1.4,
        borderaxespad=0.2,
    )


def _svg(figure: Figure, label: str) -> str:
    """The figure as an element of an HTML page: themed, labelled, and with ids that no other figure has."""
    target = io.StringIO()
    figure.savefig(target, format="svg", metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
    svg = target.getvalue()
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r' xmlns(:xlink)?="[^"]*"', "", svg).replace("xlink:href", "href")
    svg = re.sub(r'<style type="text/css">.*?</style>', "", svg, flags=re.DOTALL)
    svg = re.sub(r"font: ([\d.]+)px [^;\"]*", r"font-size: \1px", svg)
    svg = re.sub(r" font-family: [^;\"]*;", "", svg)
    key = re.sub(r"\W+", "-", label.lower()).strip("-")
    svg = re.sub(r'\bid="', f'id="{key}-', svg)
    svg = svg.replace("url(#", f"url(#{key}-").replace('href="#', f'href="#{key}-')
    for colour, variable in VARIABLES.items():
        svg = svg.replace(colour, f"var({variable})")
    svg = re.sub(
        r'<svg[^>]*?(viewBox="[^"]*")[^>]*>',
        lambda found: f'<svg {found[1]} role="img" aria-label="{html.escape(label)}">',
        svg,
        count=1,
    )
    return svg
