"""The page at `/` and its files: compressed, cached by browsers, without inline code; and refusals with PUBLIC=on."""

import gzip
import hashlib
import io
import re
from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path

import pytest
from PIL import Image
from support.process import ServiceProcess, serving

from trader.api.dashboard import assets, page, preview
from trader.portfolio.run_statistics import WindowStart
from trader.portfolio.snapshots import Curves
from trader.settings.settings import Settings

pytestmark = pytest.mark.processes

BYTES_MAX = 165_000
GZIP = {"Accept-Encoding": "gzip"}


@pytest.mark.asyncio(loop_scope="session")
async def test_the_page_is_small_compressed_and_cached(service: ServiceProcess) -> None:
    async with service.http.get(f"{service.url}/", headers=GZIP, auto_decompress=False) as response:
        body = await response.read()
        assert response.headers["Content-Encoding"] == "gzip"
        assert "'unsafe-inline'" not in response.headers["Content-Security-Policy"]
        etag = response.headers["ETag"]
    html = gzip.decompress(body).decode()
    assert not re.search(r"<script(?![^>]*\bsrc=)|<style|\son\w+=|\sstyle=", html), "nothing inline"
    info = await service.call("analytics.getRunInfo")
    assert f'data-models="{info["models"]}" data-run="{info["runStartTime"]}"' in html, "what its curves depend on"
    paths = set(re.findall(r'(?:href|src)="(/assets/[^"]+)"', html))
    total = len(body)
    for path in paths | {f"{assets.FOLDER}/vendor/inter.woff2"}:  # the first view; the chart of candles comes later
        async with service.http.get(service.url + path, headers=GZIP, auto_decompress=False) as response:
            assert response.status == 200, path
            assert "immutable" in response.headers["Cache-Control"]
            assert ("Content-Encoding" in response.headers) is not path.endswith(".woff2")
            total += len(await response.read())
    assert total <= BYTES_MAX
    assert not [path for path in paths if "/report" in path], "the scripts of reports are not of the page"
    for path, headers in (("/", {"If-None-Match": etag}), ("/", {"If-None-Match": f'"x", {etag}'})):
        async with service.http.get(service.url + path, headers=headers) as response:
            assert (response.status, await response.read()) == (304, b"")
    async with service.http.head(f"{service.url}/") as response:
        assert response.status == 200
    assert (await service.get("/assets/another-version/app.js"))[0] == 404
    imported = {name for name in assets.FILES if name.endswith(".js") and "/" not in name}
    for name in imported:
        for names in re.findall(r"from '\./([^']+)'", assets.text_of(name)):
            assert names in assets.FILES, (name, names)
    assert service.traceback() == ""


@pytest.mark.asyncio(loop_scope="session")
async def test_a_link_to_the_page_has_a_picture_of_the_curves(service: ServiceProcess) -> None:
    async with service.http.get(f"{service.url}/") as response:
        properties = dict(re.findall(r'<meta property="og:([^"]+)" content="([^"]*)">', await response.text()))
    models = (await service.call("analytics.getRunInfo"))["models"]
    assert properties["title"] == f"{models} models trade perpetuals on paper"
    assert properties["image"] == "/preview.png", "the system has chosen the port"
    async with service.http.get(service.url + properties["image"]) as response:
        assert (response.status, response.content_type) == (200, "image/png")
        image = Image.open(io.BytesIO(await response.read()))
        etag = response.headers["ETag"]
    assert image.size == preview.SIZE == (int(properties["image:width"]), int(properties["image:height"]))
    async with service.http.get(f"{service.url}/preview.png", headers={"If-None-Match": etag}) as response:
        assert response.status == 304, "it is made once in ten minutes"
    settings = Settings.load({"SERVER_URL": "https://arena.example.org"}, None, demo=True)
    assert b'<meta property="og:image" content="https://arena.example.org/preview.png">' in page.render(settings).body


