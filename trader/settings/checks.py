"""Checks that go beyond the form of a single setting: contradictions and misspelled names."""

import difflib
from collections.abc import Container, Iterable, Mapping, Sequence
from ipaddress import ip_address
from pathlib import Path
from typing import Any, Final
from urllib.parse import SplitResult, urlsplit

from trader.settings.forms import HOST_NAME, WEB_ADDRESS
from trader.settings.providers import BASE_URL_NAMES, KEY_NAME, KEY_NAMES, OTHER_KEY_NAME, PROVIDERS, name_of_keys

_OWN_PREFIXES: Final = ("SIM_", "VENUE_", "REPLAY_", "MARKET_", "TRADING_")
"""Environment variables with these prefixes may be meant for settings of this service."""

_POSTGRES_PREFIX: Final = "PG"
"""Environment variables with this prefix belong to PostgreSQL's programs."""

_LIMIT_WORDS: Final = frozenset({"LOSS", "DRAWDOWN", "FLATTEN"})
"""Words in the names of loss limits, which no other program uses. A misspelled limit would limit nothing."""

PROVIDER_NEEDED: Final = (
    f"At least one AI provider is needed: set one of {', '.join(KEY_NAMES)}; for your own server, set one of "
    f"{', '.join(BASE_URL_NAMES)}, or add a model whose [[providers]] has no key_variable (or start with --demo, or "
    "replay a recording: neither needs a provider)"
)


def lacks_provider(values: Mapping[str, Any], given: Iterable[str] = (), *, demo: bool) -> bool:
    """Return whether settings that need an AI provider name none; a model in the database may still name one.

    `given` names the settings whose value may be wrong: a provider with a wrong key or address is one.
    """
    if any(KEY_NAME.fullmatch(name) or name in BASE_URL_NAMES for name in given):
        return False
    is_replay = (values["market_source"] or "").startswith("replay:")
    return not (demo or is_replay or values["role"] == "reader" or values["providers"])


def address_problem(
    base_url: str, key_variable: str | None, key_host: str | None, configured: Mapping[str, str], *, private: bool
) -> str | None:
    """Return why a provider of the models file may not have this address; None if it may.

    A key of a shipped provider goes to that provider only, and any other key only to the host that `key_host` names.
    `configured` are the addresses that settings give to shipped providers, by name. `private`: the address is on a
    private network, where http is allowed.
    """
    try:
        parts = urlsplit(WEB_ADDRESS.parse(base_url))
    except ValueError:
        return f"expected {WEB_ADDRESS.expected}"
    if not _is_plain_host(parts):
        return "expected an IP address, or a host name in ASCII: letters of other alphabets may look the same"
    host = parts.hostname or ""
    if private and not is_private(host):
        return f"private = true is for an address of a private network or a name without a domain, not for {host}"
    if parts.scheme == "http" and not private and not is_loopback(host):
        return (
            "expected an https address; http, which others on the network can read, is allowed only on this machine, "
            "and with private = true on a private network"
        )
    return None if key_variable is None else _key_problem(parts, key_variable, key_host, configured)


def _key_problem(
    parts: SplitResult, key_variable: str, key_host: str | None, configured: Mapping[str, str]
) -> str | None:
    """Return why keys may not go to an address; None if they may."""
    name = name_of_keys(key_variable)
    if name not in PROVIDERS:
        needed = f'the keys in {key_variable} go only to the host in `key_host`: expected key_host = "{parts.netloc}"'
        return None if key_host == parts.netloc else needed
    own = urlsplit(configured.get(name) or PROVIDERS[name]["base_url"])
    if (parts.scheme, parts.netloc) == (own.scheme, own.netloc):
        return None
    return (
        f"the keys in {key_variable} go to {own.scheme}://{own.netloc} only: for another address, set "
        f"{name.upper()}_BASE_URL or use another variable"
    )


def _is_plain_host(parts: SplitResult) -> bool:
    """Return whether the host of an address is an IP address without a zone, or a name in ASCII."""
    host = parts.hostname or ""
    try:
        return ip_address(host) is not None and "%" not in host
    except ValueError:
        return parts.netloc.isascii() and HOST_NAME.fullmatch(host) is not None


def find_contradictions(values: Mapping[str, Any], given: Container[str], *, demo: bool) -> list[str]:
    """Return the contradictions between settings that are valid on their own.

    A wrong value is None; `given` names the settings that have a value, so that a wrong one does not count as missing.
    """
    mistakes = []
    is_reader = values["role"] == "reader"
    if is_reader and values["database_url"] is None and "DATABASE_URL" not in given:
        mistakes.append("DATABASE_URL: ROLE=reader needs the address of a leader's database or of a replica of it")
    is_guarded = values["api_token"] is not None or "on" in (values["public"], values["unsafe_open"])
    if not is_guarded and not is_loopback(values["host"]) and "API_TOKEN" not in given:
        mistakes.append(
            f"HOST: {values['host']} is reachable from other machines, so anyone who reaches the port could trade: "
            "set API_TOKEN, or UNSAFE_OPEN=on if a proxy guards the port (or PUBLIC=on, with which no one can change "
            "anything)"
        )
    kind, _, place = (values["market_source"] or "").partition(":")
    if values["trading_mode"] == "live":
        mistakes += _live_contradictions(values, given, demo=demo, is_reader=is_reader)
    if kind == "replay" and not Path(place).expanduser().exists():
        mistakes.append(f"MARKET_SOURCE: expected an existing folder or file of candles, got {place!r}")
    if kind == "replay" and values["record"] == Path(place).expanduser():
        mistakes.append("RECORD: expected a folder other than the one being replayed")
    start, end = values["replay_start"], values["replay_end"]
    if start and end and start >= end:
        mistakes.append("REPLAY_END: expected a time after REPLAY_START")
    return mistakes


