"""How the studies' pictures look: one style that survives a black-and-white printer.

Series differ by line style and marker, bars by hatch; colour only repeats what these say. The same
data gives the same bytes, so that a picture's diff means a change of its data.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")  # no display, whatever the machine offers

from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

# Okabe and Ito's colours in falling darkness: also apart in grey and for the colour-blind.
_COLOURS = ("#000000", "#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
_DASHES: tuple[Any, ...] = ("-", "--", "-.", ":", (0, (5, 1)), (0, (3, 1, 1, 1, 1, 1)), (0, (1, 3)))
_MARKERS = ("o", "s", "^", "D", "v", "X", "P")
_HATCHES = ("", "///", "...", "xxx", "\\\\\\", "++", "oo")
_STYLE: dict[str, Any] = {
    "figure.figsize": (6.4, 4.0),
    "figure.dpi": 120,
    "figure.constrained_layout.use": True,
    "font.family": "DejaVu Sans",  # comes with matplotlib, so every machine has it
    "font.size": 9,
    "axes.titlesize": 10,
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "grid.color": "#dddddd",
    "grid.linewidth": 0.6,
    "lines.linewidth": 1.4,
    "lines.markersize": 4.5,
    "legend.frameon": False,
    "hatch.linewidth": 0.6,
    "svg.hashsalt": "pageserve",
    "svg.fonttype": "none",  # text stays text: smaller, searchable
}


@contextmanager
def figure(path: str | Path, *, title: str, xlabel: str = "", ylabel: str = "") -> Iterator[Axes]:
    """Yield axes to draw on and save them as ``path`` + ``.png`` and ``.svg``.

    Drawn with series that carry a label, the axes get a legend. Nothing is saved when the body
    raises.
    """
    with figures(path, [title], xlabel=xlabel, ylabel=ylabel) as (axes,):
        yield axes


@contextmanager
def figures(
    path: str | Path, titles: Sequence[str], *, xlabel: str = "", ylabel: str = ""
) -> Iterator[list[Axes]]:
    """Yield one axes per title, side by side, and save them as :func:`figure` does."""
    with plt.rc_context(_STYLE):
        width, height = _STYLE["figure.figsize"]
        scale = 1 if len(titles) == 1 else 0.7 * len(titles)
        fig, grid = plt.subplots(1, len(titles), squeeze=False, figsize=(width * scale, height))
        try:
            panels = list(grid[0])
            for axes, title in zip(panels, titles, strict=True):
                axes.set(title=title, xlabel=xlabel, ylabel=ylabel)
            yield panels
            for axes in panels:
                if axes.get_legend() is None and axes.get_legend_handles_labels()[1]:
                    axes.legend()
            save(fig, path)
        finally:
            plt.close(fig)


def save(fig: Figure, path: str | Path) -> list[Path]:
    """Write ``path``.png and ``path``.svg without dates or versions; returns both paths."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    png, svg = (path.parent / f"{path.name}{suffix}" for suffix in (".png", ".svg"))
    fig.savefig(png, metadata={"Software": None})
    fig.savefig(svg, metadata={"Date": None, "Creator": None})
    return [png, svg]


def line_style(index: int) -> dict[str, Any]:
    """Return the keyword arguments for ``plot`` that set the ``index``-th series apart."""
    return {
        "color": _COLOURS[index % len(_COLOURS)],
        "linestyle": _DASHES[index % len(_DASHES)],
        "marker": _MARKERS[index % len(_MARKERS)],
    }


def lines(
    axes: Axes, x: Sequence[float], series: Mapping[str, Sequence[float]], **options: Any
) -> None:
    """Draw each named series over ``x``; ``options`` go to ``plot`` (``markevery=...``)."""
    for index, (label, values) in enumerate(series.items()):
        axes.plot(x, values, label=label, **{**line_style(index), **options})


def bars(
    axes: Axes,
    groups: Sequence[str],
    series: Mapping[str, Sequence[float]],
    number: str | None = None,
) -> None:
    """Draw the series' bars side by side in each group.

    ``number`` is the format of the figure written on each bar, such as ``"{:.1f}"``.
    """
    width = 0.8 / len(series)
    for index, (label, values) in enumerate(series.items()):
        offset = (index - (len(series) - 1) / 2) * width
        shade = 0.95 - 0.45 * index / max(len(series) - 1, 1)  # black hatches show on all
        container = axes.bar(
            [i + offset for i in range(len(groups))],
            values,
            width,
            label=label,
            color=str(shade),
            edgecolor="black",
            linewidth=0.8,
            hatch=_HATCHES[index % len(_HATCHES)],
        )
        if number is not None:
            axes.bar_label(container, [number.format(v) for v in values], padding=2, fontsize=7)
    axes.set_xticks(range(len(groups)), groups)
    axes.grid(axis="x", visible=False)
