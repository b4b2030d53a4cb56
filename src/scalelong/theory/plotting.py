"""One style for all figures of this package; matplotlib is imported only when one is drawn."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

# Okabe and Ito's colours, which stay apart for the colour-blind.
BLUE, ORANGE, GREEN, PURPLE, GREY = "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#666666"
COLOURS, MARKERS = (ORANGE, BLUE, GREEN), ("o", "s", "^")

STYLE: dict[Any, Any] = {"font.size": 10, "axes.spines.top": False, "axes.spines.right": False, "legend.frameon": False}


@contextmanager
def figure(path: Path, panels: int, *, width: float = 4.8, height: float = 3.7) -> Iterator[list[Any]]:
    """The axes of a figure that is written to `path` when the block ends; no window and no global state is touched."""
    try:
        import matplotlib
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        raise ImportError('figures need matplotlib: pip install "scalelong[report]"') from error
    with matplotlib.rc_context(STYLE):
        drawn = Figure(figsize=(width * panels, height), layout="constrained")
        axes = drawn.subplots(1, panels, squeeze=False)[0]
        yield list(axes)
        path.parent.mkdir(parents=True, exist_ok=True)
        drawn.savefig(path, dpi=150)
