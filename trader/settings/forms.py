"""Forms of settings: what the text of a variable must look like and how it becomes a value."""

import re
from collections.abc import Callable
from datetime import datetime
from decimal import Decimal
from ipaddress import ip_address
from pathlib import Path
from typing import Any, Final, Generic, NamedTuple, TypeVar, final
from urllib.parse import SplitResult, parse_qs, urlsplit

from trader.core.clock import input_time

T = TypeVar("T")

DEFAULT_PORTS: Final = {"http": 80, "https": 443}
HOST_NAME: Final = re.compile(r"(?=.{1,253}\.?$)(?!-)[A-Za-z0-9-]{1,63}(?<!-)(?:\.(?!-)[A-Za-z0-9-]{1,63}(?<!-))*\.?")
DECIMAL: Final = r"[+-]?[0-9]{1,20}(?:\.[0-9]{1,20})?"  # no exponent, no NaN
BPS_DECIMALS_MAX: Final = 6


@final
class Secret:
    """A text that only `reveal` shows: not `str`, `repr` or a pickle."""

    __slots__ = ("_value",)

    def __init__(self, value: str) -> None:
        self._value = value

    def reveal(self) -> str:
        """Return the secret text."""
        return self._value

    def __repr__(self) -> str:
        return "Secret(***)"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Secret) and self.reveal() == other.reveal()

    def __hash__(self) -> int:
        return hash((Secret, self._value))

    def __reduce__(self) -> str:
        raise TypeError("A secret cannot be pickled or copied.")


class Form(NamedTuple, Generic[T]):
    """A form of text: `expected` describes it in messages. The text of a secret form is never shown."""

    expected: str
    pattern: str
    convert: Callable[[str], T]
    fits: Callable[[T], bool] = lambda _: True
    is_secret: bool = False

    def parse(self, text: str) -> T:
        """Return the value of the text.

        :raises ValueError: the text does not match the form
        """
        if re.fullmatch(self.pattern, text, re.DOTALL) is None:
            raise ValueError(self.expected)
        value = self.convert(text)
        if not self.fits(value):
            raise ValueError(self.expected)
        return value


class Variable(NamedTuple):
    """Environment variable of a setting. If an unset variable has no default (empty), its value is None."""

    name: str
    default: str
    form: Form[Any]
    meaning: str
    demo_default: str | None = None
    live_default: str | None = None
    shown_default: str | None = None

    @property
    def default_text(self) -> str:
        """The default as the documentation shows it."""
        return self.shown_default or self.default or "none"


class EffectiveText(NamedTuple):
    """The text of a setting and its source."""

    text: str
    source: str


def parse_setting(name: str, form: Form[T], text: str, problems: list[str]) -> T | None:
    """Parse the text of a variable; if it does not match the form, add a problem and return None."""
    try:
        return form.parse(text) if text else None
    except ValueError:
        shown = "" if form.is_secret or "@" in text else f", got {text[:60]!r}"  # a password may precede an @
        problems.append(f"{name}: expected {form.expected}{shown}")
        return None


def one_of(*choices: str) -> Form[str]:
    return Form("one of " + ", ".join(choices), "|".join(choices), str)


def whole_number(low: int, high: int) -> Form[int]:
    return Form(f"a whole number from {low} to {high}", "[+-]?[0-9]{1,19}", int, lambda number: low <= number <= high)


SEED: Final = Form("a whole number from 0 to 2^128 - 1", "[0-9]{1,39}", int, lambda number: number < 2**128)


def _listen_host(text: str) -> str:
    try:
        return str(ip_address(text))
    except ValueError:
        if HOST_NAME.fullmatch(text) and not re.fullmatch("[0-9.]+", text):
            return text
        raise


def _host_names(text: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys(_listen_host(name.strip().strip("[]")).lower() for name in text.split(",")))


def _split(text: str) -> SplitResult:
    """Split an HTTP or HTTPS address whose scheme, host and port are valid."""
    parts = urlsplit(text)
    is_broken = re.search(r"[\s\\\x00-\x1f\x7f]", text) or not parts.hostname or parts.port == 0
    if is_broken or parts.scheme not in DEFAULT_PORTS:
        raise ValueError("not the address of a web server")
    return parts


def _web_address(text: str) -> str:
    """Drop the trailing slash of an address to which paths are appended."""
    parts = _split(text)
    if "@" in parts.netloc or parts.query or parts.fragment:
        raise ValueError("not an address to append paths to")
    return text.rstrip("/")


