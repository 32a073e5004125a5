"""The commands agents add, list, rotate, revoke, limits and webhook: external agents, their keys and webhooks."""

import argparse
import os
from collections.abc import Sequence
from typing import Any, Final

import msgspec

from trader.agents.domain.models import EXTERNAL, Declared, Every, WebAddress
from trader.agents.models_file import ModelEntry, variant_argument
from trader.agents.providers.webhook import check_address, new_secret
from trader.agents.sql.external import Webhook, delete_webhook, select_webhooks, upsert_webhook
from trader.agents.sql.models import select_models, update_model_active, update_model_deadline
from trader.agents.variants import limits_of
from trader.commands.command import Result, allowed, deadline_argument, moment, table
from trader.commands.credentials import argument_of, id_argument, replace_secret, scopes_argument, shown_secret
from trader.commands.database import TargetDatabase, database_command
from trader.commands.models_seed import Opening, create_models
from trader.core.clock import SystemClock
from trader.core.errors import StartError, WebhookError
from trader.database.pool import Connection
from trader.exchange.sql.halts import select_known_account
from trader.operations.access import issue
from trader.operations.domain.credentials import (
    AGENT_MARK,
    DECISIONS_PER_MINUTE,
    REQUESTS_PER_MINUTE,
    Credential,
    Scope,
)
from trader.operations.sql.credentials import (
    insert_credential,
    select_credentials,
    update_credential_limits,
    update_credentials_revoked,
)
from trader.operations.sql.status import select_service_facts
from trader.settings.settings import read_some

_LIMIT_MAX: Final = 60_000
_DEFAULT_SCOPES: Final[tuple[Scope, ...]] = ("read", "trade")
_ONCE: Final = "This is the only time that the key is shown; the database keeps its digest."


def _limit(text: str) -> int:
    try:
        number = int(text)
    except ValueError:
        number = 0
    if not 1 <= number <= _LIMIT_MAX:
        raise argparse.ArgumentTypeError(f"expected a whole number from 1 to {_LIMIT_MAX}, got {text!r}")
    return number


_address: Final = argument_of(WebAddress, "an address such as https://example.org/decide, without a query")
_cadence: Final = argument_of(Every, 'minutes or hours, such as "5m" or "1h", at most "24h"')


def _name_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", metavar="NAME", help="the agent, as `trader agents list` shows it")


def _limit_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--requests", type=_limit, metavar="N", help="requests a minute")
    parser.add_argument("--decisions", type=_limit, metavar="N", help="decisions a minute of market time")
    parser.add_argument("--scopes", type=scopes_argument, help="scopes of the key, with commas: read, trade, operate")
    parser.add_argument(
        "--deadline",
        type=deadline_argument,
        metavar="SECONDS",
        help="time for a decision, default: AI_ATTEMPT_TIMEOUT_S",
    )


def _limits_arguments(parser: argparse.ArgumentParser) -> None:
    _name_argument(parser)
    _limit_arguments(parser)


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", type=id_argument, metavar="NAME", help="id of the agent and its account")
    parser.add_argument(
        "--variant", type=variant_argument, required=True, help="the variant whose prompt and limits apply"
    )
    parser.add_argument("--owner", type=id_argument, help="the agent's owner")
    parser.add_argument("--model", help="its declared model, until it declares another one")
    parser.add_argument("--every", type=_cadence, help='how often a decision is due, such as "5m"; default: 1m')
    parser.add_argument("--capital", type=float, metavar="N", help="starting capital; default: SIM_INITIAL_CAPITAL")
    parser.add_argument("--webhook", type=_address, metavar="URL", help="address to send each due view to")
    _limit_arguments(parser)


def _webhook_arguments(parser: argparse.ArgumentParser) -> None:
    _name_argument(parser)
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("url", nargs="?", type=_address, metavar="URL", help="address to send each due view to")
    which.add_argument("--off", action="store_true", help="stop calling it")


