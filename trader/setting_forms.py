"""The forms that a setting's text may have: each turns text into a value, or says what it expected instead."""

import re
from collections.abc import Callable
from datetime import UTC, datetime
from decimal import Decimal
from ipaddress import ip_address
from typing import TypeVar, final
from urllib.parse import SplitResult, urlsplit

T = TypeVar("T")
Form = Callable[[str], T]

DEFAULT_PORTS = {"http": 80, "https": 443}
HOST_NAME = re.compile(r"(?=.{1,253}\.?$)(?!-)[A-Za-z0-9-]{1,63}(?<!-)(?:\.(?!-)[A-Za-z0-9-]{1,63}(?<!-))*\.?")


@final
class Secret:
    """A text that shows itself only when asked by name."""

    __slots__ = ("_value",)

    def __init__(self, value: str) -> None:
        self._value = value

    def reveal(self) -> str:
        return self._value

    def __repr__(self) -> str:
        return "Secret(***)"

    __str__ = __repr__

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Secret) and self._value == other._value

    def __hash__(self) -> int:
        return hash((Secret, self._value))

    def __reduce__(self) -> str:
        raise TypeError("A secret is not written down.")


class Unfit(Exception):
    """The text does not have the form; the message completes "expected ..."."""


def whole_number(low: int, high: int) -> Form[int]:
    def parse(text: str) -> int:
        if re.fullmatch(r"[+-]?[0-9]{1,19}", text) and low <= int(text) <= high:
            return int(text)
        raise Unfit(f"a whole number from {low} to {high}")

    return parse


def decimal_number(expected: str, fits: Callable[[Decimal], bool]) -> Form[Decimal]:
    """A plain decimal number (no exponent, no NaN) that `fits`."""

    def parse(text: str) -> Decimal:
        if re.fullmatch(r"[+-]?[0-9]{1,20}(?:\.[0-9]{1,20})?", text) and fits(Decimal(text)):
            return Decimal(text)
        raise Unfit(expected)

    return parse


def percent_or_off(text: str) -> Decimal | None:
    """A percentage of something that can be lost, or none."""
    expected = "a number above 0 and at most 100 (percent), or off"
    return None if text == "off" else decimal_number(expected, lambda percent: 0 < percent <= 100)(text)


def speed(text: str) -> float:
    return float(decimal_number("a number from 0 to 1000000", lambda number: 0 <= number <= 1_000_000)(text))


def one_of(*choices: str) -> Form[str]:
    def parse(text: str) -> str:
        if text in choices:
            return text
        raise Unfit("one of " + ", ".join(choices))

    return parse


def matching(pattern: str, expected: str) -> Form[str]:
    def parse(text: str) -> str:
        if re.fullmatch(pattern, text):
            return text
        raise Unfit(expected)

    return parse


def moment(text: str) -> datetime:
    """An ISO 8601 time; without an offset it is UTC."""
    try:
        found = datetime.fromisoformat(text)
    except ValueError:
        raise Unfit("an ISO 8601 time such as 2025-01-31T12:00:00Z") from None
    return found.replace(tzinfo=UTC) if found.tzinfo is None else found.astimezone(UTC)


def secret(text: str) -> Secret:
    """A secret that can be sent in a header."""
    if re.fullmatch(r"[\x21-\x7e]{1,1024}", text):
        return Secret(text)
    raise Unfit("printable ASCII without spaces, at most 1024 characters")


def listen_host(text: str) -> str:
    try:
        return str(ip_address(text))
    except ValueError:
        pass
    if HOST_NAME.fullmatch(text) and not re.fullmatch(r"[0-9.]+", text):
        return text
    raise Unfit("an IP address or a host name")


def _split(text: str, expected: str) -> SplitResult:
    if re.search(r"[\s\\\x00-\x1f\x7f]", text):
        raise Unfit(expected)
    try:
        parts = urlsplit(text)
        port = parts.port
    except ValueError:
        raise Unfit(expected) from None
    if not parts.hostname or port == 0:
        raise Unfit(expected)
    return parts


