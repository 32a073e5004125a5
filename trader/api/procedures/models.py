"""Procedures of `models`: the models and their invocations."""

from trader.api.context import Context
from trader.api.registry import procedure
from trader.api.schemas.common import UNSET, Empty, chosen_variant, or_none
from trader.api.schemas.models import (
    GetConversationInput,
    GetConversationOutput,
    GetInvocationsInput,
    GetInvocationsOutput,
    GetModelsOutput,
    MessageView,
    ModelView,
    invocation_of,
)
from trader.api.schemas.paging import cut_page, page_of


@procedure("models.getModels")
async def get_models(context: Context, _: Empty) -> GetModelsOutput:
    """List the models with their activity."""
    summaries = await context.agents.model_summaries()
    warning, warnings = context.agents.warning(), context.agents.model_warnings()
    return GetModelsOutput(
        models=[ModelView.of(summary, warnings.get(summary.model.id)) for summary in summaries],
        warning=UNSET if warning is None else warning,
    )


@procedure("models.getInvocations")
async def get_invocations(context: Context, request: GetInvocationsInput) -> GetInvocationsOutput:
    """List finished runs with their tool calls, the latest first."""
    page = page_of(request.limit, request.before)
    records = await context.agents.invocations(
        model_id=or_none(request.model_id),
        variant=chosen_variant(request.variant),
        page=page,
        with_answers=context.settings.public == "off",
    )
    shown, next_before = cut_page(records, page, lambda record: record.invocation.started_at)
    return GetInvocationsOutput(conversations=[invocation_of(record) for record in shown], next_before=next_before)


@procedure("models.getConversation", private=True)
async def get_conversation(context: Context, request: GetConversationInput) -> GetConversationOutput:
    """Return the messages between the service and the model in one run: prompt, view of the market, answers, results.

    The list is empty when the messages are no longer kept, and for a rule agent, which is sent none.

    :raises NotFound: There is no such run.
    """
    messages = await context.agents.messages(request.invocation_id)
    return GetConversationOutput(messages=[MessageView.of(message) for message in messages])
