"""Draw a bench run: speed over context length, beside the limit set by memory bandwidth. Needs
matplotlib."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from nanokv.errors import NanoKVError
from nanokv.support import installing

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from nanokv.lab.bench.rotation import Row


def figure_class() -> type:
    """matplotlib's Figure. NanoKVError if matplotlib is not installed; the command calls this
    before it measures anything."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise NanoKVError("--plot needs matplotlib", installing.hint(["matplotlib"])) from None
    return Figure


def plot(rows: "Sequence[Row]", title: str, path: str) -> None:
    """Save a PNG or SVG, by the suffix of `path`. Left: tokens per second and each runner's limit.
    Right: the share of the limit that was reached. A single context is drawn as bars."""
    figure = figure_class()(figsize=(11, 4.5), layout="constrained")
    speed, share = figure.subplots(1, 2)
    lines: dict[str, list[Row]] = {}
    for row in rows:
        lines.setdefault(row.runner.label, []).append(row)
    bars = len({row.context for row in rows}) == 1
    for i, (label, group) in enumerate(lines.items()):
        group.sort(key=lambda row: row.context)
        contexts = [row.context for row in group]
        tokens = [row.runner.batch / row.decode_s for row in group]
        limits = [row.runner.batch * row.bandwidth / row.bytes for row in group]
        shares = [100 * row.share for row in group]
        if bars:
            speed.barh(i, tokens[0], color=f"C{i}")
            speed.plot([limits[0]] * 2, [i - 0.4, i + 0.4], color="black", lw=1)
            share.barh(i, shares[0], color=f"C{i}")
        else:
            speed.plot(contexts, tokens, marker="o", color=f"C{i}", label=label)
            speed.plot(contexts, limits, ls=":", lw=1, color=f"C{i}")
            share.plot(contexts, shares, marker="o", color=f"C{i}", label=label)
    decorate(speed, share, list(lines), bars)
    figure.suptitle(title, fontsize=10)
    figure.savefig(path, dpi=150)


def decorate(speed: "Axes", share: "Axes", labels: list[str], bars: bool) -> None:
    """Label the axes and start them at 0."""
    if bars:
        speed.set_yticks(range(len(labels)), labels)
        share.set_yticks([])
        speed.set_xlabel("decode, tokens per second (line: the limit that memory sets)")
        share.set_xlabel("% of the limit")
        return
    speed.set(
        xlabel="context, tokens",
        ylabel="decode, tokens per second (dotted: the limit that memory sets)",
    )
    share.set(xlabel="context, tokens", ylabel="% of the limit")
    speed.set_ylim(bottom=0)
    share.set_ylim(0, 105)
    speed.legend(fontsize=8)
