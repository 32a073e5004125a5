"""Rule agents as a provider: same view, same tools, same guard, same record as an AI model, and no network."""

import msgspec

from trader.domain.agents.conversation import ModelAnswer, ToolRequest, Turn
from trader.domain.agents.tools import TOOL_NAMES, Decision
from trader.variants import VARIANTS


class RuleProvider:
    """The rule agents of the variants. They say all they have to say in their first answer."""

    name = "rules"
    is_remote = False

    async def answer(self, turn: Turn) -> ModelAnswer:
        variant = VARIANTS[turn.model.variant]
        decisions = variant.agent(turn.view, variant.limits) if turn.number == 1 else []
        return ModelAnswer(
            text=None,
            calls=tuple(_request(number, decision) for number, decision in enumerate(decisions, 1)),
            message={},
            model=turn.model.router_model_name,
        )

    async def close(self) -> None:
        """Nothing is open."""


def _request(number: int, decision: Decision) -> ToolRequest:
    return ToolRequest(
        id=f"call_{number}", name=TOOL_NAMES[type(decision)], arguments=msgspec.json.encode(decision).decode()
    )
