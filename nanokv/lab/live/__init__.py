"""The bundled model in the reader's browser: one HTML file that answers, and shows what its KV cache does.

page = build()      the text of the page; `nanokv live` writes it
"""

from nanokv.lab.live.page import build

__all__ = ["build"]