def test_the_picture_has_each_curve_where_its_values_are() -> None:
    curves = [
        preview.Curve("up", "#00ff00", [0, 50, 100]),
        preview.Curve("down", "#ff0000", [0, None, -100]),
        preview.Curve("late", "#0000ff", [None, 20, 50]),
    ]
    at = datetime(2026, 3, 4, tzinfo=UTC)
    image = Image.open(io.BytesIO(preview.draw(curves, "3 models trade on paper", at, at)))
    left, top, right, bottom = preview.PLOT
    middle, center = (top + bottom) // 2, (left + right) // 2
    expected = {
        (right - 2, top + 1): (0, 255, 0),
        (right - 2, bottom - 1): (255, 0, 0),
        ((left + center) // 2, middle - (bottom - top) // 8): (0, 255, 0),
        (center, (middle + bottom) // 2): (255, 0, 0),
        (right - 2, middle - (bottom - top) // 4): (0, 0, 255),
    }
    assert {place: image.getpixel(place) for place in expected} == expected
    names = {image.getpixel((x, y)) for x in range(right + 20, preview.SIZE[0]) for y in range(top, top + 100)}
    assert {(0, 255, 0), (255, 0, 0), (0, 0, 255)} <= names


def test_a_line_of_the_picture_is_of_the_current_run_and_has_a_name_that_can_be_written() -> None:
    record = '{"id":"%s","name":"%s","variant":"Apex","values":%s}'
    rows = [("a", "Ünïted", "[null,110,150]"), ("b", "模型", "[90,50,25]"), ("c", "none", "[null,null,null]")]
    at = [datetime(2026, 3, 4, hour, tzinfo=UTC) for hour in range(3)]
    found = Curves(at, "1h", [(record % row).encode() for row in rows])
    starts = {"a": WindowStart(at[0], Decimal(100)), "b": WindowStart(at[1], Decimal(50))}  # by a reset
    curves = preview.curves_of(found, starts, {"a": "#123456"})
    assert [(curve.name, curve.returns) for curve in curves] == [("Ünïted", [None, 10, 50]), ("b", [None, 0, -50])]
    assert curves[0].color == "#123456"


def test_vendored_files_match_the_list() -> None:
    listed = re.findall(r"^([0-9a-f]{64})  (\S+)$", assets.text_of("vendor/LICENSES.txt"), re.MULTILINE)
    files = {name: body for name, body in assets.FILES.items() if name.startswith("vendor/")}
    assert {f"vendor/{name}": digest for digest, name in listed} == {
        name: hashlib.sha256(body).hexdigest() for name, body in files.items() if not name.endswith("LICENSES.txt")
    }


async def test_without_the_dashboard_the_root_lists_addresses(tmp_path: Path, dsn: str) -> None:
    async with serving(tmp_path, DATABASE_URL=dsn, DASHBOARD="off") as service:
        status, places = await service.get("/")
        assert (status, places["reference"]) == (200, "/api/docs")
        async with service.http.get(service.url + places["reference"]) as response:
            assert response.status == 200


CHANGES = ("simulator.placeOrder", "simulator.cancelOrder", "simulator.resetAccount")
INPUTS = {
    "simulator.placeOrder": {"symbol": "BTC", "side": "buy", "quantity": 0.01},
    "simulator.cancelOrder": {"orderId": "x"},
    "models.getConversation": {"invocationId": "00000000-0000-5000-8000-000000000000"},
}


@pytest.mark.parametrize("token", ["", "secret-token"])
async def test_a_public_service_is_read_only_without_a_token(tmp_path: Path, dsn: str, token: str) -> None:
    async with serving(tmp_path, DATABASE_URL=dsn, PUBLIC="on", API_TOKEN=token) as service:
        for name in (*CHANGES, "models.getConversation"):
            for path, body in ((name, INPUTS.get(name, {})), (name.replace(".", "/"), {"json": INPUTS.get(name, {})})):
                async with service.http.post(f"{service.url}/api/rpc/{path}", json=body) as response:
                    assert response.status == (401 if token else 403), path
        assert (await service.try_call("simulator.getAccount"))[0] == 200
        for run in (await service.call("models.getInvocations"))["conversations"]:
            assert "responsePayload" not in run
        if token:
            headers = {"Authorization": f"Bearer {token}"}
            url = f"{service.url}/api/rpc/simulator.placeOrder"
            async with service.http.post(url, json=INPUTS["simulator.placeOrder"], headers=headers) as response:
                assert response.status == 200
