"""The list of planted bugs fits the program; `scripts/mutants` runs it."""

import pytest
from support.mutant_list import MUTANTS, Mutant
from support.mutants import ROOT, planted


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_bug_can_be_planted(mutant: Mutant) -> None:
    source = (ROOT / "trader" / mutant.path).read_text(encoding="utf-8")
    assert planted(mutant, source) != source
    for test in mutant.tests:
        assert (ROOT / "tests" / test.partition("::")[0]).exists()


def test_names_are_unique() -> None:
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS) >= 30
