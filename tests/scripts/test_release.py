"""Releases: the lock matches pyproject.toml, the version is defined once, and the build installs and runs."""

import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import tomllib
import zipfile
from importlib.metadata import requires, version
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version
from support.process import ROOT

from trader import __version__
from trader.database.schema import schema_version

LOCK = ROOT / "scripts" / "packaging" / "requirements.lock"
LIVE_LOCK = LOCK.with_name("requirements-live.lock")
PINNED = re.compile(
    r"^([a-z0-9-]+)==(\S+)(?: ; (.+?))? \\\n((?: +--hash=sha256:[0-9a-f]{64}(?: \\)?\n)+)", re.MULTILINE
)
ADVICE = "run scripts/release lock"


def release_module() -> ModuleType:
    spec = spec_from_file_location("release", ROOT / "scripts" / "release.py")
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def pins(lock: Path = LOCK) -> dict[str, list[Version]]:
    result: dict[str, list[Version]] = {}
    for match in PINNED.finditer(lock.read_text(encoding="utf-8")):
        result.setdefault(match[1], []).append(Version(match[2]))
    return result


@pytest.mark.parametrize(("lock", "extra"), [(LOCK, None), (LIVE_LOCK, "live")])
def test_the_lock_matches_the_project(lock: Path, extra: str | None) -> None:
    text = lock.read_text(encoding="utf-8")
    inputs = release_module().lock_inputs(extra)
    assert text.startswith(release_module().lock_header(extra)), ADVICE
    assert len(PINNED.findall(text)) == len(re.findall(r"^\S+==", text, re.MULTILINE)), "every package has hashes"
    locked = pins(lock)
    for dependency in map(Requirement, [*inputs["dependencies"], *inputs.get("overrides", ())]):
        versions = locked.get(canonicalize_name(dependency.name), [])
        assert versions, f"{dependency}: {ADVICE}"
        assert all(dependency.specifier.contains(version) for version in versions), f"{dependency}: {ADVICE}"


def test_live_trading_uses_the_service_versions() -> None:
    locked = pins()
    shared = {name: versions for name, versions in pins(LIVE_LOCK).items() if name in locked}
    assert "aiohttp" in shared
    assert shared == {name: locked[name] for name in shared}, ADVICE


def test_dependencies_of_locked_packages_are_locked_too() -> None:
    """As far as the installed versions show, which may differ from the locked ones."""
    locked = pins()
    for name in locked.keys() - {"setuptools"}:
        for needed in map(Requirement, requires(name) or ()):
            if needed.marker is None or needed.marker.evaluate({"extra": ""}):
                assert canonicalize_name(needed.name) in locked, f"{name} needs {needed}: {ADVICE}"


def test_the_version_is_defined_once() -> None:
    assert "version" not in tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert version("trader-service") == __version__
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    latest = re.search(r"^## \[(.+?)\](?: \((.+?)\))?", changelog, re.MULTILINE)
    assert latest is not None
    assert __version__ in (latest[1], latest[2])


