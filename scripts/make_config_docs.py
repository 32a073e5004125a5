"""Write the settings table of docs/configuration.md and .env.example from the definitions of the settings.

`python scripts/make_config_docs.py` writes both files; with `--check` it only compares them (exit code 1: out of date).
"""

import sys
import textwrap
from pathlib import Path

from trader.provider_settings import PROVIDERS
from trader.settings import VARIABLES

ROOT = Path(__file__).parents[1]
DOCUMENT = ROOT / "docs" / "configuration.md"
START, END = "<!-- settings:start -->", "<!-- settings:end -->"


def configuration_table() -> str:
    """Return the settings as a Markdown table."""
    rows = ["| name | default | meaning |", "|---|---|---|"]
    for variable in VARIABLES.values():
        default = variable.shown_default or (f"`{variable.default}`" if variable.default else "none")
        rows.append(f"| `{variable.name}` | {default} | {variable.meaning.replace('|', chr(92) + '|')} |")
    for provider in PROVIDERS:
        name = provider.upper()
        rows.append(
            f"| `{name}_API_KEY`, `{name}_API_KEY1`, `{name}_API_KEY_2` and on | none "
            f"| Keys of the AI provider `{provider}`; several share the load. |"
        )
        rows.append(f"| `{name}_BASE_URL` | the provider's own | Another server of its protocol; a key is optional. |")
    return "\n".join(rows)


def document_with_table(document: str) -> str:
    """Return the document with the current table between its markers."""
    before, start, rest = document.partition(START)
    _, end, after = rest.partition(END)
    if not start or not end:
        raise SystemExit(f"{DOCUMENT.name} has no {START} and {END}")
    return f"{before}{START}\n{configuration_table()}\n{END}{after}"


def env_example() -> str:
    """Return an `.env` file that lists every setting with its meaning and sets none of them."""
    lines = [
        "# Settings of trader. Copy to .env in the folder where it runs, and set what you need.",
        "# The environment wins over this file; an empty value means the default.",
    ]
    for variable in VARIABLES.values():
        lines += ["", *_comment(f"{variable.meaning} Default: {variable.default_text}.")]
        lines.append(f"# {variable.name}={'' if variable.shown_default else variable.default}")
    lines += ["", *_comment("AI providers: at least one, except with --demo. More keys of one: ..._API_KEY_2 and on.")]
    for provider in PROVIDERS:
        lines += [f"# {provider.upper()}_API_KEY=", f"# {provider.upper()}_BASE_URL="]
    return "\n".join(lines) + "\n"


def _comment(text: str) -> list[str]:
    return textwrap.wrap(text, width=100, initial_indent="# ", subsequent_indent="# ", break_on_hyphens=False)


def main() -> int:
    documents = {
        DOCUMENT: document_with_table(DOCUMENT.read_text(encoding="utf-8")),
        ROOT / ".env.example": env_example(),
    }
    stale = [path for path, text in documents.items() if not path.exists() or path.read_text(encoding="utf-8") != text]
    if "--check" in sys.argv[1:]:
        for path in stale:
            print(f"{path.name} is out of date; run scripts/make_config_docs.py")
        return 1 if stale else 0
    for path in stale:
        path.write_text(documents[path], encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
