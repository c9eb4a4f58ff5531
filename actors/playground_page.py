"""The playground's files, which travel with the package, as responses that let a browser ask this server alone."""

from functools import cache
from pathlib import Path

from fastapi.responses import Response

import mbd_core.serving

FOLDER = Path(mbd_core.serving.__file__).with_name("playground")
TYPES = {"index.html": "text/html", "playground.css": "text/css", "playground.js": "text/javascript"}
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cache-control": "no-cache",
}


@cache
def _content(name: str) -> bytes:
    return (FOLDER / name).read_bytes()


def playground_file(name: str) -> Response:
    """One of the files in `TYPES`."""
    return Response(_content(name), media_type=TYPES[name], headers=HEADERS)
