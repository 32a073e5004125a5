"""A models file reads nothing but the files of its folder, and stores no secret of the settings."""

from pathlib import Path

import pytest

from trader.commands.models_file import Entry, read_models
from trader.errors import SettingsError

KEY, PASSWORD = "sk-4c1d9b7e55aa", "s3cret-p@ss"
ENV = f"OPENAI_API_KEY={KEY}\nDATABASE_URL=postgresql://trader:s3cret-p%40ss@db:5432/trader\nAPI_TOKEN=none\n"
MODEL = '[[models]]\nid = "a"\nvariant = "Apex"\nprovider = "openai"\nrouter_model = "gpt"\n'


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder of models; the settings file lies beside it, where no models file reaches."""
    (tmp_path / ".env").write_text(ENV)
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "own.md").write_text("Trade well; none of it is a secret.")
    return tmp_path / "models"


def read(folder: Path, text: str) -> list[Entry]:
    (folder / "models.toml").write_text(text, encoding="utf-8")
    return read_models(folder / "models.toml", folder.parent / ".env")


def refusal(folder: Path, text: str) -> str:
    with pytest.raises(SettingsError) as refused:
        read(folder, text)
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
def test_a_prompt_outside_of_the_folder_is_refused(folder: Path, name: str) -> None:
    (folder / "link.md").symlink_to(folder.parent / ".env")
    (folder / "folder").symlink_to(folder.parent)
    assert "is outside of it" in refusal(folder, MODEL + f'prompt = "{name}"\n')


def test_a_prompt_that_never_ends_is_not_read_to_its_end(folder: Path) -> None:
    (folder / "huge.md").write_text("a" * 40_001)
    assert "'huge.md' has more" in refusal(folder, MODEL + 'prompt = "huge.md"\n')


@pytest.mark.parametrize("held", [KEY, PASSWORD, "postgresql://trader:s3cret-p%40ss@db:5432/trader"])
def test_a_text_with_a_secret_is_refused_by_the_name_of_its_setting(folder: Path, held: str) -> None:
    (folder / "own.md").write_text(f"My key is {held}, keep it.")
    setting = "OPENAI_API_KEY" if held == KEY else "DATABASE_URL"
    assert f"line 6: model 1.prompt: it holds the value of {setting}" in refusal(folder, MODEL + 'prompt = "own.md"\n')
    headers = f'[[providers]]\nname = "lab"\nbase_url = "http://a/v1"\nheaders = {{X-Key = "{held}"}}\n'
    assert f"provider 1.headers.X-Key: it holds the value of {setting}" in refusal(folder, headers + MODEL)


@pytest.mark.parametrize("model_id", [".", "..", "a\\n", "a b", "a/b", "\\u202ea", ""])
def test_an_id_is_a_word_that_no_address_takes_for_a_folder(folder: Path, model_id: str) -> None:
    assert "model 1.id: expected 1 to 64 letters" in refusal(folder, MODEL.replace('"a"', f'"{model_id}"', 1))


@pytest.mark.parametrize("character", ["\\u001b", "\\u009b", "\\u202e", "\\u2066", "\\u200f", "\\n", "\\u2028"])
def test_names_steer_no_terminal(folder: Path, character: str) -> None:
    for field in ("name", "logo", "router_model"):
        lines = [line for line in MODEL.splitlines() if not line.startswith(field)]
        message = refusal(folder, "\n".join([*lines, f'{field} = "gpt{character}4"\n']))
        assert f"model 1.{field}: expected a line of 1 to 200 characters, without control" in message


def test_an_ordinary_file_with_names_of_every_language_is_read(folder: Path) -> None:
    (entry,) = read(folder, MODEL + 'name = "深度求索 Ж é — 4"\n')
    assert (entry.id, entry.name) == ("a", "深度求索 Ж é — 4")
