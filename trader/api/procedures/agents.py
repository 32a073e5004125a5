"""Procedures of `agent`: what external agents see, and what they decide, each for the account of its key."""

from trader.api.context import Context
from trader.api.procedures.simulator import account_output
from trader.api.registry import procedure
from trader.api.schemas.agents import AgentInput, WhoAmIOutput
from trader.api.schemas.simulator import AccountOutput
from trader.domain.models import Model
from trader.domain.operations.credentials import Credential


@procedure("agent.whoami", paper_only=True, scope="read")
async def whoami(context: Context, request: AgentInput, key: Credential) -> WhoAmIOutput:
    """Show which agent the key belongs to, and what it may do."""
    return WhoAmIOutput.of(await _agent_of(context, request, key), key)


@procedure("agent.getAccount", paper_only=True, scope="read")
async def get_account(context: Context, request: AgentInput, key: Credential) -> AccountOutput:
    """Show the agent's account: its equity, margin, positions with exit plans, and open orders."""
    return account_output(context, (await _agent_of(context, request, key)).id)


async def _agent_of(context: Context, request: AgentInput, key: Credential) -> Model:
    """Return the model of the key's account. Raise `ForeignAccount` when the request names another one."""
    request.require_own(key)
    assert key.account_id is not None, "the dispatcher lets only keys of agents through"
    if key.account_id not in context.agents.models:  # a command has added it since the last cycle
        await context.agents.reload_models()
    if context.exchange.term is not None and key.account_id not in context.exchange.accounts:
        await context.exchange.open_account(key.account_id)
    return context.agents.models[key.account_id]
