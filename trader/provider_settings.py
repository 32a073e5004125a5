"""Settings of the AI providers: keys and addresses, in variables that are named after the provider."""

import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

import msgspec

from trader import setting_forms as forms
from trader.setting_forms import Secret, parse_setting

PROVIDERS: Final = ("openrouter", "nim", "mistral", "openai")
KEY_NAMES: Final = tuple(f"{provider.upper()}_API_KEY" for provider in PROVIDERS)
BASE_URL_NAMES: Final = tuple(f"{provider.upper()}_BASE_URL" for provider in PROVIDERS)
KEY_NAME: Final = re.compile(rf"({'|'.join(PROVIDERS).upper()})_API_KEY(?:_?([0-9]{{1,3}}))?")
"""A variable with a key of a provider; the number of a further key may follow."""


class ProviderSettings(msgspec.Struct, frozen=True):
    """Settings of one AI provider; without `base_url` its own public address is used."""

    base_url: str | None
    keys: tuple[Secret, ...]


def read_providers(texts: Mapping[str, str], problems: list[str]) -> Mapping[str, ProviderSettings]:
    """Return the settings of each provider that has a key or an address; add a problem for each mistake."""
    keys: dict[str, list[tuple[int, str, Secret]]] = {name: [] for name in PROVIDERS}
    for name, text in texts.items():
        if found := KEY_NAME.fullmatch(name):
            key = parse_setting(name, forms.SECRET, text, problems)
            if key is not None:
                keys[found.group(1).lower()].append((int(found.group(2) or 0), name, key))
    providers = {}
    for provider, name in zip(PROVIDERS, BASE_URL_NAMES, strict=True):
        # An address may carry a key in its path, so a wrong one is not shown.
        url = parse_setting(name, forms.WEB_ADDRESS._replace(is_secret=True), texts.get(name, ""), problems)
        ordered = dict.fromkeys(key for _, _, key in sorted(keys[provider], key=lambda entry: entry[:2]))
        if ordered or url is not None:
            providers[provider] = ProviderSettings(url, tuple(ordered))
    return MappingProxyType(providers)
