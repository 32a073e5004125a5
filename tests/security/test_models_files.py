"""A models file reads nothing but the texts of its folder, and neither stores a secret nor sends one elsewhere."""

import os
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from msgspec.structs import replace
from support import chat_server

from trader.agents.domain.models import ModelConfiguration, ProviderDefinition
from trader.agents.models_file import ModelEntry, read_models
from trader.agents.providers.provider import PROVIDERS
from trader.agents.providers.providers import make_providers
from trader.core.errors import SettingsError
from trader.settings.settings import Settings

KEY, PASSWORD = "sk-4c1d9b7e55aa", "s3cret-p@ss"
ENV = f"OPENAI_API_KEY={KEY}\nDATABASE_URL=postgresql://trader:s3cret-p%40ss@db:5432/trader\nAPI_TOKEN=none\n"
MODEL = '[[models]]\nid = "a"\nvariant = "Apex"\nprovider = "openai"\nrouter_model = "gpt"\n'


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder of models; the settings file is next to it, where no models file can read it."""
    (tmp_path / ".env").write_text(ENV)
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "own.md").write_text("Trade well; none of it is a secret.")
    return tmp_path / "models"


def read(folder: Path, text: str, *send_keys_to: str) -> list[ModelEntry]:
    (folder / "models.toml").write_text(text, encoding="utf-8")
    return read_models(folder / "models.toml", folder.parent / ".env", send_keys_to)


def refusal(folder: Path, text: str, *send_keys_to: str) -> str:
    with pytest.raises(SettingsError) as refused:
        read(folder, text, *send_keys_to)
    message = str(refused.value)
    assert KEY not in message
    assert PASSWORD not in message
    return message


def test_a_prompt_comes_from_the_folder_of_the_file(folder: Path) -> None:
    (folder / "prompts").mkdir()
    (folder / "prompts" / "deep.md").write_text("Hold.")
    (entry,) = read(folder, MODEL + 'prompt = "prompts/../own.md"\n')
    assert entry.prompt == "Trade well; none of it is a secret."
    (entry,) = read(folder, MODEL + 'prompt = "prompts/deep.md"\n')
    assert entry.prompt == "Hold."


@pytest.mark.parametrize("name", ["../.env", "/etc/hostname", "link.md", "folder/.env", "/dev/zero"])
def test_a_prompt_outside_the_folder_is_refused(folder: Path, name: str) -> None:
    (folder / "link.md").symlink_to(folder.parent / ".env")
    (folder / "folder").symlink_to(folder.parent)
    assert "is outside of it" in refusal(folder, MODEL + f'prompt = "{name}"\n')


def test_an_endless_prompt_is_not_read_to_its_end(folder: Path) -> None:
    (folder / "huge.md").write_text("a" * 40_001)
    assert "'huge.md' has more" in refusal(folder, MODEL + 'prompt = "huge.md"\n')


@pytest.mark.parametrize("held", [KEY, PASSWORD, "postgresql://trader:s3cret-p%40ss@db:5432/trader"])
def test_a_text_with_a_secret_is_refused_naming_its_setting(folder: Path, held: str) -> None:
    (folder / "own.md").write_text(f"My key is {held}, keep it.")
    setting = "OPENAI_API_KEY" if held == KEY else "DATABASE_URL"
    assert f"line 6: model 1.prompt: holds the value of {setting}" in refusal(folder, MODEL + 'prompt = "own.md"\n')
    headers = f'[[providers]]\nname = "lab"\nbase_url = "http://a/v1"\nheaders = {{X-Key = "{held}"}}\n'
    assert f"provider 1.headers.X-Key: holds the value of {setting}" in refusal(folder, headers + MODEL)


@pytest.mark.parametrize("model_id", [".", "..", "a\\n", "a b", "a/b", "\\u202ea", ""])
def test_an_id_cannot_be_mistaken_for_a_folder_in_a_url(folder: Path, model_id: str) -> None:
    assert "model 1.id: expected 1 to 64 letters" in refusal(folder, MODEL.replace('"a"', f'"{model_id}"', 1))


@pytest.mark.parametrize("character", ["\\u001b", "\\u009b", "\\u202e", "\\u2066", "\\u200f", "\\n", "\\u2028"])
def test_names_cannot_control_a_terminal(folder: Path, character: str) -> None:
    for field in ("name", "logo", "router_model"):
        lines = [line for line in MODEL.splitlines() if not line.startswith(field)]
        message = refusal(folder, "\n".join([*lines, f'{field} = "gpt{character}4"\n']))
        assert f"model 1.{field}: expected a line of 1 to 200 characters, without control" in message


def test_an_ordinary_file_with_names_in_every_language_is_read(folder: Path) -> None:
    (entry,) = read(folder, MODEL + 'name = "深度求索 Ж é — 4"\n')
    assert (entry.id, entry.name) == ("a", "深度求索 Ж é — 4")


@pytest.mark.parametrize(
    "name", [".md", ".prompt.md", "lab.env", "own", "own.toml", "own.py", "fifo.md", "null.md", "."]
)
def test_a_prompt_is_a_plain_text_file(folder: Path, name: str) -> None:
    for each in {".md", ".prompt.md", "lab.env", "own", "own.toml", "own.py"} & {name}:
        (folder / each).write_text("Hold.")
    if name == "fifo.md":
        os.mkfifo(folder / name)
    if name == "null.md":
        os.mknod(folder / name, 0o666 | 0o020000, os.makedev(1, 5))
    assert "model 1.prompt: expected the name of a UTF-8 file (.md or .txt)" in refusal(
        folder, MODEL + f'prompt = "{name}"\n'
    )


def test_a_models_file_that_never_ends_is_refused(folder: Path) -> None:
    os.mkfifo(folder / "fifo.toml")
    with pytest.raises(SettingsError, match="Not a regular file"):
        read_models(folder / "fifo.toml", None)


@pytest.mark.parametrize(
    ("lines", "problem"),
    [
        (f"request = {{a = {'[' * 900}{']' * 900}}}", "more than 50 tables or lists within each other"),
        (f"request = {{a = {'[' * 60}{']' * 60}}}", "more than 50 tables or lists within each other"),
        (f"request{'.a' * 3000} = 1", "more than 50 tables or lists within each other"),
        (f"request = '{{\"a\":{'[' * 9000}{']' * 9000}}}'", "line 6: model 1.request: expected a table of fields"),
        (f"request = {{a = {'9' * 400}}}", "line 6: model 1.request.a: expected text, finite numbers"),
        (
            'provider = "strategy"\nrouter_model = "a\\u0000.py:Own"',
            "model 1.router_model: expected a file in the folder",
        ),
        ('provider = "strategy"\nrouter_model = "loop.py:Own"', "model 1.router_model: expected a file in the folder"),
    ],
    ids=["nested", "deep", "dotted", "JSON", "long", "NUL", "loop"],
)
def test_a_file_that_breaks_its_readers_is_refused(folder: Path, lines: str, problem: str) -> None:
    (folder / "loop.py").symlink_to(folder / "loop.py")
    given = {line.partition(" ")[0] for line in lines.splitlines()}
    model = "".join(line for line in MODEL.splitlines(keepends=True) if line.partition(" ")[0] not in given)
    assert problem in refusal(folder, model + lines + "\n")


def test_a_model_is_a_table(folder: Path) -> None:
    assert "model 1: expected an object, got 1" in refusal(folder, 'models = [1, "a", []]\n')


HOSTS = (
    "https://evil.example/v1", "http://{own}/v1", "https://{own}:8443/v1", "https://{own}.evil.example/v1",
    "https://evil.example/{own}/v1", "https://{own}./v1", "http://127.0.0.1:1/v1", "https://[::1]/v1", "{base}",
)  # fmt: skip
"""Addresses made of a shipped provider's host and base URL."""


