"""Write the module tree of CONTRIBUTING.md from the first sentence of each module's docstring.

`python scripts/make_module_tree.py` writes it; with `--check` it only compares it (exit code 1: out of date).
"""

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
DOCUMENT = ROOT / "CONTRIBUTING.md"
START, END = "<!-- modules:start -->", "<!-- modules:end -->"
FIRST_SENTENCE = re.compile(r"(.+?)\.(?: |$)")


def module_tree() -> str:
    """Return every module of the package with its purpose, folder by folder."""
    entries = list(_entries(ROOT / "trader", 0))
    width = max(len(name) for name, _ in entries) + 2
    return "\n".join(["```", *(name.ljust(width) + purpose for name, purpose in entries), "```"])


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


def document_with_tree(document: str) -> str:
    """Return the document with the current tree between its markers."""
    before, start, rest = document.partition(START)
    _, end, after = rest.partition(END)
    if not start or not end:
        raise SystemExit(f"{DOCUMENT.name} has no {START} and {END}")
    return f"{before}{START}\n{module_tree()}\n{END}{after}"


def main() -> int:
    document = DOCUMENT.read_text(encoding="utf-8")
    wanted = document_with_tree(document)
    if document == wanted:
        return 0
    if "--check" in sys.argv[1:]:
        print("The module tree of CONTRIBUTING.md is out of date; run scripts/make_module_tree.py")
        return 1
    DOCUMENT.write_text(wanted, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
