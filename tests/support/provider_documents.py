"""Requests of every protocol as documented, and servers of three of them: OpenAI's Responses API, Anthropic's Messages
API and Gemini's generateContent.

Each refuses unknown and missing fields, a conversation without its returned reasoning or signatures, and calls without
results. The first answer reads indicators, the second one holds. Read on 23 November 2026:
developers.openai.com/api/reference (chat completions, responses), platform.claude.com/docs (messages, prompt caching),
ai.google.dev/api (generateContent, function calling, thought signatures).
"""

from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal

import msgspec
import orjson
from aiohttp import web
from msgspec import Meta


class Strict(msgspec.Struct, forbid_unknown_fields=True):
    """A part of a request."""


Schema = dict[str, Any]
FunctionName = Annotated[str, Meta(pattern="^[a-zA-Z0-9_-]{1,64}$")]
FETCH = {"symbol": "ETH", "interval": "4h"}
HOLD = {"reason": "calm"}


# --- OpenAI chat completions ------------------------------------------------------------------------------------------


class ChatFunction(Strict):
    name: FunctionName
    arguments: str


class ChatCall(Strict):
    id: str
    type: Literal["function"]
    function: ChatFunction


class SystemMessage(Strict, tag_field="role", tag="system"):
    content: str


class UserMessage(Strict, tag_field="role", tag="user"):
    content: str


class AssistantMessage(Strict, tag_field="role", tag="assistant"):
    content: str | None = None
    refusal: str | None = None
    tool_calls: Annotated[list[ChatCall], Meta(min_length=1)] | None = None


class ToolMessage(Strict, tag_field="role", tag="tool"):
    tool_call_id: str
    content: str


class ChatFunctionDefinition(Strict):
    name: FunctionName
    description: str
    parameters: Schema
    strict: bool | None = None


class ChatTool(Strict):
    type: Literal["function"]
    function: ChatFunctionDefinition


class StreamOptions(Strict):
    include_usage: bool


class ChatRequest(Strict):
    model: str
    messages: Annotated[list[SystemMessage | UserMessage | AssistantMessage | ToolMessage], Meta(min_length=1)]
    tools: list[ChatTool]
    tool_choice: Literal["auto", "none", "required"] = "auto"
    temperature: Annotated[float, Meta(ge=0, le=2)] = 1.0
    max_tokens: Annotated[int, Meta(ge=1)] | None = None
    max_completion_tokens: Annotated[int, Meta(ge=1)] | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None

    def __post_init__(self) -> None:
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options: only allowed when stream is true")
        if self.max_tokens is not None and self.max_completion_tokens is not None:
            raise ValueError("max_tokens and max_completion_tokens exclude each other")


# --- OpenAI Responses -------------------------------------------------------------------------------------------------


class ResponsesTool(Strict):
    type: Literal["function"]
    name: str
    parameters: Schema
    strict: bool
    description: str = ""


class Reasoning(Strict):
    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh"] = "medium"
    summary: str | None = None


class ResponsesRequest(Strict):
    model: str
    input: list[dict[str, Any]]
    tools: list[ResponsesTool]
    max_output_tokens: Annotated[int, Meta(ge=16)]
    tool_choice: Literal["auto", "none", "required"] = "auto"
    store: bool = True
    include: list[Literal["reasoning.encrypted_content"]] = []
    reasoning: Reasoning | None = None
    stream: bool = False
    prompt_cache_key: str | None = None