@database_command(
    "agents add", example="trader agents add scout --variant Apex --owner alice", arguments=_add_arguments, changes=True
)
async def add(options: argparse.Namespace, target: TargetDatabase) -> Result:
    """Add an external agent with its own account, and print its key once."""
    entry = _entry(options)
    capital, currency, accounts_max = read_some(
        os.environ, options.env_file, "initial_capital", "quote_currency", "max_accounts"
    )
    webhook = None if options.webhook is None else _new_webhook(options, options.webhook)
    now = SystemClock().now()
    async with target.database.transaction() as conn:
        if (await select_service_facts(conn)).trading_mode == "live":
            raise StartError("External agents can only trade on paper, and this database is for live trading.")
        if entry.id in {model.id for model in await select_models(conn)}:
            raise StartError(f"The model {entry.id!r} already exists; `trader agents rotate` gives an agent a new key.")
        if await select_known_account(conn, entry.id):
            raise StartError(f"The account {entry.id!r} already exists, and others traded it; choose another name.")
        await create_models(conn, [entry], now, Opening(capital, currency, accounts_max, is_live=False))
        key, credential = issue(
            AGENT_MARK,
            entry.id,
            now,
            options.scopes or _DEFAULT_SCOPES,
            account_id=entry.id,
            requests=options.requests or REQUESTS_PER_MINUTE,
            decisions=options.decisions or DECISIONS_PER_MINUTE,
        )
        await insert_credential(conn, credential)
        if webhook is not None:
            await upsert_webhook(conn, entry.id, webhook)
    return _with_key(entry.id, key, webhook)


def _entry(options: argparse.Namespace) -> ModelEntry:
    given = {
        "id": options.name,
        "variant": options.variant,
        "provider": EXTERNAL,
        "router_model": options.model or EXTERNAL,
        "declared": options.model and Declared(),
        "owner": options.owner,
        "every": options.every,
        "initial_capital": options.capital,
        "decision_age_max_s": options.deadline,
    }
    try:
        return msgspec.convert({name: value for name, value in given.items() if value is not None}, ModelEntry)
    except msgspec.ValidationError as error:
        raise StartError(f"The agent cannot be added: {error}.") from None


def _with_key(account_id: str, key: str, webhook: Webhook | None = None) -> Result:
    value = {"id": account_id, "accountId": account_id, "key": key}
    lines = [f"{account_id} trades the account {account_id}. Its key:", "", f"  {key}", "", _ONCE]
    if webhook is not None:
        value["webhookSecret"] = webhook.secret
        lines += ["", *_webhook_lines(account_id, webhook)]
    return Result(value, lines)


def _webhook_lines(name: str, webhook: Webhook) -> list[str]:
    head = f"The service sends views for {name} to {webhook.url}. The secret that signs them:"
    return [head, "", f"  {webhook.secret}", "", "This is the only time that the secret is shown."]


def _new_webhook(options: argparse.Namespace, url: str) -> Webhook:
    """Return a webhook with a new secret.

    :raises StartError: the service cannot call this address
    """
    (loopback,) = read_some(os.environ, options.env_file, "webhook_loopback")
    try:
        check_address(url, loopback=loopback == "on")
    except WebhookError as error:
        raise StartError(f"{url}: {error}.") from None
    return Webhook(url, new_secret())


@database_command("agents list", example="trader agents list")
async def list_agents(options: argparse.Namespace, target: TargetDatabase) -> Result:
    """List the external agents, their owners, and the first characters and limits of their keys."""
    async with target.reading() as conn:
        models = [model for model in await select_models(conn) if model.is_external]
        keys = await _present_keys(conn)
        webhooks = await select_webhooks(conn)
    heads = (
        "agent",
        "variant",
        "owner",
        "model",
        "key",
        "scopes",
        "since",
        "webhook",
        "requests/min",
        "decisions/min",
    )
    rows = [
        (
            model.id,
            model.variant,
            model.configuration.owner or "",
            model.router_model_name,
            shown_secret(key := keys[model.id]),
            " ".join(key.scopes),
            moment(key.created_at),
            webhooks[model.id].url if model.id in webhooks else "",
            str(key.requests_per_minute),
            str(key.decisions_per_minute),
        )
        for model in models
    ]
    value = {
        "agents": [
            {
                **_agent_json(model.id, model.configuration.owner, keys[model.id]),
                "webhook": webhooks[model.id].url if model.id in webhooks else None,
            }
            for model in models
        ]
    }
    return Result(value, table(heads, rows, text_columns=8))


async def _present_keys(conn: Connection) -> dict[str, Credential]:
    """Return the latest key of each agent, which may be revoked."""
    return {key.account_id: key for key in await select_credentials(conn) if key.account_id is not None}


