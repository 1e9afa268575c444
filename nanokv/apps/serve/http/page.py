"""The page at /: one HTML file without any data in it, so it can be read before a key is given.

Its style and its script come from assets/ and, for colours, figures and numbers, from the page of nanokv.lab.trace. A
content security policy names both by their hashes and lets the page talk to this server only.
"""

import functools
from importlib.resources import files

from nanokv.lab.trace.page import digest, joined, put_into

ASSETS = files("nanokv.apps.serve.http") / "assets"
STYLES, SHARED_STYLES = ("live.css",), ("base.css",)
SHARED_SCRIPTS = ("text.js", "figure.js")
SCRIPTS = ("wire.js", "pool.js", "cache.js", "chat.js", "start.js")


@functools.cache
def style() -> str:
    """All of it."""
    return joined(SHARED_STYLES) + "\n" + joined(STYLES, ASSETS)


@functools.cache
def script() -> str:
    """All of it."""
    return joined(SHARED_SCRIPTS) + "\n" + joined(SCRIPTS, ASSETS)


@functools.cache
def html() -> str:
    """The page."""
    return put_into(
        (ASSETS / "live.html").read_text("utf-8"), {"style": style(), "script": script()}
    )


@functools.cache
def headers() -> dict[str, str]:
    """No other script and no other server, no page around this one; and no text of a model becomes HTML, because the
    browser refuses every string where HTML is written (trusted types)."""
    policy = (
        f"default-src 'none'; script-src 'sha256-{digest(script())}'; style-src 'sha256-{digest(style())}'; "
        "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
        "require-trusted-types-for 'script'; trusted-types 'none'"
    )
    return {
        "content-security-policy": policy,
        "referrer-policy": "no-referrer",
        "x-content-type-options": "nosniff",
        "x-frame-options": "DENY",
        "cross-origin-resource-policy": "same-origin",
        "cache-control": "no-cache",
    }
