"""Print the module tree: each module with the first sentence of its docstring."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
FIRST_SENTENCE = re.compile(r"(.+?)\.(?: |$)")


def module_tree() -> str:
    """Return every module of the package with its purpose, folder by folder."""
    entries = list(_entries(ROOT / "trader", 0))
    width = max(len(name) for name, _ in entries) + 2
    return "\n".join(name.ljust(width) + purpose for name, purpose in entries)


def _entries(folder: Path, depth: int) -> Iterator[tuple[str, str]]:
    indent = "  " * depth
    yield f"{indent}{folder.name}/", _purpose(folder / "__init__.py").removeprefix(f"{folder.name}: ")
    for module in sorted(path for path in folder.glob("*.py") if path.name != "__init__.py"):
        yield f"{indent}  {module.name}", _purpose(module)
    for inner in sorted(path for path in folder.iterdir() if (path / "__init__.py").exists()):
        yield from _entries(inner, depth + 1)


def _purpose(module: Path) -> str:
    words = (ast.get_docstring(ast.parse(module.read_text(encoding="utf-8"))) or "").partition("\n")[0]
    sentence = FIRST_SENTENCE.match(words)
    return sentence[1] if sentence else words


if __name__ == "__main__":
    print(module_tree())
