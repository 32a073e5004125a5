"""The worked example of docs/method.md matches the output of its command."""

import importlib.util
from pathlib import Path

import pytest
from support.candles import FOLDER

ROOT = Path(__file__).parents[2]


def test_the_document_has_every_figure_of_the_commands_output(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    spec = importlib.util.spec_from_file_location("method_example", ROOT / "scripts" / "method_example.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert module.main([str(tmp_path)]) == 1
    assert "no kline files" in capsys.readouterr().err
    if not FOLDER.exists():
        pytest.skip(f"there are no recorded candles in {FOLDER}")
    assert module.main([str(FOLDER)]) == 0
    printed = "".join(f"    {line}\n" for line in capsys.readouterr().out.splitlines())
    assert printed in (ROOT / "docs" / "method.md").read_text(encoding="utf-8")
