"""A simulated next version of the program, whose schema has one more column and table, with a migration to them."""

import shutil
import sys
from pathlib import Path

import pytest

from trader.__main__ import main
from trader.database import schema

STEP = Path(__file__).with_suffix(".sql")
COLUMN = "    missed      bigint NOT NULL DEFAULT 0,\n"
MORE_COLUMNS = COLUMN + "    total_tokens bigint NOT NULL DEFAULT 0,\n"
MORE_TABLES = "\nCREATE TABLE IF NOT EXISTS reviews (invocation_id uuid PRIMARY KEY REFERENCES invocations);\n"


def use_next_version(folder: Path, patch: pytest.MonkeyPatch) -> int:
    """Turn this process into the next version, with its schema files in an empty folder. Return the version."""
    before, text = schema.schema_version(), schema.schema_path().read_text()
    after = before + 1
    versions = f"(version) VALUES ({before})", f"(version) VALUES ({after})"
    assert (text.count(COLUMN), text.count(versions[0])) == (1, 1)
    if schema.EARLIER_SCHEMAS.exists():
        shutil.copytree(schema.EARLIER_SCHEMAS, folder, dirs_exist_ok=True)
    (folder / f"schema_{before}.sql").write_text(text)
    (folder / "schema.sql").write_text(text.replace(COLUMN, MORE_COLUMNS).replace(*versions) + MORE_TABLES)
    patch.setattr(schema, "EARLIER_SCHEMAS", folder)
    patch.setattr(schema, "schema_path", lambda: folder / "schema.sql")
    patch.setitem(schema.MIGRATIONS, after, STEP.read_text())
    return after


if __name__ == "__main__":
    with pytest.MonkeyPatch.context() as patch:
        use_next_version(Path(sys.argv[1]), patch)
        sys.exit(main(sys.argv[2:]))