def _web_origins(text: str) -> tuple[str, ...]:
    """Split origins and drop their trailing slashes; `none` means no origin at all."""
    origins = [] if text == "none" else [origin.strip().lower().removesuffix("/") for origin in text.split(",")]
    if not all(map(_is_web_origin, origins)):
        raise ValueError("not origins")
    return tuple(dict.fromkeys(origins))


def _is_web_origin(text: str) -> bool:
    """Return whether a browser could send this as an origin. Browsers omit the default port of the scheme."""
    parts = _split(text)
    is_bracketed = re.fullmatch(r"\[[0-9a-f:.]+\](?::[0-9]+)?", parts.netloc)
    if text != f"{parts.scheme}://{parts.netloc}" or parts.port == DEFAULT_PORTS[parts.scheme]:
        return False
    return bool(is_bracketed or HOST_NAME.fullmatch(parts.netloc.partition(":")[0])) and not text.endswith(":")


def _is_database_address(address: Secret) -> bool:
    parts = urlsplit(address.reveal())
    # An @ or / after the host is the rest of a password that was cut at an unescaped / or #.
    named = re.fullmatch("/[^/@]+", parts.path) or re.search("(?:^|&)(?:dbname|database)=[^&]", parts.query)
    if parts.scheme not in ("postgresql", "postgres") or not named or "@" in parts.path or parts.fragment:
        return False
    hosts = parts.netloc.rpartition("@")[2].split(",")
    return parts.netloc.count("@") <= 1 and all(map(_is_database_host, hosts))


def _is_database_host(text: str) -> bool:
    """Return whether this is a host with or without a port; empty is the default host."""
    match = re.fullmatch(r"(?:\[[0-9a-fA-F:.]+\]|[A-Za-z0-9._-]*)(?::([0-9]{1,5}))?", text)
    return match is not None and 0 < int(match.group(1) or 5432) < 65536


ANCHOR_SCHEMES: Final = ("file", "http", "https")


def _is_anchor_address(address: Secret) -> bool:
    """Return whether this address has a sink.

    The path and query of a web address may hold a secret; a file has an absolute path.
    """
    parts = urlsplit(address.reveal())
    if parts.scheme in DEFAULT_PORTS:
        return "@" not in _split(address.reveal()).netloc
    if parts.scheme == "file":
        return not parts.netloc and len(parts.path) > 1 and not parts.query and not parts.fragment
    return parts.scheme in ANCHOR_SCHEMES


NOTIFY_FORMATS: Final = ("json", "ntfy", "slack", "telegram")
NOTIFY_HOSTS: Final = {"ntfy.sh": "ntfy", "hooks.slack.com": "slack", "api.telegram.org": "telegram"}
"""Hosts whose format is known without a prefix."""


def _notify_addresses(text: str) -> tuple[Secret, ...]:
    """Split addresses; a comma within an address is written %2C."""
    addresses = [address.strip() for address in text.split(",")]
    for address in addresses:
        form, _, url = address.rpartition("+") if re.match("[a-z]+[+]http", address) else ("", "", address)
        parts = _split(url)
        if form and form not in NOTIFY_FORMATS:
            raise ValueError("not a known form")
        if (form or NOTIFY_HOSTS.get(parts.hostname or "")) == "telegram" and "chat_id" not in parse_qs(parts.query):
            raise ValueError("a bot needs the ID of its chat")
    return tuple(map(Secret, dict.fromkeys(addresses)))


def _symbols(text: str) -> tuple[str, ...]:
    """Split markets, in any spelling that orders also accept."""
    symbols = [symbol.strip() for symbol in text.upper().split(",")]
    if not all(
        re.fullmatch("[A-Z0-9]{1,20}(?:[/_-][A-Z0-9]{1,10}(?::[A-Z0-9]{1,10})?)?", symbol) for symbol in symbols
    ):
        raise ValueError("not symbols")
    return tuple(dict.fromkeys(symbols))


def _or_off(text: str) -> Decimal | None:
    return None if text == "off" else Decimal(text)


