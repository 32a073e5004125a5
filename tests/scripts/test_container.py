"""The container, built by buildah and run as documented, on a read-only root; units of systemd and podman."""

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
import tomllib
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from support.process import ROOT

CONTAINER = ROOT / "scripts" / "packaging" / "container"
BASE = "localhost/trader-test-base"
IMAGE = "localhost/trader-test"
PACKAGES = ("python3-venv", "passwd", "coreutils", "dash", "bash", "ca-certificates", "netbase", "libstdc++6")
"""Debian packages of the base image: with their dependencies, they amount to what python:slim has."""

ON_READ_ONLY_ROOT = """
set -e
mount --bind "$1" "$1"
mount -o remount,bind,ro "$1"
mount -t proc proc "$1/proc"
mount --bind /dev "$1/dev"
mount -t tmpfs tmpfs "$1/tmp"
mount --bind "$2" "$1/var/lib/trader"
cd /
exec chroot --userspec="$3" --groups= "$1" /bin/sh -c 'cd /var/lib/trader && exec /opt/trader/bin/trader --demo=fresh'
"""
"""What a runtime does for `--read-only` and a volume; real runtimes need more than a test machine may allow."""


def run(*command: str | Path) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 0, f"{command}: {done.stdout[-3000:]}{done.stderr[-3000:]}"
    return done.stdout


def make_base(root: Path) -> None:
    """Create a root file system from this machine's packages, since no registry may be within reach."""
    options = ["conflicts", "breaks", "replaces", "enhances", "recommends", "suggests"]
    listed = run(
        "apt-cache", "depends", "--recurse", "--installed", *(f"--no-{option}" for option in options), *PACKAGES
    )
    packages = {line for line in listed.splitlines() if re.match("[a-z0-9]", line)}
    listing = subprocess.run(["dpkg", "-L", *packages], capture_output=True, text=True, check=False).stdout
    paths = [Path(line) for line in dict.fromkeys(listing.splitlines()) if line.startswith("/")]
    unneeded = ("doc", "info", "locale", "man")
    files = [path for path in paths if path.is_symlink() or path.is_file()]
    files = [path for path in files if path.parts[1:3] != ("usr", "share") or path.parts[3] not in unneeded]
    for folder in ("bin", "sbin", "lib", "lib64"):
        (root / "usr" / folder).mkdir(parents=True)
        (root / folder).symlink_to(f"usr/{folder}")
    names = "\n".join(str(path.relative_to("/")) for path in files)
    packed = subprocess.run(
        ["tar", "-C", "/", "-cf", "-", "-T", "-"], input=names.encode(), capture_output=True, check=True
    )
    subprocess.run(["tar", "-C", root, "--keep-directory-symlink", "-xf", "-"], input=packed.stdout, check=True)
    (root / "usr" / "bin" / "python").symlink_to("python3")
    for name in ("passwd", "group", "pip.conf"):
        if (Path("/etc") / name).exists():
            shutil.copy(Path("/etc") / name, root / "etc" / name)
    shutil.copytree("/etc/ssl", root / "etc" / "ssl", dirs_exist_ok=True, symlinks=True)
    for folder in ("tmp", "var/tmp", "var/lib", "proc", "dev", "sys", "run"):
        (root / folder).mkdir(parents=True, exist_ok=True)
    (root / "tmp").chmod(0o1777)


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    """The configuration of the built image."""
    if os.environ.get("TRADER_TEST_RELEASE") != "on":
        pytest.skip("building the container takes minutes: TRADER_TEST_RELEASE=on")
    if os.geteuid() != 0 or any(shutil.which(tool) is None for tool in ("buildah", "dpkg", "apt-cache", "unshare")):
        pytest.skip("needs root, buildah, and the packages of Debian")
    base = tmp_path_factory.mktemp("base") / "root"
    make_base(base)
    container = run("buildah", "from", "scratch").strip()
    run("buildah", "copy", "--quiet", container, base, "/")
    run("buildah", "config", "--env", "PATH=/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin", container)
    run("buildah", "commit", "--quiet", container, BASE)
    run("buildah", "rm", container)
    run(
        "buildah",
        "build",
        "--isolation",
        "chroot",
        "--format",
        "docker",
        "--build-arg",
        f"PYTHON={BASE}",
        "-t",
        IMAGE,
        ".",
    )
    try:
        yield dict(json.loads(run("buildah", "inspect", "--type", "image", IMAGE))["Docker"]["config"])
    finally:
        run("buildah", "rmi", "--force", IMAGE, BASE)


@pytest.mark.processes
def test_the_image_uses_an_unprivileged_user_and_one_volume(image: dict[str, Any]) -> None:
    assert image["User"] == "trader"
    assert list(image["Volumes"]) == ["/var/lib/trader"]
    assert image["WorkingDir"] == "/var/lib/trader"
    assert image["Entrypoint"] == ["/opt/trader/bin/trader"]
    assert "/health/live" in " ".join(image["Healthcheck"]["Test"])


