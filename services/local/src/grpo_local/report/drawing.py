"""What the plots use of matplotlib. Importing this imports it."""

from __future__ import annotations

import logging

# Where there is no cache of fonts yet, importing matplotlib builds one, and says so on stderr after
# 5 s, as if something were wrong with the first run on a new machine.
_of_fonts = logging.getLogger("matplotlib.font_manager")
_of_fonts.setLevel(logging.ERROR)

from matplotlib.axes import Axes  # noqa: E402
from matplotlib.backends.backend_agg import FigureCanvasAgg  # noqa: E402
from matplotlib.figure import Figure  # noqa: E402
from matplotlib.ticker import MaxNLocator  # noqa: E402

_of_fonts.setLevel(logging.NOTSET)

__all__ = ["Axes", "Figure", "FigureCanvasAgg", "MaxNLocator"]
