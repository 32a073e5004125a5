"""Procedures of `models`: the models and their invocations."""

from collections.abc import Sequence

from trader.agents.domain.invocations import FinishedInvocation
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
from trader.api.turns import in_slices
from trader.database.pool import Page


@procedure("models.getModels", long=True)
async def get_models(context: Context, _: Empty) -> GetModelsOutput:
    """List the models with their activity."""
    listed = await context.invocations.model_activity()
    warnings = context.invocations.warnings()
    return GetModelsOutput(
        models=[ModelView.of(model, activity, warnings.by_model.get(model.id)) for model, activity in listed],
        warning=UNSET if warnings.summary is None else warnings.summary,
    )


@procedure("models.getInvocations", long=True)
async def get_invocations(context: Context, request: GetInvocationsInput) -> GetInvocationsOutput:
    """List finished runs with their tool calls, newest first."""
    page = page_of(request.limit, request)
    records = await context.invocations.finished(
        model_id=or_none(request.model_id),
        variant=chosen_variant(request.variant),
        page=page,
        outcome=or_none(request.outcome),
        invocation_id=or_none(request.invocation_id),
        with_answers=context.settings.public == "off",
    )
    return await shown_page(records, page)


async def shown_page(records: Sequence[FinishedInvocation], page: Page) -> GetInvocationsOutput:
    """Return a page of finished runs, newest first."""
    cut = cut_page(records, page, lambda record: record.invocation.started_at)
    shown = await in_slices(invocation_of, cut.rows)
    return GetInvocationsOutput(conversations=shown, next_before=cut.next_before, next_skip=cut.next_skip)


@procedure("models.getConversation", private=True, long=True)
async def get_conversation(context: Context, request: GetConversationInput) -> GetConversationOutput:
    """Return the messages between the service and the model in one run: prompt, view of the market, answers, results.

    The list is empty if the messages are no longer retained, and for rule agents, which have none.

    :raises NotFound: There is no such run.
    """
    messages = await context.invocations.messages(request.invocation_id)
    return GetConversationOutput(messages=await in_slices(MessageView.of, messages))
