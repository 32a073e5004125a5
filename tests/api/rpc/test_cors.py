from collections.abc import Awaitable, Callable

import pytest
from support.served import AppClient

from trader.api.origins import OriginRule, origin_of
from trader.settings.settings import Settings

ServiceFactory = Callable[..., Awaitable[AppClient]]

LISTED = "https://app.example"
LOCAL_PAGE = "http://localhost:3000"
PREFLIGHT = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "content-type,x-orpc-batch"}
PATHS = [
    "/api/rpc/demo.echo",
    "/api/rpc/demo/echo",
    "/api/rpc/none",
    "/api/rpc/demo/echo/__batch__",
    "/api/events/positions",
    "/api/nothing",
    "/health",
    "/health/schedulers",
]


@pytest.fixture
async def service(make_service: ServiceFactory) -> AppClient:
    return await make_service(CORS_ORIGINS=f"{LISTED}/,http://localhost:3000", SERVER_URL="https://api.example:8443/x")


@pytest.mark.parametrize("path", PATHS)
async def test_a_listed_origin_may_send_requests_and_read_responses(service: AppClient, path: str) -> None:
    async with service.options(path, headers={"Origin": LISTED, **PREFLIGHT}) as response:
        assert response.status == 200
        assert response.headers["Access-Control-Allow-Origin"] == LISTED
        assert response.headers["Access-Control-Allow-Methods"] == "POST"
        allowed = response.headers["Access-Control-Allow-Headers"].lower().split(",")
        assert set(allowed) == {"content-type", "x-orpc-batch"}
        assert "Origin" in response.headers["Vary"]
    for method in ("GET", "POST"):
        async with service.request(method, path, headers={"Origin": LISTED}) as response:
            assert response.headers["Access-Control-Allow-Origin"] == LISTED
            assert "Origin" in response.headers["Vary"]
            assert response.headers["X-Request-Id"]


@pytest.mark.parametrize("header", ["accept", "cache-control", "Cache-Control, Accept"])
async def test_a_listed_origin_may_send_the_headers_of_stream_readers(service: AppClient, header: str) -> None:
    asked = {"Access-Control-Request-Method": "GET", "Access-Control-Request-Headers": header}
    async with service.options("/api/events/positions", headers={"Origin": LISTED, **asked}) as response:
        assert response.status == 200
        allowed = set(response.headers["Access-Control-Allow-Headers"].lower().split(","))
        assert allowed == set(header.lower().replace(" ", "").split(","))


@pytest.mark.parametrize(
    "origin", ["https://evil.example", "null", "https://APP.example", f"{LISTED}/", f"{LISTED}:443", ""]
)
@pytest.mark.parametrize("path", PATHS)
async def test_any_other_origin_gets_no_headers(service: AppClient, path: str, origin: str) -> None:
    for method in ("OPTIONS", "GET", "POST"):
        async with service.request(method, path, headers={"Origin": origin, **PREFLIGHT}) as response:
            assert not [name for name in response.headers if name.startswith("Access-Control")]
            assert "Origin" in response.headers["Vary"]


@pytest.mark.parametrize(
    "asked",
    [
        {"Access-Control-Request-Method": "DELETE"},
        {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "content-type,x-evil"},
        {},
    ],
)
async def test_a_preflight_for_more_than_is_allowed_is_refused(service: AppClient, asked: dict[str, str]) -> None:
    async with service.options("/api/rpc/demo.echo", headers={"Origin": LISTED, **asked}) as response:
        assert response.status == 403
        assert (await response.json())["error"].startswith("CORS preflight request failed: ")
        assert not [name for name in response.headers if name.startswith("Access-Control")]


async def test_paths_elsewhere_have_no_cross_origin_answers(service: AppClient) -> None:
    async with service.get("/elsewhere", headers={"Origin": LISTED}) as response:
        assert response.status == 200
        assert "Access-Control-Allow-Origin" not in response.headers
    async with service.options("/nowhere", headers={"Origin": LISTED, **PREFLIGHT}) as response:
        assert response.status == 404
    async with service.options("/elsewhere", headers={"Origin": LISTED, **PREFLIGHT}) as response:
        assert response.status == 405
        assert not [name for name in response.headers if name.startswith("Access-Control")]


async def test_a_post_from_a_foreign_origin_does_nothing(service: AppClient) -> None:
    for origin in ("https://evil.example", "null", "https://api.example", "https://api.example:8443/x", "file://", ""):
        for path, inner in (("/api/rpc/demo.echo", False), ("/api/rpc/demo/echo", True)):
            async with service.post(path, headers={"Origin": origin}) as response:
                assert response.status == 403
                answer = await response.json()
                assert (answer["json"] if inner else answer)["code"] == "FORBIDDEN"


@pytest.mark.parametrize("site", ["cross-site", "same-site"])
async def test_a_form_of_another_origin_changes_nothing(service: AppClient, site: str) -> None:
    link = {"Sec-Fetch-Mode": "navigate", "Sec-Fetch-Dest": "document"}
    for path in ("/api/rpc/demo.echo", "/api/rpc/demo/echo"):
        for said, status in ((site, 403), ("same-origin", 200), ("none", 200)):
            async with service.post(path, data="{}", headers={**link, "Sec-Fetch-Site": said}) as response:
                assert response.status == status


