"""Releases: the locked dependencies, the files of a release with their bill of materials, and a trial of them.

  scripts/release lock              lock the dependencies of pyproject.toml; locked versions stay if they still fit
  scripts/release lock --upgrade    the same with the newest versions
  scripts/release build DIR         record the schema of this release under its version, and build the sdist, the wheel
                                    (from the sdist) and the SBOM (CycloneDX) in a folder
  scripts/release check DIR         install that wheel with the locked dependencies into an empty environment, and run
                                    its demo until it trades

The locks, for the service and for its extra `live`, apply to every platform and to Python 3.11 and later. `scripts/run`
and the container install the service's lock with its hashes, so that they get the same files as everybody else.
"""

import argparse
import hashlib
import json
import os
import re
import subprocess
import sys
import tempfile
import time
import tomllib
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

ROOT: Final = Path(__file__).resolve().parents[1]
LOCK: Final = ROOT / "scripts" / "packaging" / "requirements.lock"
LIVE_LOCK: Final = LOCK.with_name("requirements-live.lock")
SCHEMA: Final = ROOT / "schema.sql"
EARLIER_SCHEMAS: Final = ROOT / "trader" / "database" / "earlier"
RELEASED_SCHEMAS: Final = LOCK.with_name("released_schemas.json")
"""The SHA-256 of the schema of each version that was released, by version; `build` adds the present one."""

BIN: Final = Path(sys.executable).parent
START_S: Final = 120
_SCHEMA_VERSION: Final = re.compile(r"INSERT INTO schema_version \(version\) VALUES \((\d+)\)")
_LISTENING: Final = re.compile(r"listening on (http://\S+)")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("lock").add_argument("--upgrade", action="store_true")
    for name in ("build", "check"):
        commands.add_parser(name).add_argument("folder", type=Path)
    options = parser.parse_args(arguments)
    try:
        if options.command == "lock":
            lock(LOCK, upgrade=options.upgrade)
            lock(LIVE_LOCK, "live", upgrade=options.upgrade)
        elif options.command == "build":
            build(options.folder)
        else:
            check(options.folder)
    except subprocess.CalledProcessError as error:
        print(f"release: {' '.join(map(str, error.cmd))} failed with {error.returncode}", file=sys.stderr)
        return 1
    except RuntimeError as error:
        print(f"release: {error}", file=sys.stderr)
        return 1
    return 0


def lock_inputs(extra: str | None = None) -> dict[str, Any]:
    """Return the requirements to lock, of an extra or of the service.

    The service's requirements include the build backend, so that an install downloads nothing unlocked.
    """
    pyproject = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    project = pyproject["project"]
    service = [*project["dependencies"], *pyproject["build-system"]["requires"]]
    if extra is None:
        return {"python": project["requires-python"], "dependencies": service}
    dependencies, overrides = project["optional-dependencies"][extra], pyproject["tool"]["uv"]["override-dependencies"]
    return {"python": project["requires-python"], "dependencies": dependencies, "overrides": overrides}


def lock_header(extra: str | None = None) -> str:
    """Return the header of the lock, which names its inputs."""
    digest = hashlib.sha256(json.dumps(lock_inputs(extra), sort_keys=True).encode()).hexdigest()
    return f"# Made by scripts/release lock from the dependencies of pyproject.toml.\n# inputs: {digest}\n"


def lock(file: Path, extra: str | None = None, *, upgrade: bool) -> None:
    """Lock the dependencies of the service, or of an extra at the service's versions."""
    inputs = lock_inputs(extra)
    with tempfile.TemporaryDirectory() as folder:
        asked, locked = Path(folder, "asked.in"), Path(folder, "locked.txt")
        asked.write_text("\n".join(inputs["dependencies"]) + "\n", encoding="utf-8")
        if file.exists() and not upgrade:
            locked.write_bytes(file.read_bytes())
        python = inputs["python"].removeprefix(">=")
        options = ["--universal", "--python-version", python, "--generate-hashes", "--no-annotate", "--no-header"]
        constraint: list[str | Path] = [] if extra is None else ["--constraint", LOCK]
        _run(
            BIN / "uv",
            "--directory",
            ROOT,
            "pip",
            "compile",
            "--quiet",
            *options,
            *constraint,
            "--output-file",
            locked,
            asked,
        )
        file.write_text(lock_header(extra) + locked.read_text(encoding="utf-8"), encoding="utf-8")
    print(f"{file.relative_to(ROOT)}: {len(re.findall('^[a-z].*==', file.read_text(), re.MULTILINE))} packages")