REASONING = {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": "gAAAA-secret-thought"}


def responses(body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
    if "temperature" in body:
        message = "Unsupported parameter: 'temperature' is not supported with this model."
        error = {"message": message, "type": "invalid_request_error", "param": "temperature", "code": None}
        return 400, {"error": error}
    request = msgspec.convert(body, ResponsesRequest)
    assert not request.store
    assert request.include, "without it a stateless conversation loses the reasoning"
    roles = [item.get("role", item.get("type")) for item in request.input]
    assert roles[:2] == ["developer", "user"]
    if len(roles) == 2:
        call = {
            "type": "function_call", "id": "fc_1", "call_id": "call_a", "name": "fetchIndicators",
            "arguments": orjson.dumps(FETCH).decode(), "status": "completed",
        }  # fmt: skip
        output = [REASONING, {**call, "id": "fc_0", "call_id": "call_0"}, call]
    else:
        assert request.input[2] == REASONING, "the reasoning comes back as it was"
        assert roles[2:] == ["reasoning", "function_call", "function_call", *["function_call_output"] * 2]
        assert [item["call_id"] for item in request.input[5:]] == ["call_0", "call_a"]
        output = [
            {"type": "message", "id": "msg_1", "role": "assistant", "status": "completed",
             "content": [{"type": "output_text", "text": "Done.", "annotations": []}]},
            {"type": "function_call", "id": "fc_2", "call_id": "call_b", "name": "holding",
             "arguments": orjson.dumps(HOLD).decode(), "status": "completed"},
        ]  # fmt: skip
    usage = {
        "input_tokens": 1000, "input_tokens_details": {"cached_tokens": 600}, "output_tokens": 70,
        "output_tokens_details": {"reasoning_tokens": 50}, "total_tokens": 1070,
    }  # fmt: skip
    return 200, {
        "id": "resp_1", "object": "response", "status": "completed", "error": None, "incomplete_details": None,
        "model": "gpt-5.6-2026-08-01", "output": output, "usage": usage,
    }  # fmt: skip


# --- Anthropic Messages -----------------------------------------------------------------------------------------------


class CacheControl(Strict):
    type: Literal["ephemeral"]
    ttl: Literal["5m", "1h"] = "5m"


class TextBlock(Strict, tag="text"):
    text: Annotated[str, Meta(min_length=1)]
    cache_control: CacheControl | None = None


class ThinkingBlock(Strict, tag="thinking"):
    thinking: str
    signature: str


class ToolUseBlock(Strict, tag="tool_use"):
    id: Annotated[str, Meta(pattern="^[a-zA-Z0-9_-]+$")]
    name: FunctionName
    input: dict[str, Any]


class ToolResultBlock(Strict, tag="tool_result"):
    tool_use_id: str
    content: str


class MessagesTurn(Strict):
    role: Literal["user", "assistant"]
    content: Annotated[list[TextBlock | ThinkingBlock | ToolUseBlock | ToolResultBlock], Meta(min_length=1)]


class MessagesTool(Strict):
    name: str
    input_schema: Schema
    description: str = ""


class ToolChoice(Strict):
    type: Literal["auto", "any", "none"]


class Thinking(Strict):
    type: Literal["enabled", "adaptive", "disabled"]
    budget_tokens: int | None = None


class MessagesRequest(Strict):
    model: str
    max_tokens: int
    messages: list[MessagesTurn]
    system: list[TextBlock]
    tools: list[MessagesTool]
    tool_choice: ToolChoice
    temperature: Annotated[float, Meta(ge=0, le=1)] = 1.0
    stream: bool = False
    thinking: Thinking | None = None


def invalid(message: str) -> dict[str, Any]:
    return {"type": "error", "error": {"type": "invalid_request_error", "message": message}}


def messages(body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
    request = msgspec.convert(body, MessagesRequest)
    if request.thinking is not None and request.thinking.type == "enabled":
        if request.temperature != 1:
            return 400, invalid("`temperature` may only be set to 1 when thinking is enabled.")
        budget = request.thinking.budget_tokens or 0
        if budget < 1024:
            return 400, invalid("thinking.enabled.budget_tokens: Input should be greater than or equal to 1024")
        if request.max_tokens <= budget:
            return 400, invalid("`max_tokens` must be greater than `thinking.budget_tokens`.")
    assert request.system[-1].cache_control is not None, "tools and system message end with a mark"
    marks = [block for turn in request.messages for block in turn.content if getattr(block, "cache_control", None)]
    assert len(marks) <= 3, "and the system message may have a fourth"
    thought = {"type": "thinking", "thinking": "ETH looks calm", "signature": "EqQBCg-signature"}
    if len(request.messages) == 1:
        content = [
            thought,
            {"type": "text", "text": "Looking at ETH."},
            *({"type": "tool_use", "id": f"toolu_{n}", "name": "fetchIndicators", "input": FETCH} for n in (1, 2)),
        ]
    else:
        user, said, results = request.messages
        assert (user.role, said.role, results.role) == ("user", "assistant", "user")
        assert msgspec.to_builtins(said.content[0]) == thought, "the thought comes back with its signature"
        assert [block.tool_use_id for block in results.content] == ["toolu_1", "toolu_2"]  # type: ignore[union-attr]
        content = [{"type": "tool_use", "id": "toolu_3", "name": "holding", "input": HOLD}]
    usage = {
        "input_tokens": 100, "cache_creation_input_tokens": 300, "cache_read_input_tokens": 600, "output_tokens": 70,
    }  # fmt: skip
    return 200, {
        "id": "msg_1", "type": "message", "role": "assistant", "model": "claude-opus-4-8", "content": content,
        "stop_reason": "tool_use", "stop_sequence": None, "usage": usage,
    }  # fmt: skip


# --- Gemini -----------------------------------------------------------------------------------------------------------


class FunctionCall(Strict, rename="camel"):
    name: FunctionName
    args: dict[str, Any] = {}
    id: str | None = None


class FunctionResponse(Strict, rename="camel"):
    name: FunctionName
    response: dict[str, Any]
    id: str | None = None


class Part(Strict, rename="camel"):
    text: Annotated[str, Meta(min_length=1)] | None = None
    thought: bool = False
    thought_signature: str | None = None
    function_call: FunctionCall | None = None
    function_response: FunctionResponse | None = None


class Content(Strict):
    parts: Annotated[list[Part], Meta(min_length=1)]
    role: Literal["user", "model"] = "user"


class FunctionDeclaration(Strict, rename="camel"):
    name: str
    description: str
    parameters_json_schema: Schema


class GeminiTool(Strict, rename="camel"):
    function_declarations: list[FunctionDeclaration]


class CallingConfig(Strict):
    mode: Literal["AUTO", "ANY", "NONE"]


class ToolConfig(Strict, rename="camel"):
    function_calling_config: CallingConfig


class ThinkingConfig(Strict, rename="camel"):
    thinking_level: Literal["low", "high"] = "high"


class GenerationConfig(Strict, rename="camel"):
    temperature: float = 1.0
    max_output_tokens: int = 8192
    thinking_config: ThinkingConfig | None = None


class GeminiRequest(Strict, rename="camel"):
    contents: list[Content]
    system_instruction: Content
    tools: list[GeminiTool]
    tool_config: ToolConfig
    generation_config: GenerationConfig


def gemini(body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
    request = msgspec.convert(body, GeminiRequest)
    if len(request.contents) == 1:
        call = {"functionCall": {"name": "fetchIndicators", "args": FETCH}}
        parts = [
            {"text": "I think.", "thought": True},
            {**call, "thoughtSignature": "CpYB-signature"},
            call,
        ]
    else:
        asked, results = request.contents[1:]
        assert (asked.role, results.role) == ("model", "user")
        assert asked.parts[1].thought_signature == "CpYB-signature", "else the model refuses with 400"
        assert all(part.function_response is not None for part in results.parts)
        assert len(results.parts) == 2, "as many results as calls, in their order"
        parts = [{"functionCall": {"name": "holding", "args": HOLD, "id": "own"}}]
    usage = {
        "promptTokenCount": 1000, "cachedContentTokenCount": 600, "candidatesTokenCount": 20, "thoughtsTokenCount": 50,
        "totalTokenCount": 1070,
    }  # fmt: skip
    return 200, {
        "candidates": [{"content": {"role": "model", "parts": parts}, "finishReason": "STOP", "index": 0}],
        "usageMetadata": usage, "modelVersion": "gemini-3.5-flash",
    }  # fmt: skip


REQUESTS: Mapping[str, type[Strict]] = {
    "chat": ChatRequest, "responses": ResponsesRequest, "messages": MessagesRequest, "gemini": GeminiRequest,
}  # fmt: skip
"""The document of a request by protocol."""


# --- the server -------------------------------------------------------------------------------------------------------

Answer = Callable[[dict[str, Any]], tuple[int, dict[str, Any]]]
KEY_HEADERS: Mapping[str, tuple[str, str]] = {
    "responses": ("Authorization", "Bearer {}"), "messages": ("x-api-key", "{}"), "gemini": ("x-goog-api-key", "{}"),
}  # fmt: skip


def application(key: str) -> web.Application:
    """Return the servers, each at its documented path.

    A request that violates a document is answered with 400 and the reason.
    """

    def handler(protocol: str, answer: Answer) -> Callable[[web.Request], Any]:
        async def handle(request: web.Request) -> web.StreamResponse:
            name, form = KEY_HEADERS[protocol]
            if request.headers.get(name) != form.format(key):
                return web.json_response({"error": {"message": "Invalid API key"}}, status=401)
            if protocol == "messages" and request.headers.get("anthropic-version") != "2023-06-01":
                return web.json_response({"error": {"message": "anthropic-version: header is required"}}, status=400)
            body = orjson.loads(await request.read())
            try:
                status, said = answer(body)
            except (AssertionError, msgspec.ValidationError) as error:
                return web.json_response({"error": {"message": f"the document says otherwise: {error}"}}, status=400)
            if body.get("stream") and status == 200:
                event = {"type": "response.completed", "sequence_number": 9, "response": said}
                created = b'event: response.created\ndata: {"type": "response.created", "response": {}}\n\n'
                text = created + b"event: response.completed\ndata: " + orjson.dumps(event) + b"\n\n"
                return web.Response(body=text, content_type="text/event-stream")
            return web.json_response(said, status=status)

        return handle

    app = web.Application()
    app.router.add_post("/v1/responses", handler("responses", responses))
    app.router.add_post("/v1/messages", handler("messages", messages))
    app.router.add_post("/v1beta/models/gemini-3.5-flash:generateContent", handler("gemini", gemini))
    return app