@pytest.mark.processes
def test_the_demo_trades_on_a_read_only_root_without_privileges(image: dict[str, Any], tmp_path: Path) -> None:
    container = run("buildah", "from", "--pull-never", IMAGE).strip()
    root = Path(run("buildah", "mount", container).strip())
    try:
        (user,) = [line for line in (root / "etc/passwd").read_text().splitlines() if line.startswith("trader:")]
        uid, gid = user.split(":")[2:4]
        assert int(uid) >= 1000
        assert not list(root.glob("opt/trader/lib/python3*/site-packages/pip*")), "nothing is installed there anymore"
        volume = tmp_path / "volume"
        volume.mkdir()
        os.chown(volume, int(uid), int(gid))
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        environ = dict(setting.split("=", 1) for setting in image["Env"]) | {"PORT": str(port), "HOST": "127.0.0.1"}
        command = ["unshare", "--mount", "sh", "-c", ON_READ_ONLY_ROOT, "sh", str(root), str(volume), f"{uid}:{gid}"]
        log = tmp_path / "log"
        with log.open("wb") as file:
            service = subprocess.Popen(command, env=environ, stderr=file)
        try:
            assert place_order(service, port, log)["order"]["status"] == "filled"
            status = Path(f"/proc/{service.pid}/status").read_text()
            assert re.search(r"^Uid:\t(\d+)\t\1", status, re.MULTILINE)[1] == uid  # type: ignore[index]
        finally:
            service.send_signal(signal.SIGTERM)
            assert service.wait(60) == 0, log.read_text()
        assert (volume / ".trader/postgres/data/PG_VERSION").exists()
    finally:
        run("buildah", "umount", container)
        run("buildah", "rm", container)


def place_order(service: "subprocess.Popen[bytes]", port: int, log: Path) -> Any:
    order = {"accountId": "me", "symbol": "BTC", "side": "buy", "quantity": 0.01}
    url = f"http://127.0.0.1:{port}/api/rpc/simulator.placeOrder"
    request = urllib.request.Request(url, json.dumps(order).encode(), {"Content-Type": "application/json"})
    for _ in range(600):
        assert service.poll() is None, log.read_text()
        try:
            with urllib.request.urlopen(request, timeout=30) as response:
                return json.loads(response.read())
        except urllib.error.URLError:
            time.sleep(0.2)  # it is still starting
    raise AssertionError(log.read_text())


def options(text: str, *names: str) -> Sequence[str]:
    return [line for line in text.splitlines() if line.partition("=")[0].strip() in names]


def test_the_unit_for_podman_and_the_compose_file_agree() -> None:
    unit = (CONTAINER / "trader.container").read_text(encoding="utf-8")
    for line in (
        "ReadOnly=true", "DropCapability=all", "NoNewPrivileges=true", "PublishPort=127.0.0.1:8081:8081",
        "Volume=trader:/var/lib/trader", "Tmpfs=/tmp",
    ):  # fmt: skip
        assert line in unit.splitlines(), line
    assert len(options(unit, "Volume")) == 2, "one for data, one for settings"
    compose = (CONTAINER / "compose.yml").read_text(encoding="utf-8")
    for part in (
        "read_only: true", "cap_drop: [ALL]", "no-new-privileges", '"127.0.0.1:8081:8081"', "trader:/var/lib/trader",
        "tmpfs: [/tmp]", "dockerfile: Containerfile",
    ):  # fmt: skip
        assert part in compose, part
    containerfile = (ROOT / "Containerfile").read_text(encoding="utf-8")
    assert "-p 127.0.0.1:8081:8081" in containerfile
    assert "requirements.lock" in containerfile
    assert tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dynamic"] == ["version"]


@contextmanager
def composed(folder: Path, code: str) -> Iterator[subprocess.Popen[str]]:
    """The entry point of the compose file, with a program that ends by a code or, without one, by a signal."""
    compose = (CONTAINER / "compose.yml").read_text(encoding="utf-8")
    assert "restart: unless-stopped" in compose, "it starts after a reboot"
    script = compose.partition("      - |\n")[2].partition("      - trader\n")[0].replace("$$", "$")
    program = folder / "trader"
    program.write_text(
        "#!/bin/sh\ntrap 'sleep 0.2; echo ended; exit 0' TERM\necho began\n"
        '[ -z "$CODE" ] || exit "$CODE"\nwhile :; do sleep 0.05; done\n',
        encoding="utf-8",
    )
    program.chmod(0o755)
    command = ["/bin/sh", "-c", script.replace("/opt/trader/bin/trader", str(program)), "trader"]
    process = subprocess.Popen(
        command, env={**os.environ, "CODE": code}, stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "began\n"
    try:
        yield process
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def test_a_container_of_compose_ends_with_the_service_and_starts_again(tmp_path: Path) -> None:
    with composed(tmp_path, "1") as process:
        assert process.wait(30) == 1


def test_a_container_of_compose_passes_a_stop_on_and_waits_for_its_end(tmp_path: Path) -> None:
    with composed(tmp_path, "") as process:
        process.terminate()
        out, _ = process.communicate(timeout=30)
        assert (process.returncode, out) == (0, "ended\n")


def test_a_container_of_compose_does_not_start_again_on_wrong_settings(tmp_path: Path) -> None:
    with composed(tmp_path, "2") as process:
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(2)
        process.terminate()
        assert process.wait(30) == 2


def test_systemd_accepts_the_unit(tmp_path: Path) -> None:
    if shutil.which("systemd-analyze") is None:
        pytest.skip("needs systemd-analyze")
    unit = (ROOT / "scripts" / "packaging" / "trader.service").read_text(encoding="utf-8")
    program = "/opt/trader/.venv/bin/python"
    assert program in unit
    (tmp_path / "trader.service").write_text(unit.replace(program, sys.executable), encoding="utf-8")
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", tmp_path / "trader.service"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert not [line for line in done.stderr.splitlines() if "trader.service" in line], (
        "it only warns about unknown names"
    )


def test_quadlet_makes_a_service_of_the_container() -> None:
    quadlet = Path("/usr/libexec/podman/quadlet")
    if not quadlet.exists():
        pytest.skip("needs the quadlet of podman 4.4 or later")
    done = subprocess.run(
        [quadlet, "-dryrun"], env={"QUADLET_UNIT_DIRS": str(CONTAINER)}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "--sdnotify=container" in done.stdout
    assert "-v /etc/trader.env:/run/settings:ro,Z,U" in done.stdout
