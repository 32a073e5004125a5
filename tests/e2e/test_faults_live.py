"""The quick faults of scripts/faults against the running process: reported by name, soon resolved, nothing lost."""

from pathlib import Path

import pytest
from tools.fault_benches import Bench, opened
from tools.fault_list import FAULTS
from tools.faults import measure

pytestmark = pytest.mark.processes


async def test_quick_faults_are_reported_by_name_and_lose_nothing(open_folder: Path) -> None:
    quick = [fault for fault in FAULTS if fault.quick_cause is not None]
    async with opened(open_folder, Bench) as bench:
        for fault in quick:
            told = await measure(bench, fault, waits_for_notices=False)
            assert told.is_clean, told
            assert told.answer in ("", f"503 The database cannot be used now: {fault.quick_cause}."), told
        assert len(quick) == 2
        assert bench.acknowledged