def web_address(text: str) -> str:
    """An http or https address that others' paths are joined to: no query, no user, no slash at its end."""
    expected = "an address such as https://example.org or http://localhost:8080/v1 (no user, no query)"
    parts = _split(text, expected)
    if parts.scheme not in DEFAULT_PORTS or "@" in parts.netloc or parts.query or parts.fragment:
        raise Unfit(expected)
    return text.rstrip("/")


def web_origin(text: str) -> str:
    """One origin as a browser sends it."""
    expected = "exact origins such as https://app.example.org or http://localhost:3000 (no path, no *)"
    parts = _split(text, expected)
    if parts.scheme not in DEFAULT_PORTS or text.lower() != f"{parts.scheme}://{parts.netloc}".lower():
        raise Unfit(expected)
    bracketed = re.fullmatch(r"\[[0-9a-fA-F:.]+\](?::[0-9]+)?", parts.netloc)
    if not bracketed and not HOST_NAME.fullmatch(parts.netloc.partition(":")[0]):
        raise Unfit(expected)
    if parts.port == DEFAULT_PORTS[parts.scheme] or parts.netloc.endswith(":"):
        raise Unfit(f"origins without the default port of {parts.scheme}: a browser never sends it")
    return text.lower()


def web_origins(text: str) -> tuple[str, ...]:
    """Origins between commas; the word `none` for no origin at all."""
    if text == "none":
        return ()
    return tuple(dict.fromkeys(web_origin(origin.strip()) for origin in text.split(",")))


def database_address(text: str) -> str:
    """A PostgreSQL connection string of the form of a URL."""
    expected = (
        "postgresql://user:password@host:port/database, special characters of the password percent-encoded, "
        "the database named"
    )
    if re.search(r"\s", text):
        raise Unfit(expected)
    try:
        parts = urlsplit(text)
    except ValueError:
        raise Unfit(expected) from None
    # An @ or / behind the host is the rest of a password that was cut at its own / or #.
    named = re.fullmatch(r"/[^/@]+", parts.path) or re.search(r"(?:^|&)(?:dbname|database)=[^&]", parts.query)
    hosts = parts.netloc.rpartition("@")[2]
    if parts.scheme not in ("postgresql", "postgres") or not named or "@" in parts.path or parts.fragment:
        raise Unfit(expected)
    if parts.netloc.count("@") > 1 or not all(_is_host(host) for host in hosts.split(",")):
        raise Unfit(expected)
    return text


def _is_host(text: str) -> bool:
    """A host with or without a port; nothing at all is the default one."""
    found = re.fullmatch(r"(?:\[[0-9a-fA-F:.]+\]|[A-Za-z0-9._-]*)(?::([0-9]{1,5}))?", text)
    return found is not None and 0 < int(found.group(1) or 5432) < 65536


def market_source(text: str) -> str:
    if text in ("venue", "synthetic") or (text.startswith("replay:") and text.removeprefix("replay:").strip()):
        return text
    raise Unfit("venue, synthetic, or replay:<folder or file>")


def market_symbols(text: str) -> tuple[str, ...]:
    """Markets between commas, in any spelling that orders may use too."""
    symbols = [symbol.strip().upper() for symbol in text.split(",")]
    if not all(
        re.fullmatch(r"[A-Z0-9]{1,20}(?:[/_-][A-Z0-9]{1,10}(?::[A-Z0-9]{1,10})?)?", symbol) for symbol in symbols
    ):
        raise Unfit("market symbols between commas, such as BTC,ETH,SOL")
    return tuple(dict.fromkeys(symbols))


def currency(text: str) -> str:
    return matching(r"[A-Z0-9]{2,10}", "the short name of a currency, such as USDT")(text.upper())
