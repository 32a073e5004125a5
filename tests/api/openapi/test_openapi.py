"""The OpenAPI document: valid, complete, and true to the wire."""

import re
import subprocess
import sys
from collections.abc import Iterator
from types import SimpleNamespace

import msgspec
import orjson
import pytest
from openapi_spec_validator import OpenAPIV31SpecValidator
from pytest_aiohttp.plugin import AiohttpClient
from support.process import ROOT
from support.served import AppClient, make_app
from support.wire import Document, make_document

from trader.api import openapi, rpc
from trader.api.dashboard import assets
from trader.api.registry import REGISTRY
from trader.settings.settings import Settings

LISTED = "https://app.example"


def make_settings(**environment: str) -> Settings:
    return Settings.load(environment, None, demo=True)


@pytest.fixture(scope="module")
def document() -> Document:
    return make_document()


@pytest.fixture
async def client(aiohttp_client: AiohttpClient) -> AppClient:
    settings = make_settings(CORS_ORIGINS=LISTED)
    context = SimpleNamespace(settings=settings)
    return await aiohttp_client(make_app(openapi.routes(settings), context=context, settings=settings))


def operations(document: Document) -> Iterator[tuple[str, Document]]:
    for path, methods in document["paths"].items():
        for operation in methods.values():
            yield path, operation


@pytest.mark.slow
def test_the_document_is_valid(document: Document) -> None:
    assert [str(error) for error in OpenAPIV31SpecValidator(document).iter_errors()] == []


def test_every_procedure_stream_and_report_is_documented(document: Document) -> None:
    wanted = {f"/api/rpc/{name}" for name in REGISTRY.procedures}
    streams = ("positions", "trades", "conversations", "portfolio", "candles", "workflow")
    wanted |= {f"/api/events/{name}" for name in streams}
    wanted |= {"/health", "/health/schedulers", "/api/health", "/api/health/schedulers"}
    wanted |= {"/metrics", "/api/events", "/api/record"}
    assert document["paths"].keys() == wanted
    assert len(REGISTRY.procedures) >= 18
    ids = [operation["operationId"] for _, operation in operations(document)]
    assert len(set(ids)) == len(ids)


def test_everything_is_described(document: Document) -> None:
    for path, operation in operations(document):
        assert re.fullmatch(r"[A-Z].{12,}", operation["summary"]), path
        for response in operation["responses"].values():
            assert response.get("description") or "$ref" in response, path
    for name, response in document["components"]["responses"].items():
        assert response["description"].strip(), name


def test_each_error_has_its_status_and_code(document: Document) -> None:
    reset = dict(document["paths"]["/api/rpc/simulator.resetAccount"]["post"]["responses"])
    shared = {
        status: reset.pop(status)["content"]["application/json"]["schema"]["properties"]["code"]["enum"]
        for status in ("401", "403")
    }
    assert shared == {
        "401": ["UNAUTHORIZED", "KEY_REVOKED"],
        "403": ["FORBIDDEN", "MISSING_SCOPE", "FOREIGN_ACCOUNT"],
    }
    assert {status: response["$ref"].rpartition("/")[2] for status, response in reset.items() if status != "200"} == {
        "400": "VALIDATION_ERROR",
        "408": "TIMEOUT",
        "412": "PRECONDITION_FAILED",
        "413": "PAYLOAD_TOO_LARGE",
        "500": "INTERNAL_SERVER_ERROR",
        "503": "SERVICE_UNAVAILABLE",
    }
    assert "404" in document["paths"]["/api/rpc/simulator.cancelOrder"]["post"]["responses"]
    assert not {"401", "404", "412"} & document["paths"]["/api/rpc/trading.getTrades"]["post"]["responses"].keys()
    codes = {code for _, code in (*rpc.STATUSES.values(), rpc.INTERNAL, rpc.NOT_SUPPORTED)}
    assert document["components"]["responses"].keys() == codes
    assert all(f"`{code}`" in document["info"]["description"] for code in codes)


def test_only_procedures_with_changes_mention_the_token(document: Document) -> None:
    guarded = {path for path, operation in operations(document) if "security" in operation}
    declared = REGISTRY.procedures
    assert guarded == {f"/api/rpc/{name}" for name in declared if declared[name].changes or declared[name].scope}
    assert document["paths"]["/api/rpc/agent.whoami"]["post"]["security"] == [{"bearer": []}]
    assert "/api/rpc/simulator.placeOrder" in guarded
    place = document["paths"]["/api/rpc/simulator.placeOrder"]["post"]
    assert place["security"] == [{}, {"bearer": []}]
    place = make_document(API_TOKEN="open-sesame-0123456789")["paths"]["/api/rpc/simulator.placeOrder"]["post"]
    assert place["security"] == [{"bearer": []}]
    assert "open-sesame" not in orjson.dumps(place).decode()