def _agent_json(account_id: str, owner: str | None, key: Credential) -> dict[str, Any]:
    return {
        "id": account_id,
        "accountId": account_id,
        "owner": owner,
        "keyPrefix": key.prefix,
        "keyFingerprint": key.fingerprint,
        "scopes": key.scopes,
        "requestsPerMinute": key.requests_per_minute,
        "decisionsPerMinute": key.decisions_per_minute,
        "createdAt": key.created_at,
        "revokedAt": key.revoked_at,
    }


@database_command("agents rotate", example="trader agents rotate scout", arguments=_name_argument, changes=True)
async def rotate(options: argparse.Namespace, target: TargetDatabase) -> Result:
    """Give an agent a new key and print it once; the old one stops working within a second."""
    async with target.database.transaction() as conn:
        before = await _key_of(conn, options.name)
        key = await replace_secret(conn, before)
        await update_model_active(conn, options.name, is_active=True)
    return _with_key(options.name, key)


@database_command("agents revoke", example="trader agents revoke scout", arguments=_name_argument, changes=True)
async def revoke(options: argparse.Namespace, target: TargetDatabase) -> Result:
    """Revoke an agent's key; its positions, their exit plans and its results stay."""
    async with target.database.transaction() as conn:
        await _key_of(conn, options.name)
        count = await update_credentials_revoked(conn, options.name, options.name)
        await update_model_active(conn, options.name, is_active=False)
    line = f"The key of {options.name} is revoked." if count else f"The key of {options.name} was already revoked."
    return Result({"id": options.name, "revoked": count}, [line])


@database_command(
    "agents limits", example="trader agents limits scout --requests 300", arguments=_limits_arguments, changes=True
)
async def limits(options: argparse.Namespace, target: TargetDatabase) -> Result:
    """Show the scopes, rate limits and deadline of an agent, and change the given ones.

    A changed deadline changes the agent's configuration, so its next decision belongs to a new entrant.
    """
    (attempt_s,) = read_some(os.environ, options.env_file, "attempt_timeout_s")
    async with target.database.transaction() as conn:
        await _key_of(conn, options.name)
        key = await update_credential_limits(conn, options.name, options.requests, options.decisions, options.scopes)
        if key is None:
            raise StartError(f"The key of {options.name} is revoked; `trader agents rotate` makes a new one.")
        if options.deadline is not None:
            await update_model_deadline(conn, options.name, options.deadline)
        (model,) = [model for model in await select_models(conn) if model.id == options.name]
    deadline_s, cadence_s = limits_of(model, attempt_s).decision_age_max_s, model.configuration.cadence.total_seconds()
    lines = [
        f"{options.name}: {key.requests_per_minute} requests and {key.decisions_per_minute} decisions a minute; "
        f"{deadline_s} s for a decision; scopes {', '.join(key.scopes)}"
    ]
    if options.deadline is not None and deadline_s > max(cadence_s, attempt_s):
        lines.append(
            f"A decision is due every {cadence_s:g} s: cycles that pass while it still decides count as missed."
        )
    return Result({**_agent_json(options.name, None, key), "deadlineSeconds": deadline_s}, lines)


@database_command(
    "agents webhook",
    example="trader agents webhook scout https://example.org/decide",
    arguments=_webhook_arguments,
    changes=True,
)
async def webhook(options: argparse.Namespace, target: TargetDatabase) -> Result:
    """Make the service send an agent each due view and use the response as its decision; `--off` stops that.

    The command prints the secret that signs the requests once; running it again creates a new one.
    """
    new = None if options.off else _new_webhook(options, options.url)
    async with target.database.transaction() as conn:
        await _key_of(conn, options.name)
        if new is None:
            await delete_webhook(conn, options.name)
            return Result({"id": options.name, "webhook": None}, [f"{options.name} is not called."])
        await upsert_webhook(conn, options.name, new)
    return Result(
        {"id": options.name, "webhook": new.url, "webhookSecret": new.secret}, _webhook_lines(options.name, new)
    )


async def _key_of(conn: Connection, name: str) -> Credential:
    keys = await _present_keys(conn)
    if name not in keys:
        known: Sequence[str] = sorted(keys)
        raise StartError(f"There is no external agent {name!r}. Existing agents: {allowed(known)}.")
    return keys[name]
