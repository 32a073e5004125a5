"""Reports as files: their data and the modules of the dashboard that show it, in one HTML file that fetches nothing."""

import re
from base64 import b64encode
from collections.abc import Mapping
from hashlib import sha256
from html import escape
from typing import Any, Final, Literal
from urllib.parse import quote

import msgspec

from trader.api.dashboard.assets import FILES, modules_of, text_of

ReportKind = Literal["season", "backtest", "sweep", "exam", "drift"]

_IMPORT: Final = re.compile(r"\b(?:from |import |import\()'\./([^']+\.js)'")
_LITERAL_IN_URL: Final = " !$&'()*+,-./:;=?@[]^_`{|}~"


def report_page(kind: ReportKind, title: str, data: Mapping[str, Any]) -> str:
    """Return the HTML file of a report: its data, shown by `Report` of `report_<kind>.js`."""
    text = msgspec.json.encode(data).decode().replace("<", "\\u003c")  # no end tag within its script
    style = "".join(map(text_of, ("base.css", "parts.css", "report.css")))
    font = f"data:font/woff2;base64,{b64encode(FILES['vendor/inter.woff2']).decode()}"
    style = style.replace("vendor/inter.woff2", font)
    sources = {name: text_of(name).replace("'./", "'") for name in modules_of(f"report_{kind}.js", _IMPORT)}
    imports = {name: f"data:text/javascript,{quote(source, _LITERAL_IN_URL)}" for name, source in sources.items()}
    # Authors of text in the data cannot know its digest in advance, so a script in their text never has the nonce.
    nonce = sha256(text.encode()).hexdigest()
    policy = f"default-src 'none'; script-src 'nonce-{nonce}'; style-src 'unsafe-inline'; font-src data:"
    library = f'<script nonce="{nonce}">{text_of("vendor/uplot.js")}</script>' if "charts.js" in sources else ""
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        f"<meta http-equiv=\"Content-Security-Policy\" content=\"{policy}; base-uri 'none'; form-action 'none'\">"
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{style}</style></head><body><main></main>"
        "<noscript>This report needs JavaScript. Its data is the JSON in this file.</noscript>"
        f'<script type="application/json" id="data">{text}</script>{library}'
        f'<script nonce="{nonce}" type="importmap">{msgspec.json.encode({"imports": imports}).decode()}</script>'
        f'<script nonce="{nonce}" type="module">'
        f"import {{ Report }} from 'report_{kind}.js'; import {{ show }} from 'report.js'; show(Report)"
        "</script></body></html>\n"
    )
