"""The exams that a service shows."""

from http import HTTPStatus
from pathlib import Path

from aiohttp import web
from pytest_aiohttp.plugin import AiohttpClient
from support.scripted import make_settings

from trader.exam.served_exams import routes

CARD = '{"card": "trader-exam-1", "result": {"states": 20, "planned": 30, "entrants": [{"entrant": "<apex>"}]}}'


def add(folder: Path, name: str, card: str = CARD) -> None:
    (folder / name).mkdir()
    (folder / name / "card.json").write_text(card)
    (folder / name / "report.html").write_text(f"<h1>{name}</h1>")


async def test_exams_with_a_report_are_listed_and_shown(aiohttp_client: AiohttpClient, tmp_path: Path) -> None:
    add(tmp_path, "first & best")
    add(tmp_path, "of a season", '{"season": {}}')
    add(tmp_path, "damaged", "{")
    (tmp_path / "secret").write_text("of another exam")
    app = web.Application()
    app.add_routes(routes(make_settings(EXAMS=str(tmp_path))))
    client = await aiohttp_client(app)
    listed = await client.get("/exams")
    text = await listed.text()
    assert '<a href="/exams/first%20%26%20best">first &amp; best</a>' in text
    assert "&lt;apex&gt;" in text
    assert "20 of 30" in text
    assert text.count("<a ") == 1
    report = await client.get("/exams/first%20%26%20best")
    assert await report.text() == "<h1>first & best</h1>"
    for answer in (listed, report):
        assert answer.content_type == "text/html"
        assert "default-src 'none'" in answer.headers["Content-Security-Policy"], "nothing runs, whoever wrote it"
    for name in ("damaged", "of%20a%20season", "secret", "..", "%2e%2e%2fsecret", "first%20%26%20best%2fcard.json"):
        assert (await client.get(f"/exams/{name}")).status == HTTPStatus.NOT_FOUND, name


def test_a_service_without_the_setting_has_no_exams() -> None:
    assert routes(make_settings()) == []
