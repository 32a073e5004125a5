"""Metrics, log and health of the running service, idle connections included."""

import asyncio
import time
from pathlib import Path

import orjson
import pytest
from prometheus_client.parser import text_string_to_metric_families
from support.process import ServiceProcess, serving
from support.waiting import until

pytestmark = pytest.mark.processes

IDLE = 2000


async def figures(service: ServiceProcess) -> dict[tuple[str, tuple[str, ...]], float]:
    async with service.http.get(service.url + "/metrics") as response:
        assert response.status == 200
        text = await response.text()
    return {
        (sample.name, tuple(value for _, value in sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


async def test_orders_are_counted_and_every_request_has_its_line(tmp_path: Path, dsn: str) -> None:
    async with serving(tmp_path, DATABASE_URL=dsn, SIM_LATENCY_MS="0") as service:
        before = await figures(service)
        asked = {"symbol": "BTC", "side": "buy", "quantity": 0.01, "accountId": "by-hand"}
        async with service.http.post(f"{service.url}/api/rpc/simulator.placeOrder", json=asked) as response:
            assert (await response.json())["order"]["status"] == "filled"
            request_id = response.headers["X-Request-Id"]
        after = await figures(service)
        for key in (("trader_orders_total", ("filled",)), ("trader_fills_total", ("taker",))):
            assert after[key] >= before.get(key, 0) + 1
        assert after["trader_request_duration_seconds_count", ("simulator.placeOrder", "200")] == 1
        for name in ("priceTracker", "tradeExecutor", "portfolioSnapshot"):
            assert after["trader_scheduler_running", (name,)] == 1
        assert after["trader_database_connections_max", ()] == 20

        async def has_measured() -> bool:
            return (await figures(service))["trader_event_loop_lag_seconds_count", ()] > 0

        await until(has_measured)  # the lag is measured every so often
        assert after["trader_stream_capacity", ("positions",)] == 50
        assert await service.stop() == 0
        lines = [orjson.loads(line) for line in service.log]
        (line,) = [line for line in lines if line.get("request_id") == request_id]
        assert (line["procedure"], line["status"], line["logger"]) == ("simulator.placeOrder", 200, "trader.request")
        assert line["duration_ms"] > 0


async def test_metrics_can_be_turned_off(tmp_path: Path, dsn: str) -> None:
    async with serving(tmp_path, DATABASE_URL=dsn, METRICS="off") as service:
        assert await service.get("/metrics") == (404, {"error": "Not Found"})


async def test_idle_connections_do_not_keep_health_waiting(tmp_path: Path, dsn: str) -> None:
    async with serving(tmp_path, DATABASE_URL=dsn, HTTP_CONNECTIONS_MAX="1500") as service:
        port = int(service.url.rpartition(":")[2])
        resident = (await figures(service))["process_resident_memory_bytes", ()]
        writers = []
        for number in range(IDLE):
            _, writer = await asyncio.open_connection("127.0.0.1", port)
            if number % 2:
                writer.write(b"POST /api/rpc/variants.getVariants HTTP/1.1\r\nHost: ")
            writers.append(writer)
        took_s = []
        for _ in range(21):
            started_s = time.perf_counter()
            status, _ = await service.get("/health")
            took_s.append(time.perf_counter() - started_s)
            assert status == 200
        assert sorted(took_s)[10] < 0.1
        for writer in writers:
            writer.close()
        await asyncio.gather(*(writer.wait_closed() for writer in writers), return_exceptions=True)

        async def has_closed() -> bool:
            return (await figures(service))["process_open_fds", ()] <= 100

        await until(has_closed)
        assert (await figures(service))["process_resident_memory_bytes", ()] < resident + 60_000_000