def test_the_wire_is_the_one_that_was_read() -> None:
    """Whoever changes the wire reads the difference in the file, which scripts/make_contract writes."""
    contract = ROOT / "trader" / "api" / "reference" / "contract.d.ts"
    made = subprocess.run(
        [sys.executable, "-P", ROOT / "scripts" / "make_contract.py"], capture_output=True, check=True
    )
    assert made.stdout == contract.read_bytes(), f"scripts/make_contract {contract.relative_to(ROOT)}"


def test_null_absence_and_alternatives_are_distinguished(document: Document) -> None:
    schemas = document["components"]["schemas"]
    assert schemas["OverallStats"]["properties"]["sharpeRatio"] == {
        "anyOf": [{"type": "number"}, {"type": "string", "enum": ["N/A", "Infinity"]}]
    }
    assert schemas["LeaderboardRow"]["properties"]["pnlPercent"] == {"type": ["number", "null"]}
    assert "pnlPercent" in schemas["LeaderboardRow"]["required"]
    place = schemas["PlaceOrderInput"]
    assert place["additionalProperties"] is False
    assert place["required"] == ["symbol", "side", "quantity"]
    assert place["properties"]["quantity"] == {"type": "number", "exclusiveMinimum": 0, "maximum": 10**12}
    assert '"format":"decimal"' not in orjson.dumps(document).decode()


def test_the_introduction_states_the_real_limits() -> None:
    text = make_document(SERVER_URL="https://api.example/")["info"]["description"]
    for told in (
        "at most 65,536 bytes",
        "up to 10 calls",
        "at most 50 subscribers",
        "Every 15 seconds",
        "{ url: 'https://api.example/api/rpc' }",
        "curl -s https://api.example/api/rpc/variants.getVariantHistory",
        "| 400 | `VALIDATION_ERROR` |",
    ):
        assert told in text
    assert not re.search(r"\{[a-z_]+\}", text)


def test_no_optional_field_has_a_default_that_generators_take_for_a_promise(document: Document) -> None:
    """openapi-typescript makes a field with a default required, so that `getPositions({modelId})` would not compile."""
    schemas = document["components"]["schemas"]
    fields = [
        (name, field)
        for name, schema in schemas.items()
        for field, content in schema.get("properties", {}).items()
        if "default" in content and field not in schema.get("required", ())
    ]
    assert fields == []
    assert schemas["GetPositionsInput"]["properties"]["variant"]["description"] == "Default: all."


@pytest.mark.parametrize("name", list(openapi.EXAMPLES))
def test_examples_are_inputs(document: Document, name: str) -> None:
    declared = REGISTRY.procedures[name]
    declared.input_decoder.decode(orjson.dumps(openapi.EXAMPLES[name]))
    media = document["paths"][f"/api/rpc/{name}"]["post"]["requestBody"]["content"]["application/json"]
    assert media["example"] == openapi.EXAMPLES[name]


def test_a_body_is_required_if_a_field_is(document: Document) -> None:
    for path, operation in operations(document):
        if not path.startswith(rpc.PREFIX):
            continue
        declared = REGISTRY.procedures[path.removeprefix(rpc.PREFIX)]
        try:
            declared.input_decoder.decode(b"{}")
        except msgspec.ValidationError:
            assert operation["requestBody"]["required"] is True, path
        else:
            assert operation["requestBody"]["required"] is False, path


@pytest.mark.parametrize(
    ("environment", "url"),
    [
        ({"SERVER_URL": "https://api.example/base"}, "https://api.example/base"),
        ({"PORT": "9000"}, "http://localhost:9000"),
        ({"PORT": "0"}, "/"),
    ],
)
def test_the_server_address_comes_from_the_settings(environment: dict[str, str], url: str) -> None:
    assert make_document(**environment)["servers"] == [{"url": url}]


def test_the_metrics_address_is_listed_only_if_enabled() -> None:
    assert "/metrics" in make_document(METRICS="on")["paths"]
    assert "/metrics" not in make_document(METRICS="off")["paths"]


async def test_the_document_is_served(client: AppClient, document: Document) -> None:
    async with client.get("/api/openapi.json", headers={"Origin": LISTED}) as response:
        assert response.status == 200
        assert response.headers["Content-Type"] == "application/json"
        assert response.headers["Access-Control-Allow-Origin"] == LISTED
        assert (await response.json())["paths"] == document["paths"]
    async with client.post("/api/openapi.json") as response:
        assert (response.status, response.headers["Allow"]) == (405, "GET, HEAD")


async def test_the_page_is_served_and_fetches_only_from_the_service(client: AppClient) -> None:
    async with client.get("/api/docs") as response:
        assert (response.status, response.headers["Content-Type"]) == (200, "text/html; charset=utf-8")
        assert "default-src 'none'" in response.headers["Content-Security-Policy"]
        addresses = re.findall(r'(?:src|href)="([^"]+)"', await response.text())
    assert "/api/openapi.json" in addresses
    for address in addresses:
        assert address.startswith((assets.FOLDER, "/api/")), "only files of the service"
        assert address.removeprefix(f"{assets.FOLDER}/") in assets.FILES or address.startswith("/api/"), address
