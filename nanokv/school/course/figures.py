"""Plots for the course: colours for every kind of colour vision, and a text alternative for each.

matplotlib is imported when the first plot is made.
"""

from typing import Any

from nanokv.errors import CourseError
from nanokv.school.course import log
from nanokv.school.course.feedback import wrapped

# Okabe and Ito 2008: distinguishable with every kind of colour vision.
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
STYLE: dict[str, Any] = {
    "figure.dpi": 100,
    "savefig.dpi": 144,
    "figure.constrained_layout.use": True,
    "font.size": 10.5,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.alpha": 0.25,
    "axes.titlesize": 11,
    "axes.titlelocation": "left",
    "image.cmap": "cividis",
    "legend.frameon": False,
}


def subplots(
    rows: int = 1, columns: int = 1, width: float = 8.0, height: float = 3.2, **options: Any
) -> tuple[Any, Any]:
    """plt.subplots in the course's style → (figure, axes)."""
    import matplotlib.pyplot as plt

    style: Any = STYLE | {"axes.prop_cycle": plt.cycler(color=COLORS)}  # keys are Literals there
    plt.rcParams.update(style)
    return plt.subplots(rows, columns, figsize=(width, height), **options)


def show(picture: Any, alt: str = "") -> None:
    """Display a figure, and print its text alternative below it.

    `alt` says in a sentence or two what a reader should learn from the picture, with its numbers.
    A drawing of nanokv.school.course.drawings has its own text.

    Raises CourseError if the text alternative has fewer than 8 words.
    """
    alt = alt or getattr(picture, "alt", "")
    if len(alt.split()) < 8:
        raise CourseError(
            "the text alternative is too short to replace the picture",
            'show(fig, alt="what it shows")',
        )
    drawn = getattr(picture, "_repr_mimebundle_", None)
    data, metadata = drawn() if drawn else _rendered(picture, alt)
    log.note("show", alt=alt)
    display(data, metadata)
    print(wrapped(f"In words: {alt}"))


def _rendered(fig, alt: str) -> tuple[dict, dict]:
    """Render a plot as PNG and close it → (data, metadata) of a notebook output."""
    import base64
    import io

    import matplotlib.pyplot as plt

    picture = io.BytesIO()
    fig.savefig(picture, format="png")
    plt.close(fig)
    png = base64.b64encode(picture.getvalue()).decode()
    return {"image/png": png, "text/plain": f"<figure: {alt}>"}, {"image/png": {"alt": alt}}


def display(data: dict, metadata: dict) -> None:
    """Add an output to the running cell; outside a notebook, do nothing."""
    try:
        from IPython import get_ipython
        from IPython.display import publish_display_data
    except ModuleNotFoundError:
        return
    if get_ipython() is not None:
        publish_display_data(data, metadata)
