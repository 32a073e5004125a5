"""Write the picture of the house in CONTRIBUTING.md from the first sentence of each module.

`python scripts/make_module_tree.py` writes; with `--check` it only says whether the picture is true (exit code 1 if
not).
"""

import ast
import re
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
DOCUMENT = ROOT / "CONTRIBUTING.md"
START, END = "<!-- modules:start -->", "<!-- modules:end -->"
FIRST_SENTENCE = re.compile(r"(.+?)\.(?: |$)")


def picture() -> str:
    """Every module of the package with what it is for, folder by folder."""
    return "\n".join(["```", *_lines(ROOT / "trader", 0), "```"])


def _lines(folder: Path, depth: int) -> list[str]:
    modules = sorted(path for path in folder.glob("*.py") if path.name != "__init__.py")
    folders = sorted(path for path in folder.iterdir() if (path / "__init__.py").exists())
    purpose = _purpose(folder / "__init__.py")
    lines = [_entry(f"{folder.name}/", purpose.removeprefix(f"{folder.name}: "), depth)]
    lines += [_entry(module.name, _purpose(module), depth + 1) for module in modules]
    for inner in folders:
        lines += _lines(inner, depth + 1)
    return lines


def _entry(name: str, purpose: str, depth: int) -> str:
    return f"{'  ' * depth}{name}".ljust(26) + purpose


def _purpose(module: Path) -> str:
    words = (ast.get_docstring(ast.parse(module.read_text(encoding="utf-8"))) or "").partition("\n")[0]
    sentence = FIRST_SENTENCE.match(words)
    return sentence[1] if sentence else words


def document_with_picture(document: str) -> str:
    """The document with the picture between its markers."""
    before, start, rest = document.partition(START)
    _, end, after = rest.partition(END)
    if not start or not end:
        raise SystemExit(f"{DOCUMENT.name} has no {START} and {END}")
    return f"{before}{START}\n{picture()}\n{END}{after}"


def main() -> int:
    document = DOCUMENT.read_text(encoding="utf-8")
    wanted = document_with_picture(document)
    if document == wanted:
        return 0
    if "--check" in sys.argv[1:]:
        print("CONTRIBUTING.md does not show the modules that there are; run scripts/make_module_tree.py")
        return 1
    DOCUMENT.write_text(wanted, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
