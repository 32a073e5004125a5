"""The list of planted bugs fits the program; `scripts/mutants` runs it."""

from pathlib import Path

import pytest
from tools import mutants
from tools.mutant_list import MUTANTS, Mutant
from tools.mutants import ROOT, planted


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_bug_can_be_planted(mutant: Mutant) -> None:
    source = (ROOT / "trader" / mutant.path).read_text(encoding="utf-8")
    assert planted(mutant, source) != source
    for test in mutant.tests:
        assert (ROOT / "tests" / test.partition("::")[0]).exists()


def test_names_are_unique() -> None:
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS) >= 30


def test_a_bug_whose_tests_do_not_end_is_not_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "trader" / "sum.py"
    file.parent.mkdir()
    file.write_text("a + b", encoding="utf-8")
    monkeypatch.setattr(mutants, "LIMIT_S", 0.01)
    outcome = mutants.run(Mutant("minus", "it looks alike", "sum.py", [("+", "-")], ["test_sum.py"]), tmp_path)
    assert (outcome.test, outcome.has_ended) == (None, False)
    assert "no end" in str(outcome)
    assert file.read_text(encoding="utf-8") == "a + b"