def number_schema(schema: Path, released: Path, earlier: Path) -> None:
    """Record the schema of this release under its version. A released version never changes.

    :raises RuntimeError: a schema with this version was released and was another one, or an earlier one is not kept
    """
    text = schema.read_text(encoding="utf-8")
    (version,) = _SCHEMA_VERSION.findall(text)
    known = json.loads(released.read_text(encoding="utf-8"))
    for number, digest in known.items():
        kept = schema if number == version else earlier / f"schema_{number}.sql"
        if not kept.exists() or hashlib.sha256(kept.read_bytes()).hexdigest() != digest:
            raise RuntimeError(
                f"schema version {number} was released, and {kept.name} is not that schema: a change needs the next "
                f"version, a step in MIGRATIONS, and the released file as {earlier.name}/schema_{number}.sql"
            )
    known[version] = hashlib.sha256(text.encode()).hexdigest()
    released.write_text(json.dumps(known, indent=2) + "\n", encoding="utf-8")


def build(folder: Path) -> None:
    """Build the sdist, the wheel and the SBOM."""
    number_schema(SCHEMA, RELEASED_SCHEMAS, EARLIER_SCHEMAS)
    _run(BIN / "python", "-m", "build", "--installer", "uv", "--outdir", folder, ROOT)  # the wheel from the sdist
    bill = folder / "sbom.json"
    _run(
        BIN / "cyclonedx-py", "requirements", LOCK, "--pyproject", ROOT / "pyproject.toml", "--mc-type", "application",
        "--output-reproducible", "--of", "JSON", "-o", bill,
    )  # fmt: skip
    (wheel,) = folder.glob("trader_service-*.whl")
    content = json.loads(bill.read_bytes())
    content["metadata"]["component"]["version"] = wheel.name.split("-")[1]  # pyproject.toml does not have it
    bill.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    for file in sorted(folder.iterdir()):
        print(f"{hashlib.sha256(file.read_bytes()).hexdigest()}  {file.name}")


def check(folder: Path) -> None:
    """Install the wheel of a folder into an empty environment, and run its demo until it answers and trades."""
    (wheel,) = folder.glob("*.whl")
    with tempfile.TemporaryDirectory() as place:
        environment = Path(place, "environment")
        _run(sys.executable, "-m", "venv", environment)
        pip: list[str | Path] = [
            environment / "bin" / "python",
            "-m",
            "pip",
            "install",
            "--quiet",
            "--disable-pip-version-check",
        ]
        _run(*pip, "--require-hashes", "--only-binary=:all:", "-r", LOCK)
        _run(*pip, "--no-deps", wheel)
        _run(environment / "bin" / "python", "-m", "pip", "check")
        working = Path(place, "working")
        working.mkdir()
        _try_demo(environment / "bin" / "trader", working)


def _try_demo(program: Path, working: Path) -> None:
    log = working / "log"
    environ = {"PATH": os.environ["PATH"], "HOME": str(working), "PORT": "0"}
    with log.open("w") as file:
        command: list[str | Path] = [program, "--demo=fresh"]
        service = subprocess.Popen(command, cwd=working, env=environ, stderr=file)  # noqa: S603 - the program that was just built
    try:
        deadline_s = time.monotonic() + START_S
        while (match := _LISTENING.search(log.read_text())) is None:
            if service.poll() is not None or time.monotonic() > deadline_s:
                raise RuntimeError(f"the demo did not start: {log.read_text()[-2000:]}")
            time.sleep(0.2)
        order = {"accountId": "release", "symbol": "BTC", "side": "buy", "quantity": 0.01}
        answer = _post(f"{match[1]}/api/rpc/simulator.placeOrder", order)
        if answer["order"]["status"] != "filled":
            raise RuntimeError(f"the demo did not fill an order: {answer}")
    finally:
        service.terminate()
        code = service.wait(30)
    if code != 0:
        raise RuntimeError(f"the demo exited with {code}: {log.read_text()[-2000:]}")
    _run(program, "--version")
    print("The wheel with its locked dependencies starts, fills an order and exits cleanly.")


def _post(url: str, body: object) -> Any:
    # The service's own address on this machine.
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})  # noqa: S310
    with urllib.request.urlopen(request, timeout=30) as response:  # noqa: S310
        return json.loads(response.read())


def _run(*command: str | Path) -> None:
    subprocess.run(command, check=True)  # noqa: S603 - our own commands and paths


if __name__ == "__main__":
    sys.exit(main())
