"""AI providers that ship with the service, and their settings: keys and addresses in variables named after each."""

import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final

import msgspec

from trader.settings import forms
from trader.settings.forms import Secret, parse_setting

PROVIDERS: Final[Mapping[str, Mapping[str, Any]]] = {
    "openrouter": {"base_url": "https://openrouter.ai/api/v1", "request": {"usage": {"include": True}}},
    "nim": {"base_url": "https://integrate.api.nvidia.com/v1"},
    "mistral": {"base_url": "https://api.mistral.ai/v1"},
    "openai": {"base_url": "https://api.openai.com/v1", "limit_field": "max_completion_tokens"},
}
"""The providers that ship with the service, with the fields of their `ProviderDefinition`."""

KEY_NAMES: Final = tuple(f"{provider.upper()}_API_KEY" for provider in PROVIDERS)
BASE_URL_NAMES: Final = tuple(f"{provider.upper()}_BASE_URL" for provider in PROVIDERS)
KEY_NAME: Final = re.compile(rf"({'|'.join(PROVIDERS).upper()})_API_KEY(?:_?([0-9]{{1,3}}))?")
"""A variable that holds a key of a shipped provider; a number may follow for further keys."""

OTHER_KEY_NAME: Final = re.compile(r"(?!VENUE_|TAAPI_)([A-Z][A-Z0-9_]*?)_API_KEY(?:_?([0-9]{1,3}))?")
"""A variable that may hold a key of a provider from the models file."""


class ProviderSettings(msgspec.Struct, frozen=True):
    """Settings of one AI provider; without `base_url`, its public address is used."""

    base_url: str | None
    keys: tuple[Secret, ...]


def name_of_keys(variable: str) -> str:
    """Return the name under which this variable's keys are stored."""
    return variable.removesuffix("_API_KEY").lower()


def read_providers(texts: Mapping[str, str], problems: list[str]) -> Mapping[str, ProviderSettings]:
    """Return the settings of each provider that has a key or an address, and add a problem for each mistake.

    Keys with other names belong to providers that models bring, or to other programs: anything that is not a valid key
    is ignored.
    """
    keys: dict[str, list[tuple[int, str, Secret]]] = {name: [] for name in PROVIDERS}
    for name, text in texts.items():
        own = KEY_NAME.fullmatch(name)
        if match := own or OTHER_KEY_NAME.fullmatch(name):
            key = parse_setting(name, forms.SECRET, text, problems if own else [])
            if key is not None:
                keys.setdefault(match.group(1).lower(), []).append((int(match.group(2) or 0), name, key))
    providers = {}
    for provider, entries in keys.items():
        # The path of an address may contain a key, so an invalid address is not shown.
        name, form = f"{provider.upper()}_BASE_URL", forms.WEB_ADDRESS._replace(is_secret=True)
        url = parse_setting(name, form, texts.get(name, ""), problems) if name in BASE_URL_NAMES else None
        ordered = dict.fromkeys(key for _, _, key in sorted(entries, key=lambda entry: entry[:2]))
        if ordered or url is not None:
            providers[provider] = ProviderSettings(url, tuple(ordered))
    return MappingProxyType(providers)
