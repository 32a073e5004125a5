"""Checks of settings beyond the form of each: contradictions between them, and misspelled names."""

import difflib
from collections.abc import Iterable, Mapping, Sequence
from ipaddress import ip_address
from pathlib import Path
from typing import Any, Final

from trader.provider_settings import BASE_URL_NAMES, KEY_NAME, KEY_NAMES, OTHER_KEY_NAME

_OWN_PREFIXES: Final = ("SIM_", "VENUE_", "REPLAY_", "MARKET_", "TRADING_")
"""Names that begin so are taken for settings of this service, in the environment too."""

_POSTGRES_PREFIX: Final = "PG"
"""Names of the environment that are those of PostgreSQL's programs."""

_OWN_WORDS: Final = frozenset({"LOSS", "DRAWDOWN"})
"""Names with such a word are, too: a misspelled loss limit would limit nothing."""


PROVIDER_NEEDED: Final = (
    f"At least one AI provider is needed: set one of {', '.join(KEY_NAMES)}, or for a server of your own one of "
    f"{', '.join(BASE_URL_NAMES)}, or add a model whose [[providers]] has no key_variable (or start with --demo, or "
    "replay a recording: they need none)"
)


def lacks_provider(values: Mapping[str, Any], problems: Iterable[str] = (), *, demo: bool) -> bool:
    """Return whether the settings of a service that needs an AI provider name none; a model of its database may."""
    if any(problem.startswith((*KEY_NAMES, *BASE_URL_NAMES)) for problem in problems):
        return False
    is_replay = (values["market_source"] or "").startswith("replay:")
    return not (demo or is_replay or values["role"] == "reader" or values["providers"])


def find_contradictions(values: Mapping[str, Any], problems: Sequence[str], *, demo: bool) -> list[str]:
    """Return the mistakes of settings that are valid each by itself; `problems` are those of single settings."""
    mistakes = []
    is_reader = values["role"] == "reader"
    if is_reader and values["database_url"] is None and not any(each.startswith("DATABASE_URL:") for each in problems):
        mistakes.append("DATABASE_URL: ROLE=reader needs the address of a leader's database or of a replica of it")
    is_guarded = values["api_token"] is not None or "on" in (values["public"], values["unsafe_open"])
    if (
        not is_guarded
        and not is_loopback(values["host"])
        and not any(each.startswith("API_TOKEN:") for each in problems)
    ):
        mistakes.append(
            f"HOST: {values['host']} is beyond this machine, so whoever reaches the port could trade: set API_TOKEN, "
            "or UNSAFE_OPEN=on where a proxy guards the port (or PUBLIC=on, with which nobody can change anything)"
        )
    kind, _, place = (values["market_source"] or "").partition(":")
    if values["trading_mode"] == "live":
        mistakes += _live_contradictions(values, problems, demo=demo, is_reader=is_reader)
    if kind == "replay" and not Path(place).expanduser().exists():
        mistakes.append(f"MARKET_SOURCE: expected an existing folder or file of candles, got {place!r}")
    if kind == "replay" and values["record"] == Path(place).expanduser():
        mistakes.append("RECORD: expected another folder than the one that is replayed")
    start, end = values["replay_start"], values["replay_end"]
    if start and end and start >= end:
        mistakes.append("REPLAY_END: expected a time after REPLAY_START")
    return mistakes


def local_address(host: str, port: int) -> str:
    """Return the address of the service as this machine reaches it."""
    if host in ("127.0.0.1", "0.0.0.0", "::", "::1"):  # noqa: S104 - compared, not bound
        host = "localhost"
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def is_loopback(host: str | None) -> bool:
    """Return whether a listen address is reached from this machine alone; None is the default one."""
    try:
        return host in (None, "localhost") or ip_address(host or "").is_loopback
    except ValueError:
        return False


def _live_contradictions(
    values: Mapping[str, Any], problems: Sequence[str], *, demo: bool, is_reader: bool
) -> list[str]:
    if demo:
        return ["TRADING_MODE: expected simulated with --demo, got 'live'"]
    if is_reader:  # it trades nothing
        return []
    mistakes = [
        f"{name}: expected a value, which TRADING_MODE=live needs"
        for name in ("VENUE_ACCOUNT_INDEX", "VENUE_API_KEY")
        if values[name.lower()] is None and not any(problem.startswith(f"{name}:") for problem in problems)
    ]
    account = values["venue_account_index"]
    if account is not None and values["live_confirm"] != account:
        mistakes.append(
            "LIVE_CONFIRM: TRADING_MODE=live trades real money; to confirm it, expected the account that is traded: "
            f"LIVE_CONFIRM={account}"
        )
    if values["market_source"] not in ("venue", None):
        mistakes.append("MARKET_SOURCE: expected venue, which TRADING_MODE=live needs")
    return mistakes


def find_unknown(file: Iterable[str], environ: Iterable[str], variables: Iterable[str]) -> list[str]:
    """Report names that are no setting: all of the file, and those of the environment that may be meant for one.

    A name is taken for a setting when it nearly is one, begins like one, is the beginning of one, or speaks of losses.
    All others of the environment may belong to other programs.
    """
    known = (*variables, *KEY_NAMES, *BASE_URL_NAMES)
    names = dict.fromkeys([*environ, *file]) | dict.fromkeys(file, True)
    problems = []
    for name, is_in_file in names.items():
        if name in known or KEY_NAME.fullmatch(name) or OTHER_KEY_NAME.fullmatch(name):
            continue
        upper = name.upper()
        if upper.startswith(_POSTGRES_PREFIX) and not is_in_file:
            continue
        is_own = is_in_file or upper.startswith(_OWN_PREFIXES) or not _OWN_WORDS.isdisjoint(upper.split("_"))
        close = [each for each in known if "_" in upper and each.startswith(f"{upper}_")]
        close += difflib.get_close_matches(upper, known, n=1, cutoff=0.6 if is_own else 0.8)
        if close:
            problems.append(f"{name}: expected the name of a setting; did you mean {close[0]}?")
        elif is_own:
            problems.append(f"{name}: expected the name of a setting; --help lists them")
    return problems