@pytest.mark.parametrize("address", HOSTS)
@pytest.mark.parametrize("provider", PROVIDERS)
def test_a_key_of_a_shipped_provider_goes_to_its_host_only(folder: Path, provider: str, address: str) -> None:
    base = PROVIDERS[provider].base_url
    url = address.format(own=urlsplit(base).netloc, base=base)
    variable = f"{provider.upper()}_API_KEY"
    text = f'[[providers]]\nname = "lab"\nbase_url = "{url}"\nkey_variable = "{variable}"\n' + MODEL.replace(
        "openai", "lab"
    )
    settings = Settings.load({variable: KEY}, None, demo=True)
    definition = ProviderDefinition(name="lab", base_url=url, key_variable=variable)
    providers = make_providers(settings)
    providers.learn(
        [replace(chat_server.MODEL, provider="lab", configuration=ModelConfiguration(provider_definition=definition))]
    )
    if url == base:
        assert read(folder, text)[0].provider == "lab"
        assert "lab" in providers
        return
    assert "provider 1.base_url: " in refusal(folder, text)
    assert "lab" not in providers, "a row of the database is held to the same"


@pytest.mark.parametrize("host", ["192.168.1.5:11434", "gpu.lan", "10.0.0.1", "0.0.0.0", "localhost.evil.example"])
def test_http_goes_to_this_machine_only(folder: Path, host: str) -> None:
    provider = f'[[providers]]\nname = "lab"\nbase_url = "http://{host}/v1"\n'
    assert "provider 1.base_url: expected an https address" in refusal(
        folder, provider + MODEL.replace("openai", "lab")
    )
    (entry,) = read(folder, provider.replace(host, "localhost:11434") + MODEL.replace("openai", "lab"))
    assert entry.provider == "lab"