def test_users_are_told_to_install_this_distribution() -> None:
    """`trader` on the package index is a stranger's."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    places = [
        *ROOT.glob("*.md"),
        *(path for part in ("docs", "trader", "scripts") for path in (ROOT / part).rglob("*")),
    ]
    told = [
        (path.name, name, extra)
        for path in places
        if path.suffix in {".md", ".py", ".ipynb", ".js"}
        for name, extra in re.findall(
            r"pip install \S*?([\w-]*trader[\w-]*)(?:\[(.+?)\])?", path.read_text(encoding="utf-8")
        )
    ]
    assert len(told) >= 5
    for path, name, extra in told:
        assert name == project["name"], path
        assert not extra or extra == "{of}" or extra in project["optional-dependencies"], path


def test_a_released_schema_never_changes_without_a_new_version(tmp_path: Path) -> None:
    number_schema = release_module().number_schema
    schema, released, earlier = tmp_path / "schema.sql", tmp_path / "released.json", tmp_path / "earlier"
    shutil.copy(ROOT / "schema.sql", schema)
    shutil.copy(ROOT / "scripts" / "packaging" / "released_schemas.json", released)
    number_schema(schema, released, ROOT / "trader" / "database" / "earlier")  # the present one is as it was released
    first = schema.read_text()
    number = schema_version()
    number_schema(schema, released, earlier)
    schema.write_text(first + "CREATE TABLE IF NOT EXISTS reviews (id uuid PRIMARY KEY);\n")
    with pytest.raises(RuntimeError, match=rf"version {number} was released, and schema\.sql is not that schema"):
        number_schema(schema, released, earlier)
    schema.write_text(schema.read_text().replace(f"(version) VALUES ({number})", f"(version) VALUES ({number + 1})"))
    with pytest.raises(RuntimeError, match=rf"schema_{number}\.sql is not that schema"):
        number_schema(schema, released, earlier)
    earlier.mkdir()
    (earlier / f"schema_{number}.sql").write_text(first)
    number_schema(schema, released, earlier)
    assert set(json.loads(released.read_text())) == {str(number), str(number + 1)}


def test_the_archive_is_whole() -> None:
    """What the documents name for operators is installed with the package, and so in both archives."""
    files = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["setuptools"]["data-files"]
    listed = {path for patterns in files.values() for pattern in patterns for path in ROOT.glob(pattern)}
    for folder in ("docs", "scripts/packaging"):
        files_there = {path for path in (ROOT / folder).rglob("*") if path.is_file() and path.suffix != ".pyc"}
        assert files_there - listed == {ROOT / "scripts" / "packaging" / "released_schemas.json"} & files_there
    assert ROOT / "CHANGELOG.md" in listed


def follow_the_document(folder: Path) -> None:
    """Install the wheel of a folder twice as the document says, and check it by its unit's command as another user."""
    text = (ROOT / "docs" / "operation.md").read_text(encoding="utf-8")
    block = text[text.index("/usr/bin/python3 -m venv /opt/trader/.venv") :].split("\n\n", 1)[0]
    with tempfile.TemporaryDirectory() as place:
        opt, units, state = (Path(place, name) for name in ("opt", "units", "state"))
        for each in (opt, units, state):
            each.mkdir()
        Path(place).chmod(0o755)
        script = block.replace("/opt/trader", str(opt)).replace("/etc/systemd/system", str(units))
        for _ in ("installed", "upgraded"):
            done = subprocess.run(["bash", "-euc", script], cwd=folder, capture_output=True, text=True, check=False)
            assert done.returncode == 0, done.stderr[-3000:]
        unit = (units / "trader.service").read_text(encoding="utf-8").replace("/opt/trader", str(opt))
        (units / "trader.service").write_text(unit, encoding="utf-8")
        if shutil.which("systemd-analyze") is not None:
            verify = ["systemd-analyze", "verify", "--man=no", str(units / "trader.service")]
            assert subprocess.run(verify, capture_output=True, check=False).returncode == 0
        (command,) = re.findall(r"^ExecStart=(.+) --env-file", unit, re.MULTILINE)
        as_nobody = ["runuser", "-u", "nobody", "--"] if os.geteuid() == 0 else []
        if as_nobody:
            shutil.chown(state, "nobody")
        started = subprocess.run(
            [*as_nobody, *command.split(), "check", "--demo"], cwd=state, capture_output=True, text=True, check=False,
            env={"PATH": os.environ["PATH"], "HOME": str(state)},
        )  # fmt: skip
        assert started.returncode == 0, started.stderr


@pytest.mark.processes
def test_a_release_installs_into_an_empty_environment_and_runs(tmp_path: Path) -> None:
    if os.environ.get("TRADER_TEST_RELEASE") != "on":
        pytest.skip("building a release takes a minute: TRADER_TEST_RELEASE=on")
    environ = {**os.environ, "PYTHON": sys.executable}
    for command in ("build", "check"):
        done = subprocess.run(
            [ROOT / "scripts/release", command, tmp_path], capture_output=True, text=True, check=False, env=environ
        )
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert f"trader {__version__}" in done.stdout
    wheel, source = (tmp_path / f"trader_service-{__version__}{end}" for end in ("-py3-none-any.whl", ".tar.gz"))
    with zipfile.ZipFile(wheel) as packed, tarfile.open(source) as archive:
        names, sources = packed.namelist(), archive.getnames()
    for tree in ("prompts", "api/dashboard/static", "api/reference"):
        for path in (ROOT / "trader" / tree).rglob("*"):
            if path.is_file() and "__pycache__" not in path.parts:
                assert str(path.relative_to(ROOT)) in names, path
    assert any(name.endswith("share/trader/schema.sql") for name in names)
    assert f"trader_service-{__version__}/schema.sql" in sources
    follow_the_document(tmp_path)
    bill = json.loads((tmp_path / "sbom.json").read_bytes())
    component = bill["metadata"]["component"]
    assert (component["name"], component["version"]) == ("trader-service", __version__)
    assert {(component["name"], Version(component["version"])) for component in bill["components"]} == {
        (name, each) for name, versions in pins().items() for each in versions
    }
