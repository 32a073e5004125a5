"""The syntax trees of trader's modules, parsed once per worker."""

import ast
import gc
from functools import cache
from pathlib import Path
from typing import Final

TRADER: Final = Path(__file__).parents[2] / "trader"


@cache
def modules() -> dict[str, ast.Module]:
    """Return the trees by their modules' paths within `trader`."""
    gc.disable()  # the trees live as long as the run: searching them for garbage repeatedly is expensive
    trees = {
        path.relative_to(TRADER).as_posix(): ast.parse(path.read_text(encoding="utf-8"))
        for path in sorted(TRADER.rglob("*.py"))
    }
    gc.freeze()
    gc.enable()
    return trees