def local_address(host: str, port: int) -> str:
    """Return the address at which this machine reaches the service."""
    if host in ("127.0.0.1", "0.0.0.0", "::", "::1"):  # noqa: S104 - compared, not bound
        host = "localhost"
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def is_loopback(host: str | None) -> bool:
    """Return whether only this machine can reach a listen address; None is the default address."""
    try:
        return host in (None, "localhost") or ip_address(host or "").is_loopback
    except ValueError:
        return False


def is_private(host: str) -> bool:
    """Return whether a host is this machine, or by its address or name one of a private network."""
    try:
        address = ip_address(host)
    except ValueError:
        return "." not in host or host.endswith((".internal", ".lan", ".local", ".home.arpa"))
    return address.is_loopback or not (address.is_global or address.is_link_local or address.is_unspecified)


def _live_contradictions(values: Mapping[str, Any], given: Container[str], *, demo: bool, is_reader: bool) -> list[str]:
    if demo:
        return ["TRADING_MODE: expected simulated with --demo, got 'live'"]
    if is_reader:  # it trades nothing
        return []
    mistakes = [
        f"{name}: expected a value, which TRADING_MODE=live needs"
        for name in ("VENUE_ACCOUNT_INDEX", "VENUE_API_KEY")
        if values[name.lower()] is None and name not in given
    ]
    account = values["venue_account_index"]
    if account is not None and values["live_confirm"] != account:
        mistakes.append(
            "LIVE_CONFIRM: TRADING_MODE=live trades real money; to confirm it, expected the account to trade: "
            f"LIVE_CONFIRM={account}"
        )
    if values["market_source"] not in ("venue", None):
        mistakes.append("MARKET_SOURCE: expected venue, which TRADING_MODE=live needs")
    return mistakes


_ALIKE: Final = 0.6
"""How similar a name must be to a setting's name to count as a misspelling of it, from 0 to 1."""


_WORDS_OF_FORM: Final = frozenset({"API", "BASE", "KEY", "URL"})
"""Words for the kind of a setting's value, which do not name its subject."""


def find_unknown(file: Iterable[str], environ: Iterable[str], variables: Iterable[str]) -> tuple[list[str], list[str]]:
    """Return the names that are not settings: those that stop the start, and those to be warned of.

    All of the file are reported, and of the environment those similar to a setting.

    The environment also holds other programs' variables, so a similar name there is only a warning, except for a loss
    limit, whose misspelling is a mistake everywhere.
    """
    known = (*variables, *KEY_NAMES, *BASE_URL_NAMES)
    names = dict.fromkeys(environ, False) | dict.fromkeys(file, True)
    mistakes: list[str] = []
    warnings: list[str] = []
    for name, is_in_file in names.items():
        upper = name.upper()
        is_foreign = upper.startswith(_POSTGRES_PREFIX) and not is_in_file
        if name in known or KEY_NAME.fullmatch(name) or OTHER_KEY_NAME.fullmatch(name) or is_foreign:
            continue
        is_own = is_in_file or upper.startswith(_OWN_PREFIXES) or _is_loss_limit(upper)
        close = [each for each in known if "_" in upper and each.startswith(f"{upper}_")]
        alike = difflib.get_close_matches(upper, known, n=10, cutoff=_ALIKE if is_own else 0.8)
        close += [each for each in alike if _may_mean(upper, each)]
        if is_in_file or any(map(_is_loss_limit, (upper, *close[:1]))):
            mistakes.append(f"{name}: expected the name of a setting; {_hint(close)}")
        elif is_own or close:
            warnings.append(f"{name} in the environment is not a setting and has no effect; {_hint(close)}")
    return mistakes, warnings


def _may_mean(name: str, known: str) -> bool:
    """Return whether two names share their subject, and not only generic words such as `BASE_URL`."""
    own, other = (set(each.split("_")) - _WORDS_OF_FORM for each in (name, known))
    is_alike = difflib.SequenceMatcher(None, "_".join(sorted(own)), "_".join(sorted(other))).ratio() >= _ALIKE
    return not own or not own.isdisjoint(other) or is_alike


def _hint(close: Sequence[str]) -> str:
    return f"did you mean {close[0]}?" if close else "`trader check --settings` lists them"


def _is_loss_limit(name: str) -> bool:
    return not _LIMIT_WORDS.isdisjoint(name.split("_"))
