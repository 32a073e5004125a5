"""The command line as a whole: every command has help, an example that can be parsed, and a row in its document."""

import json
import os
import re
import shlex
import subprocess
import sys
from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path

import pytest

from trader.__main__ import main
from trader.agents.models_file import variant_argument
from trader.commands.command import ALIASES, GROUPS, LAB, MODULES, REGISTRY, listing, load, make_parser, table
from trader.core.variant_id import VariantId
from trader.core.wire import to_wire
from trader.exchange.domain.halts import CommandOutcome

ROOT = Path(__file__).parents[2]
load("")
EVERY = sorted(REGISTRY)
GROUPED_ALIASES = {"version", *(name.partition(" ")[0] for name in ALIASES)}


@pytest.mark.parametrize("name", EVERY)
def test_a_command_has_help(name: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    with pytest.raises(SystemExit) as ended:
        main([*name.split(), "--help"])
    assert ended.value.code == 0
    shown = capsys.readouterr().out
    example = REGISTRY[name].example
    assert f"example: {example}" in shown
    assert example.startswith(f"trader {'lab ' * (name.split(maxsplit=1)[0] in LAB)}{name}")
    env_file = tmp_path / "settings"
    env_file.touch()
    words = [str(env_file) if word == "/etc/trader.env" else word for word in shlex.split(example)[1:]]
    assert make_parser().parse_args(words).run is REGISTRY[name].run


def test_every_module_of_the_table_declares_its_commands() -> None:
    assert {name.partition(" ")[0] for name in EVERY} == set(MODULES)


def test_the_document_has_every_command() -> None:
    document = (ROOT / "docs" / "commands.md").read_text(encoding="utf-8")
    rows = [
        [re.findall("`(.+?)`", cell) for cell in line.split("|")[1:3]] for line in document.splitlines() if "|" in line
    ]
    named = [
        name_of(f"{first} {second}".split())
        for firsts, seconds in rows
        for first in firsts
        for second in seconds or [""]
    ]
    assert sorted(set(named)) == EVERY


def name_of(words: list[str]) -> str:
    """The command that these words call, by its own name or another one."""
    words = words[1:] if words[0] == "lab" else [*ALIASES.get(words[0], words[:1]), *words[1:]]
    return " ".join(words[:2]) if " ".join(words[:2]) in REGISTRY else " ".join(words[:1])


@pytest.mark.parametrize("file", ["README.md", *(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md"))])
def test_documents_name_only_existing_commands(file: str, capsys: pytest.CaptureFixture[str]) -> None:
    text = (ROOT / file).read_text(encoding="utf-8")
    for line in re.findall(r"(?:`|^    (?:\$ )?)(?:trader|scripts/run) ([a-z][^`\n#;&|]*)", text, re.MULTILINE):
        name = name_of(line.split())
        assert name in (*REGISTRY, *MODULES, "") or line.split()[0] in GROUPED_ALIASES, f"{file}: trader {line}"
        options = re.findall(r"(?<!\S)--[a-z-]+", line)
        if options and name in REGISTRY:
            with pytest.raises(SystemExit):
                main([*name.split(), "--help"])
            shown = capsys.readouterr().out
            assert [option for option in options if option not in shown] == [], f"{file}: trader {line}"


@pytest.mark.parametrize(
    ("text", "variant"), [("apex", VariantId.APEX), ("Apex", VariantId.APEX), ("SOVEREIGN", VariantId.SOVEREIGN)]
)
def test_a_variant_is_understood_in_any_case(text: str, variant: VariantId) -> None:
    assert variant_argument(text) is variant


def test_an_unknown_variant_is_refused_in_plain_words(capsys: pytest.CaptureFixture[str]) -> None:
    for command in (["models", "try"], ["backtest"], ["show", "board"]):
        assert main([*command, "--variant", "ape"]) == 2
        assert (
            "unknown variant 'ape'; expected one of Apex, Trendsurfer, Contrarian, Sovereign" in capsys.readouterr().err
        )


def test_wrong_arguments_are_reported(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["halt", "--acount", "x", "--json"]) == 2
    shown = capsys.readouterr()
    assert "unrecognized arguments: --acount x" in shown.err
    assert json.loads(shown.out) == {"error": {"message": "unrecognized arguments: --acount x", "problems": []}}
    assert main(["halt", "--reason", " "]) == 2
    shown = capsys.readouterr()
    assert ("usage: trader halt" in shown.err, shown.out) == (True, "")


@pytest.mark.parametrize("words", [["--prot", "1"], ["halt", "--acount", "x"], ["show", "trades", "--limt=1"]])
def test_a_wrong_option_shows_the_help_of_its_command(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 2
    shown = capsys.readouterr()
    name = "serve" if words[0].startswith("-") else name_of(words)
    assert (shown.out, shown.err.startswith(f"usage: trader {name} ")) == ("", True)
    assert f"example: {REGISTRY[name].example}\ntrader: unrecognized arguments: --" in shown.err


def test_the_help_fits_a_screen_and_has_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert 24 <= len(lines) <= 40
    assert max(map(len, lines)) <= 100
    assert [line.split()[0] for line in lines if line.startswith("  ")] == [
        *(n for group in GROUPS.values() for n in group),
        "lab",
    ]
    assert [word.rstrip(",") for word in lines[-3].split()[1:]] == list(LAB)


def test_other_words_call_the_same_commands(capsys: pytest.CaptureFixture[str]) -> None:
    for words in (["agents", "list", "--help"], ["verify", "--help"], ["lab", "candles", "make", "--help"]):
        with pytest.raises(SystemExit):
            main(words)
        assert f"{name_of(words)} [-h]" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["lab", "halt"], "there is no command 'halt'; there are: candles, backtest"),
        (["lab", "backtets"], "did you mean `trader lab backtest`?"),
        (["exam", "chek"], "did you mean `trader lab exam check`?"),
        (["lab"], "usage: trader lab [-h]"),
        (["season", "plan"], "there is no command 'season plan'"),
    ],
)
def test_a_mistyped_command_is_told_the_closest_one(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words) == 2
    assert said in capsys.readouterr().err


@pytest.mark.processes
def test_hints_name_the_program_as_it_was_called() -> None:
    called = subprocess.run(["scripts/run", "models", "lst"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert "there is no command 'models lst'; did you mean `scripts/run models list`?" in called.stderr
    called = subprocess.run(["scripts/run", "halt", "--help"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert called.stdout.startswith("usage: scripts/run halt ")
    assert "example: scripts/run halt --account" in called.stdout


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        (["statu"], "there is no command 'statu'; did you mean `trader status`?"),
        (["accounts", "lst"], "there is no command 'accounts lst'; did you mean `trader accounts list`?"),
    ],
)
def test_an_unknown_command_suggests_the_closest_match(
    words: list[str], hint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*words, "--json"]) == 2
    shown = capsys.readouterr()
    assert shown.err == f"trader: {hint}\n"
    assert json.loads(shown.out) == {"error": {"message": hint, "problems": []}}


def test_errors_are_json_for_programs(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PORT", "http")
    assert main(["check", "--demo", "--json"]) == 2
    error = json.loads(capsys.readouterr().out)["error"]
    assert error["message"] == "The settings are wrong:"
    assert error["problems"][0].startswith("PORT: expected")


@pytest.mark.parametrize("shell", ["bash", "zsh"])
def test_a_shell_completes_every_command(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", shell]) == 0
    script = capsys.readouterr().out
    assert all(word in script for name in REGISTRY for word in name.split())


@pytest.mark.processes
def test_output_is_utf_8_in_any_locale() -> None:
    command = [sys.executable, "-P", "-m", "trader", "models", "tëst"]
    environ = {"PATH": os.environ["PATH"], "PYTHONIOENCODING": "ascii", "LC_ALL": "C"}
    done = subprocess.run(command, capture_output=True, env=environ, check=False)
    assert done.returncode == 2
    assert "there is no command 'models tëst'" in done.stderr.decode("utf-8")


def test_a_reader_may_close_the_pipe() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    done = subprocess.run(
        [sys.executable, "-P", "-m", "trader", "--help"], cwd=ROOT, stdout=writing, stderr=subprocess.PIPE, check=False
    )
    os.close(writing)
    assert (done.returncode, done.stderr) == (0, b"")


def test_tables_align_text_to_the_left_and_figures_to_the_right() -> None:
    assert list(table(("name", "value"), [("a", "1"), ("long name", "12345.00")])) == [
        "name          value",
        "a                 1",
        "long name  12345.00",
    ]


def test_a_listing_shows_the_fields_that_programs_get() -> None:
    amounts = ["6E+4", "60000.123456", "1234567.5", "0.00001234", "0E-8", "-0.5", "1.23456789"]
    shown = ["60,000.00", "60,000.12", "1,234,567.50", "0.00001234", "0.00", "-0.50", "1.23457"]
    assert [line.strip() for line in listing([{"x": Decimal(amount)} for amount in amounts], {"": "x"})][1:] == shown
    items = [
        {
            "at": datetime(2025, 1, 1, tzinfo=UTC),
            "openAt": "2025-01-01T00:00:01.000Z",
            "plan": {"stop": None},
            "pnl": 2.0,
        },
        {"at": "then", "manual": True, "orders": [1, 2], "pnl": None},
    ]
    columns = {"at": "at", "open": "openAt", "by hand": "manual", "stop": "plan.stop", "orders": "orders", "pnl": "pnl"}
    assert list(listing(items, columns, text_columns=3)) == [
        "at                       open                     by hand  stop  orders    pnl",
        "2025-01-01 00:00:00 UTC  2025-01-01 00:00:01 UTC              -          +2.00",
        "then                                              manual              2      -",
    ]


def test_values_for_programs_have_the_names_of_the_interface() -> None:
    value = {"the-id": CommandOutcome(note="n")}
    assert to_wire(value) == {"the-id": {"cancelled": [], "closed": [], "left": [], "note": "n"}}


def test_an_unreadable_settings_file_is_an_argument_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["status", "--env-file", "x" * 300]) == 2
    assert "cannot be read (File name too long)" in capsys.readouterr().err
