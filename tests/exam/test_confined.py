"""Someone else's code in an exam finds nothing of the worlds, the exam or its other states, wherever it looks."""

import socket
from pathlib import Path
from threading import Thread

import orjson
import pytest

from trader.__main__ import main
from trader.agents.providers.confinement import can_confine

SPY = """
import builtins, gc, mmap, os, socket, sys
from pathlib import Path

from trader.agents.domain.tools import Holding

SEEN = []


class Spy:
    def __init__(self, exam: str, secret: str, port: int, path: str) -> None:
        self.exam, self.secret, self.port, self.path = exam, secret, port, path

    def decide(self, view):
        found = [name for name in dir(Spy) if name.startswith("by_") and self.finds(name)]
        return Holding(reason=" ".join(found) or "nothing")

    def finds(self, name):
        try:
            return getattr(self, name)()
        except (OSError, ValueError):
            return False

    def by_memory(self):
        names = {type(each).__name__ for each in gc.get_objects()}
        return names & {"World", "Law", "ExamPlan", "ExamState", "WorldPast", "Examinee", "Sitting"}

    def by_modules(self):
        return any(name.startswith(("trader.exam", "trader.backtest")) for name in sys.modules)

    def by_frames(self):
        frame, depth = sys._getframe(), 0
        while frame is not None:
            if any(type(each).__module__.startswith("trader.exam") for each in frame.f_locals.values()):
                return True
            frame = frame.f_back
        return False

    def by_file(self):
        return any((Path(self.exam) / name).exists() for name in ("secret", "exam.json", "sittings.jsonl"))

    def by_parents(self):
        return any("sittings" in name for place in Path(self.exam).parents for name in os.listdir(place))

    def by_processes(self):
        files = [*Path("/proc").glob("[0-9]*/cmdline"), *Path("/proc").glob("[0-9]*/environ")]
        return any(self.secret.encode() in file.read_bytes() for file in files)

    def by_descriptors(self):
        links = [os.readlink(f"/proc/self/fd/{number}") for number in os.listdir("/proc/self/fd")]
        return any(self.exam in link for link in links)

    def by_environment(self):
        return any(word in value for value in os.environ.values() for word in (self.secret, "openai"))

    def by_socket(self):
        with socket.create_connection(("127.0.0.1", self.port), 1):
            return True

    def by_unix_socket(self):
        with socket.socket(socket.AF_UNIX) as near:
            near.connect(self.path)
            return True

    def by_earlier_decisions(self):
        before = bool(SEEN) or hasattr(builtins, "seen")
        builtins.seen = True
        SEEN.append(1)
        return before

    def by_left_files(self):
        places = [Path("/tmp/seen"), Path("/dev/shm/seen"), Path(__file__).with_name("seen"), Path(__file__)]
        before = any(place.exists() for place in places[:-1])
        for place in places:
            try:
                with place.open("a") as file:
                    file.write("#")
            except OSError:
                pass
        return before

    def by_left_processes(self):
        if os.fork() == 0:
            os.setsid()
            with socket.socket(socket.AF_UNIX) as near:
                near.bind("\\0seen")
                near.listen()
                import time
                time.sleep(30)
            os._exit(0)
        return len(list(Path("/proc").glob("[0-9]*"))) > 6
"""


@pytest.mark.skipif(not can_confine(), reason="bubblewrap cannot run here")
def test_code_that_looks_around_finds_nothing_by_any_channel(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "sk-openai")
    (tmp_path / "theirs").mkdir()
    file, out, secret = tmp_path / "theirs" / "spy.py", tmp_path / "exam", "of-this-exam"
    file.write_text(SPY)
    with socket.create_server(("127.0.0.1", 0)) as server, socket.socket(socket.AF_UNIX) as near:
        near.bind(str(tmp_path / "near"))
        near.listen()
        Thread(target=lambda: [server.accept() for _ in range(9)], daemon=True).start()
        params = {"exam": out, "secret": secret, "port": server.getsockname()[1], "path": tmp_path / "near"}
        given = [word for name, value in params.items() for word in ("--param", f"{name}={value}")]
        run = ["exam", "run", "--strategy", f"{file}:Spy", *given, "--workers", "1", "--out", str(out)]
        assert main([*run, "--secret", secret, "--states", "3"]) == 0
    rows = map(orjson.loads, (out / "sittings.jsonl").read_bytes().splitlines())
    said = [row["answer"]["decided"][0]["steps"][0]["calls"][0] for row in rows if row["entrant"] == "spy"]
    assert [call["arguments"] for call in said] == 3 * [{"reason": "nothing"}]
    assert file.read_text() == SPY
    assert main(["exam", "check", str(out)]) == 0
    capsys.readouterr()
    file.write_text(SPY.replace("Spy:", "Spy(:"))
    assert main([*run, "--states", "3"]) == 2
    assert f"{file}:10: " in capsys.readouterr().err
