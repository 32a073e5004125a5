"""Static files of the pages: style sheets, modules, the font and vendored libraries, read and compressed once.

Their address contains a digest of all of them, so that browsers cache them forever and never mix two versions.
"""

import gzip
import hashlib
import mimetypes
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Final, NamedTuple

from aiohttp import hdrs, web

from trader.api.compression import accepts_gzip
from trader.api.requests import Handler
from trader.api.routes import Route

_COMPRESSION_LEVEL: Final = 9
_KEPT_FOR_EVER: Final = "public, max-age=31536000, immutable"
_TYPES: Final = {".js": "text/javascript; charset=utf-8", ".css": "text/css; charset=utf-8", ".woff2": "font/woff2"}
_COMPRESSED_ALREADY: Final = (".woff2",)

PAGE_HEADERS: Final = {
    hdrs.CACHE_CONTROL: "no-cache",
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; font-src 'self'; "
    "img-src 'self' data:; connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'; trusted-types 'none'",
    "Referrer-Policy": "no-referrer",
}
"""Headers of an HTML page: no inline code runs, and no external resources load."""


class Content(NamedTuple):
    """A body with its type and its compressed form, if that is worth sending."""

    body: bytes
    media_type: str
    compressed: bytes | None

    @classmethod
    def of(cls, body: bytes, media_type: str, *, compress: bool = True) -> "Content":
        return cls(body, media_type, gzip.compress(body, _COMPRESSION_LEVEL, mtime=0) if compress else None)

    @property
    def etag(self) -> str:
        return f'"{hashlib.sha256(self.body).hexdigest()[:20]}"'

    def respond(self, request: web.Request, headers: Mapping[str, str]) -> web.Response:
        """Respond with the form that the caller accepts, or with 304 if it already has this version."""
        shared = {hdrs.ETAG: self.etag, hdrs.VARY: hdrs.ACCEPT_ENCODING, **headers}
        if self.etag in request.headers.get(hdrs.IF_NONE_MATCH, ""):
            return web.Response(status=304, headers=shared)
        shared[hdrs.CONTENT_TYPE] = self.media_type
        if self.compressed is not None and accepts_gzip(request):
            return web.Response(body=self.compressed, headers={**shared, hdrs.CONTENT_ENCODING: "gzip"})
        return web.Response(body=self.body, headers=shared)


_STATIC: Final = Path(__file__).with_name("static")

FILES: Final[Mapping[str, bytes]] = {
    path.relative_to(_STATIC).as_posix(): path.read_bytes() for path in sorted(_STATIC.rglob("*")) if path.is_file()
}
"""The static files by their path below the folder `static`."""

_PARTS: Final = (b"%b:%d:%b" % (name.encode(), len(body), body) for name, body in FILES.items())
FOLDER: Final = f"/assets/{hashlib.sha256(b''.join(_PARTS)).hexdigest()[:12]}"
"""The address of the static files of this version."""


def text_of(name: str) -> str:
    """Return the text of a static file."""
    return FILES[name].decode()


def modules_of(name: str, imports: re.Pattern[str]) -> list[str]:
    """Return the name of a module and of all that it imports, by the pattern of an import."""
    names = [name]
    for each in names:
        names += [found for found in imports.findall(text_of(each)) if found not in names]
    return names


def routes() -> list[web.RouteDef]:
    """Return the routes of the static files."""
    definitions: list[web.RouteDef] = []
    for name, body in FILES.items():
        suffix = name[name.rindex(".") :]
        media_type = _TYPES.get(suffix) or mimetypes.types_map.get(suffix, "text/plain; charset=utf-8")
        content = Content.of(body, media_type, compress=suffix not in _COMPRESSED_ALREADY)
        definitions += Route(f"{FOLDER}/{name}", head=True).get(_answer(content))
    return definitions


def _answer(content: Content) -> Handler:
    async def answer(request: web.Request) -> web.Response:
        return content.respond(request, {hdrs.CACHE_CONTROL: _KEPT_FOR_EVER})

    return answer