CAPITAL: Final = Form(
    "a number above 0 and at most 1000000000", DECIMAL, Decimal, lambda number: 0 < number <= 1_000_000_000
)
# With more decimals the fees would exceed the digits of `core.money`, and the books would not be exact.
BASIS_POINTS: Final = Form(
    f"a number from 0 to 1000 (hundredths of a percent) with at most {BPS_DECIMALS_MAX} decimals", DECIMAL, Decimal,
    lambda number: 0 <= number <= 1000 and number == round(number, BPS_DECIMALS_MAX),
)  # fmt: skip
FUNDING_INTERVAL: Final = Form(
    "a number of hours that divides 24", "[0-9]{1,2}", int, lambda hours: hours > 0 and 24 % hours == 0
)
PERCENT_OR_OFF: Final = Form(
    "a number above 0 and at most 100 (percent), or off", f"off|{DECIMAL}", _or_off,
    lambda percent: percent is None or 0 < percent <= 100,
)  # fmt: skip
USD_OR_OFF: Final = Form(
    "a number above 0 and at most 1000000 (USD), or off", f"off|{DECIMAL}", _or_off,
    lambda usd: usd is None or 0 < usd <= 1_000_000,
)  # fmt: skip
SPEED: Final = Form("a number from 0 to 1000000", DECIMAL, float, lambda number: 0 <= number <= 1_000_000)
MOMENT: Final = Form(
    "an ISO 8601 time from 1970 to 2200, such as 2025-01-31T12:00:00Z", ".+",
    lambda text: input_time(datetime.fromisoformat(text)),
)  # fmt: skip
SECRET: Final = Form(
    "printable ASCII without spaces, at most 1024 characters", r"[\x21-\x7e]{1,1024}", Secret, is_secret=True
)
LISTEN_HOST: Final = Form("an IP address or a host name", r"\S+", _listen_host)
WEB_ADDRESS: Final = Form(
    "an address such as https://example.org or http://localhost:8080/v1 (no user, no query)", ".+", _web_address
)
WEB_ORIGINS: Final = Form(
    "exact origins such as https://app.example.org or http://localhost:3000 (no path, no *, no default port)",
    ".+", _web_origins,
)  # fmt: skip
HOST_NAMES: Final = Form("host names or IP addresses separated by commas, without a port", ".+", _host_names)
DATABASE_ADDRESS: Final = Form(
    "postgresql://user:password@host:port/database with the special characters of the password percent-encoded "
    "and the database named", r"\S+", Secret, _is_database_address, is_secret=True,
)  # fmt: skip
VENUE_KEY: Final = SECRET._replace(
    expected="the private key of an API key, 80 hexadecimal digits, or of a wallet, 64",
    pattern="(?:0x)?(?:[0-9a-fA-F]{80}|[0-9a-fA-F]{64})",
)
VENUE_ACCOUNT: Final = Form(
    f"a whole number from 0 to {2**48 - 1}, or an address of 0x and 40 hexadecimal digits",
    "[0-9]{1,15}|0x[0-9a-fA-F]{40}",
    lambda text: text.lower() if text.startswith("0x") else str(int(text)),
    lambda text: text.startswith("0x") or int(text) < 2**48,
)  # fmt: skip
REHEARSAL: Final = Form("a file, or override:NAME", r"override:\s*\S.*|(?!override:)[^\x00]+", str)
ANCHOR_ADDRESS: Final = Form(
    "the address of a webhook such as https://example.org/anchors?key=1, or of a file such as file:///srv/anchors.jsonl",
    r"\S+", Secret, _is_anchor_address, is_secret=True,
)  # fmt: skip
NOTIFY_ADDRESSES: Final = Form(
    "addresses separated by commas, each as https://… or prefixed with its message format "
    "(json+, ntfy+, slack+ or telegram+https://…; Telegram's with ?chat_id=)",
    r"\S.*", _notify_addresses, is_secret=True,
)  # fmt: skip
WEB_SECRET: Final = Form(
    "an address such as https://hc-ping.com/<id>", r"\S+", Secret,
    lambda address: bool(_split(address.reveal()).netloc), is_secret=True,
)  # fmt: skip
MARKET_SOURCE: Final = Form(
    "venue, venue:<VENUE>, synthetic, or replay:<folder or file>", r"venue|synthetic|replay:\s*\S.*", str
)
FOLDER: Final = Form("a folder", r"[^\x00]+", lambda text: Path(text).expanduser())
MARKETS: Final = Form("market symbols separated by commas, such as BTC,ETH,SOL", ".+", _symbols)
CURRENCY: Final = Form("the short name of a currency, such as USDT", "[A-Za-z0-9]{2,10}", str.upper)