def test_a_refused_key_variable_names_the_rule(folder: Path) -> None:
    lab = '[[providers]]\nname = "lab"\nbase_url = "https://lab.example/v1"\nkey_variable = "LAB_KEY"\n'
    assert "provider 1.key_variable: expected a variable in capital letters that ends with _API_KEY" in refusal(
        folder, lab + MODEL.replace("openai", "lab")
    )


LAB = (
    '[[providers]]\nname = "lab"\nbase_url = "https://lab.example:8443/v1"\nkey_variable = "LAB_API_KEY"\n'
    'key_host = "lab.example:8443"\n'
) + MODEL.replace("openai", "lab")


def test_a_key_goes_where_its_row_says_twice_and_the_operator_once(folder: Path) -> None:
    assert (
        'base_url: the keys in LAB_API_KEY go only to the host in `key_host`: expected key_host = "lab.example:8443"'
    ) in refusal(folder, LAB.replace('key_host = "lab.example:8443"\n', ""))
    unconfirmed = refusal(folder, LAB, "lab.example", "evil.example")
    assert (
        "line 5: provider 1.key_host: the keys in LAB_API_KEY would be sent to lab.example:8443: to confirm it, add "
        "--send-keys-to lab.example:8443"
    ) in unconfirmed
    assert read(folder, LAB, "lab.example:8443")[0].provider == "lab"


@pytest.mark.parametrize("host", ["lab.example", "LAB.example:8443", "lab.example:443", "api.lab.example:8443", ""])
def test_a_key_host_that_differs_from_the_address_is_refused(folder: Path, host: str) -> None:
    assert "provider 1." in refusal(folder, LAB.replace('key_host = "lab.example:8443"', f'key_host = "{host}"'), host)