async def test_the_host_header_makes_no_origin_same_origin(service: AppClient) -> None:
    headers = {"Origin": "http://rebound.example", "Host": "rebound.example"}
    async with service.post("/api/rpc/demo.echo", headers=headers) as response:
        assert response.status == 421


async def test_listed_and_own_origins_may_post(make_service: ServiceFactory) -> None:
    client = await make_service(CORS_ORIGINS=LISTED, SERVER_URL="https://api.example:8443/x", PORT="0")
    own = [f"http://localhost:{client.port}", f"http://127.0.0.1:{client.port}", "https://api.example:8443"]
    for origin in (LISTED, *own):
        async with client.post("/api/rpc/demo.echo", headers={"Origin": origin}) as response:
            assert response.status == 200
    async with client.post(
        "/api/rpc/demo.echo", headers={"Origin": f"http://localhost:{(client.port or 0) + 1}"}
    ) as response:
        assert response.status == 403


@pytest.mark.parametrize(("demo", "origins", "allowed", "credentials"), [
    (False, None, False, False), (True, None, True, False), (True, "none", False, False),
    (False, LOCAL_PAGE, True, True), (True, LOCAL_PAGE, True, True),
])  # fmt: skip
@pytest.mark.parametrize("path", PATHS)
async def test_only_a_demo_allows_an_origin_by_default_and_without_credentials(
    make_service: ServiceFactory, path: str, *, demo: bool, origins: str | None, allowed: bool, credentials: bool
) -> None:
    environ = {"OPENAI_API_KEY": "x" * 20} | ({} if origins is None else {"CORS_ORIGINS": origins})
    client = await make_service(demo=demo, **environ)
    for method in ("OPTIONS", "GET", "POST"):
        async with client.request(method, path, headers={"Origin": LOCAL_PAGE, **PREFLIGHT}) as response:
            assert ("Access-Control-Allow-Origin" in response.headers) is allowed
            assert ("Access-Control-Allow-Credentials" in response.headers) is credentials
    async with client.post("/api/rpc/demo.echo", headers={"Origin": LOCAL_PAGE}) as response:
        assert response.status == (200 if allowed else 403)


async def test_two_origins_must_both_be_allowed(service: AppClient) -> None:
    headers = [("Origin", LISTED), ("Origin", "https://evil.example")]
    async with service.post("/api/rpc/demo.echo", headers=headers) as response:
        assert response.status == 403


def test_the_default_port_is_not_part_of_an_origin() -> None:
    rule = OriginRule(Settings.load({"CORS_ORIGINS": "none"}, None, demo=True))
    assert rule.allows(["http://localhost"], 80)
    assert not rule.allows(["http://localhost:80"], 80)
    assert rule.allows(["http://127.0.0.1:8081"], 8081)
    assert not rule.allows(["https://localhost:8081"], 8081)


@pytest.mark.parametrize(
    ("address", "origin"),
    [
        ("https://API.Example/path?x", "https://api.example"),
        ("https://api.example:443", "https://api.example"),
        ("http://api.example:443", "http://api.example:443"),
        ("http://[::1]:8081/", "http://[::1]:8081"),
        ("nothing", None),
    ],
)
def test_the_origin_of_an_address(address: str, origin: str | None) -> None:
    assert origin_of(address) == origin


@pytest.mark.parametrize("path", ["/api/events/positions", "/health"])
async def test_a_foreign_origin_opens_no_stream_and_reads_no_document(service: AppClient, path: str) -> None:
    async with service.get(path, headers={"Origin": "https://evil.example"}) as response:
        assert response.status == 403
        assert "CORS_ORIGINS" in (await response.json())["error"]


async def test_a_refused_origin_is_logged_once(service: AppClient, caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(3):
        async with service.post("/api/rpc/demo.echo", headers={"Origin": "https://evil.example"}) as response:
            assert response.status == 403
    assert [m for m in caplog.messages if "evil" in m] == [
        "refused the origin 'https://evil.example'; CORS_ORIGINS lists the allowed ones"
    ]


HOSTS = ["localhost", "LOCALHOST:9", "127.0.0.1:8081", "127.9.9.9", "[::1]:1", "api.example", "one.example:80"]


@pytest.mark.parametrize("host", HOSTS)
async def test_the_names_of_the_service_are_served(make_service: ServiceFactory, host: str) -> None:
    client = await make_service(SERVER_URL="https://api.example:8443/x", ALLOWED_HOSTS="one.example, 10.0.0.7")
    for method, path in (("POST", "/api/rpc/demo.echo"), ("GET", "/health")):
        async with client.request(method, path, headers={"Host": host}) as response:
            assert response.status == 200


@pytest.mark.parametrize("host", ["evil.example", "localhost.evil.example", "10.0.0.8", "[::1", ""])
async def test_another_host_is_misdirected_and_logged_once(
    make_service: ServiceFactory, caplog: pytest.LogCaptureFixture, host: str
) -> None:
    client = await make_service(ALLOWED_HOSTS="10.0.0.7")
    for method, path in (("POST", "/api/rpc/demo.echo"), ("GET", "/api/events/positions"), ("GET", "/nothing")):
        async with client.request(method, path, headers={"Host": host}) as response:
            assert response.status == 421
            assert "ALLOWED_HOSTS" in (await response.json())["error"]
    assert len([message for message in caplog.messages if message.startswith("refused the host")]) == 1


async def test_the_server_names_no_version(service: AppClient) -> None:
    async with service.get("/health") as response:
        assert response.headers["Server"] == "trader"
