"""The page at /: one HTML file that holds no data, so it needs no API key.

Its style and script come from assets/; those for colours, figures and numbers come from the page of
nanokv.lab.trace. The content security policy lists both by hash, and allows connections to this
server only.
"""

import functools
from importlib.resources import files

from nanokv.lab.trace.page import digest, joined, put_into

ASSETS = files("nanokv.apps.serve.http") / "assets"
STYLES = ("live.css",)
SHARED_STYLES = ("base.css",)
SHARED_SCRIPTS = ("text.js", "figure.js")
SCRIPTS = ("wire.js", "pool.js", "cache.js", "chat.js", "start.js")


@functools.cache
def style() -> str:
    """The page's whole style sheet."""
    return joined(SHARED_STYLES) + "\n" + joined(STYLES, ASSETS)


@functools.cache
def script() -> str:
    """The page's whole script."""
    return joined(SHARED_SCRIPTS) + "\n" + joined(SCRIPTS, ASSETS)


@functools.cache
def html() -> str:
    """The page as one HTML file."""
    return put_into(
        (ASSETS / "live.html").read_text("utf-8"), {"style": style(), "script": script()}
    )


@functools.cache
def headers() -> dict[str, str]:
    """Headers that forbid other scripts, other servers and framing.

    Trusted types make the browser refuse strings as HTML, so no text of a model becomes HTML.
    """
    rules = (
        "default-src 'none'",
        f"script-src 'sha256-{digest(script())}'",
        f"style-src 'sha256-{digest(style())}'",
        "connect-src 'self'",
        "img-src data:",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",
        "trusted-types 'none'",
    )
    return {
        "content-security-policy": "; ".join(rules),
        "referrer-policy": "no-referrer",
        "x-content-type-options": "nosniff",
        "x-frame-options": "DENY",
        "cross-origin-resource-policy": "same-origin",
        "cache-control": "no-cache",
    }
