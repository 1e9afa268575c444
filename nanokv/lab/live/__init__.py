"""The bundled model in the browser: one HTML file that runs the model and shows its KV cache at
work.

page = build()      the text of the page; `nanokv live` writes it
"""

from nanokv.lab.live.page import build

__all__ = ["build"]