@pytest.mark.parametrize(
    "address",
    [
        "https://user@lab.example/v1", "https://user:pw@lab.example/v1", "https://l\u0430b.example/v1",
        "https://\u212aab.example/v1", "https://lab\uff0eexample/v1", "https://lab.example\\\\@evil.example/v1",
        "https://lab.example\\\\.evil.example/v1", "https://lab.example:99999/v1", "https://lab.example:0/v1",
        "https://lab.example:x/v1", "https://[::1/v1", "https://::1/v1", "https://[evil]/v1",
        "https://[fe80::1%25eth0]/v1", "https://lab_.example/v1", "https://lab..example/v1", "https://-lab.example/v1",
        "https:///v1", "https://lab.example/v1\\n", "https://lab.example/v1?a=b", "https://lab.example/v1#a",
        "ftp://lab.example/v1", "https:lab.example", "//lab.example/v1", "https://lab.example/v 1",
        "https://lab.example%2eevil.example/v1", "http://127.1/v1", "http://2130706433/v1", "http://localhost./v1",
        "http://[::ffff:192.168.1.5]/v1", "http://0/v1",
    ],
)  # fmt: skip
def test_an_address_that_is_not_what_it_seems_is_refused_in_a_file_and_in_a_row(folder: Path, address: str) -> None:
    text = LAB.replace("https://lab.example:8443/v1", address).replace("lab.example:8443", "lab.example")
    assert "line 3: provider 1.base_url: expected " in refusal(folder, text, "lab.example")
    assert not is_called(ProviderDefinition(name="lab", base_url=address.replace("\\\\", "\\").replace("\\n", "\n")))


def is_called(definition: ProviderDefinition) -> bool:
    """Return whether a service calls a provider that a row of its database defines."""
    providers = make_providers(Settings.load({"LAB_API_KEY": KEY}, None, demo=True))
    configuration = ModelConfiguration(provider_definition=definition)
    providers.learn([replace(chat_server.MODEL, provider="lab", configuration=configuration)])
    return "lab" in providers


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("protocol", "soap"),
        ("key_host", "evil.example"),
        ("key_host", None),
        ("headers", {"Host": "evil.example"}),
        ("headers", {"Transfer-Encoding": "chunked"}),
        ("headers", {"X-Lab": "a\r\nX-Key: b"}),
        ("request", {"messages": []}),
        ("stream", True),
    ],
)
def test_a_row_of_the_database_is_held_to_the_rules_of_the_file(field: str, value: Any) -> None:
    definition = ProviderDefinition(
        name="lab",
        base_url="https://lab.example/v1",
        protocol="messages",
        key_variable="LAB_API_KEY",
        key_host="lab.example",
    )
    assert is_called(definition)
    assert not is_called(replace(definition, **{field: value}))


@pytest.mark.parametrize("name", ["Host", "host", "Content-Length", "Transfer-Encoding", "Connection", "Expect"])
def test_a_header_cannot_lead_a_request_elsewhere(folder: Path, name: str) -> None:
    headers = f'headers = {{{name} = "evil.example"}}\n'
    text = LAB.replace("key_variable", f"{headers}key_variable")
    assert f"provider 1.headers.{name}: the service sets it itself" in refusal(folder, text, "lab.example:8443")


@pytest.mark.parametrize("name", [*PROVIDERS, "rules", "strategy"])
def test_no_row_of_the_database_replaces_a_shipped_provider(name: str) -> None:
    providers = make_providers(Settings.load({"OPENAI_API_KEY": KEY}, None, demo=True))
    before = dict(providers)
    hostile = ProviderDefinition(name=name if name in PROVIDERS else "lab", base_url="https://evil.example/v1")
    providers.learn(
        [replace(chat_server.MODEL, provider=name, configuration=ModelConfiguration(provider_definition=hostile))]
    )
    assert dict(providers) == before


def test_a_setting_moves_a_shipped_provider_and_its_key(folder: Path) -> None:
    (folder.parent / ".env").write_text(f"OPENAI_BASE_URL=https://gateway.example/v1\nOPENAI_API_KEY={KEY}\n")
    lab = '[[providers]]\nname = "lab"\nbase_url = "https://{}/v2"\nkey_variable = "OPENAI_API_KEY"\n' + MODEL.replace(
        "openai", "lab"
    )
    assert read(folder, lab.format("gateway.example"))[0].provider == "lab"
    assert "go to https://gateway.example only" in refusal(folder, lab.format("api.openai.com"))
