"""The wire as seen by the public oRPC client: the real npm package against the dispatcher."""

from collections.abc import Awaitable, Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from support.orpc import installed_client, run_client
from support.served import AppClient

pytestmark = pytest.mark.processes

ServiceFactory = Callable[..., Awaitable[AppClient]]
Answers = list[dict[str, Any]]

OUTPUT: dict[str, object] = {"window": "7d", "text": None, "items": [], "maxValue": 1.5}
LINKS = ["single", "buffered", "streaming"]


@pytest.fixture(scope="session")
def orpc_client() -> Path:
    return installed_client()


async def run(script: Path, client: AppClient, *groups: dict[str, Any]) -> list[dict[str, Any]]:
    return await run_client(script, str(client.make_url("/api/rpc")), *groups)


def call(name: str, *inputs: object) -> dict[str, object]:
    return {"path": ["demo", name], **({"input": inputs[0]} if inputs else {})}


async def test_outputs_arrive_complete(orpc_client: Path, client: AppClient) -> None:
    calls = [call("echo"), call("echo", {}), call("echo", {"text": "é😀", "window": "24h"}), call("list", {})]
    expected = [OUTPUT, OUTPUT, OUTPUT | {"text": "é😀", "window": "24h"}, [{"value": 1.5}]]
    nested = await run(orpc_client, client, *({"link": link, "calls": calls} for link in LINKS))
    flat = await run(orpc_client, client, *({"link": link, "flat": True, "calls": calls[1:]} for link in LINKS))
    for link, by_path, by_name in zip(LINKS, nested, flat, strict=True):
        assert [answer["output"] for answer in by_path["answers"]] == expected
        assert [answer["output"] for answer in by_name["answers"]] == expected[1:]
        if link == "single":
            assert by_path["requests"][0] == "/api/rpc/demo/echo"
            assert by_name["requests"][0] == "/api/rpc/demo.echo"
        else:
            assert by_path["requests"] == ["/api/rpc/demo/echo/__batch__"]
            assert by_name["requests"] == ["/api/rpc/demo.echo/__batch__"]


async def test_errors_arrive_with_their_code_and_status(orpc_client: Path, client: AppClient) -> None:
    calls = [
        call("echo", {"window": "90d", "foo": 1}),
        call("raise", {"error": "not found"}),
        call("raise", {"error": "unavailable"}),
        call("raise", {"error": "bug"}),
        call("raise", {"error": "precondition"}),
        call("nothing", {}),
        call("echo", None),
        call("echo", {}),
    ]
    forms = [{"link": link, "flat": flat, "calls": calls} for link, flat in product(LINKS, (False, True))]
    for group in await run(orpc_client, client, *forms):
        *failed, fine = group["answers"]
        errors = [answer["error"] for answer in failed]
        assert fine["output"] == OUTPUT
        assert [(error["kind"], error["code"], error["status"], error["defined"]) for error in errors] == [
            ("ORPCError", "VALIDATION_ERROR", 400, False),
            ("ORPCError", "NOT_FOUND", 404, False),
            ("ORPCError", "SERVICE_UNAVAILABLE", 503, False),
            ("ORPCError", "INTERNAL_SERVER_ERROR", 500, False),
            ("ORPCError", "PRECONDITION_FAILED", 412, False),
            ("ORPCError", "NOT_FOUND", 404, False),
            ("ORPCError", "VALIDATION_ERROR", 400, False),
        ]
        assert [issue["path"] for issue in errors[0]["data"]["issues"]] == [["foo"], ["window"]]
        assert errors[1]["message"] == "no order 7"
        assert errors[3]["message"] == "Internal server error"


async def test_a_streamed_batch_resolves_calls_one_by_one(orpc_client: Path, client: AppClient) -> None:
    calls = [call("wait", {}), call("open", {})]
    (group,) = await run(orpc_client, client, {"link": "streaming", "calls": calls})
    assert [answer["output"] for answer in group["answers"]] == [{"value": 4}, {"value": 5}]


async def test_more_calls_than_a_batch_holds_are_split_by_the_client(orpc_client: Path, client: AppClient) -> None:
    calls = [call("echo", {"text": str(number)}) for number in range(25)]
    for group in await run(
        orpc_client, client, *({"link": link, "calls": calls} for link in ("buffered", "streaming"))
    ):
        assert [answer["output"]["text"] for answer in group["answers"]] == [str(number) for number in range(25)]
        assert 1 < len(group["requests"]) < 25


async def test_the_token_reaches_the_guard(orpc_client: Path, make_service: ServiceFactory) -> None:
    client = await make_service(API_TOKEN="open-sesame-0123456789")
    calls = [call("change", {}), call("change", {})]
    headers = {"authorization": "Bearer open-sesame-0123456789"}
    without = await run(orpc_client, client, *({"link": link, "calls": calls} for link in LINKS))
    within = await run(orpc_client, client, *({"link": link, "headers": headers, "calls": calls} for link in LINKS))
    for group in without:
        assert [answer["error"]["code"] for answer in group["answers"]] == ["UNAUTHORIZED"] * 2
    for group in within:
        assert [answer["output"] for answer in group["answers"]] == [{"value": 2}] * 2


async def test_only_a_body_over_the_limit_is_too_large(orpc_client: Path, client: AppClient) -> None:
    (group,) = await run(
        orpc_client, client, {"link": "single", "calls": [call("echo", {"text": "x" * n}) for n in (60_000, 2**16)]}
    )
    fine, refused = group["answers"]
    assert len(fine["output"]["text"]) == 60_000
    assert (refused["error"]["code"], refused["error"]["status"]) == ("PAYLOAD_TOO_LARGE", 413)
