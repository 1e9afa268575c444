"""Draw a run of `bench --quality --caches`: which cache for how many bytes. Needs matplotlib."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from nanokv.cache.options import kind_text
from nanokv.lab.bench.plot import figure_class

if TYPE_CHECKING:
    from matplotlib.axes import Axes

TICKS = (5, 10, 20, 30, 50, 100)  # %
SIZES = ("budget", "window", "bits", "k_bits", "v_bits")  # options along a line


def plot_quality(
    rows: Sequence[dict], caches: Mapping[str, tuple[str, dict]], title: str, path: str
) -> None:
    """Save a PNG or SVG. Left: perplexity over the share of an exact cache's bytes. Right, with
    talks: facts known at the second question, over theirs. One line per cache but for its sizes.
    """
    recall = any("second" in row for row in rows)
    figure = figure_class()(figsize=(11 if recall else 6, 4.5), layout="constrained")
    axes = figure.subplots(1, 2 if recall else 1, squeeze=False)[0]
    lines: dict[str, list[dict]] = {}
    for row in rows:
        lines.setdefault(line_of(*caches[row["cache"]]), []).append(row)
    draw(axes[0], lines, "share", "perplexity")
    axes[0].set(xlabel="bytes of the cache, % of exact", ylabel="perplexity (lower is better)")
    if recall:
        draw(axes[1], lines, "recall_share", "second")
        axes[1].set(
            xlabel="bytes of the cache, % of exact", ylabel="facts known at the second question"
        )
        axes[1].set_ylim(bottom=0)
    axes[-1].legend(fontsize=7)
    figure.suptitle(title, fontsize=10)
    figure.savefig(path, dpi=150)


def line_of(name: str, options: dict) -> str:
    """The cache without its sizes."""
    return kind_text(name, {key: x for key, x in options.items() if key not in SIZES})


def draw(axes: "Axes", lines: Mapping[str, list[dict]], x: str, y: str) -> None:
    """A line per cache; one point is a dot, the exact cache a black one."""
    for number, (label, group) in enumerate(lines.items()):
        group = sorted(group, key=lambda row: row[x])
        colour = "black" if label == "dict" else f"C{number % 10}"
        axes.plot(
            [100 * row[x] for row in group],
            [row[y] for row in group],
            marker="os^v"[number // 10 % 4],
            color=colour,
            label=label,
        )
    axes.set_xscale("log")
    axes.set_xticks(TICKS, map(str, TICKS))
    axes.minorticks_off()
