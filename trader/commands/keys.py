"""The commands keys add, list, rotate, revoke, limits and webhook: keys of external agents and tokens of operators."""

import argparse
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, Literal, get_args

import asyncpg
import msgspec

from trader.agents.domain.models import EXTERNAL, Declared, Every, Model, ModelId, WebAddress
from trader.agents.models_file import ModelEntry, variant_argument
from trader.agents.providers.webhook import check_address, new_secret
from trader.agents.sql.external import Webhook, delete_webhooks, select_webhooks, upsert_webhook
from trader.agents.sql.models import select_models, update_model_active, update_model_configuration
from trader.agents.variants import limits_of
from trader.commands.command import (
    Result,
    allowed,
    argument_of,
    command,
    deadline_argument,
    moment,
    table,
)
from trader.commands.database import TargetDatabase, add_database_options, database_command, run_in_database
from trader.commands.models_seed import Opening, create_models
from trader.core.clock import SystemClock
from trader.core.errors import ArgumentsError, StartError, WebhookError
from trader.database.pool import Connection
from trader.exchange.sql.halts import select_known_account
from trader.operations.access import issue, reissue
from trader.operations.domain.credentials import (
    AGENT_MARK,
    DECISIONS_PER_MINUTE,
    OPERATOR_MARK,
    REQUESTS_PER_MINUTE,
    SCOPES,
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
from trader.settings.forms import Form, whole_number
from trader.settings.settings import read_some

Holder = Literal["agent", "operator"]

_DEFAULT_SCOPES: Final[tuple[Scope, ...]] = ("read", "trade")
_OF_AGENTS: Final = ("owner", "model", "every", "capital", "webhook", "requests", "decisions", "deadline")
_NOUNS: Final = {"agent": "external agent", "operator": "token", None: "key"}


def _typed(kind: Any, expected: str) -> Callable[[str], str]:
    """Return a parser of arguments with a type of the models file."""
    return argument_of(Form(expected, ".*", lambda text: str(msgspec.convert(text, kind))))


_id: Final = _typed(ModelId, "1 to 64 letters, digits or any of . _ : -")
_address: Final = _typed(WebAddress, "an address such as https://example.org/decide, without a query")
_cadence: Final = _typed(Every, 'minutes or hours, such as "5m" or "1h", at most "24h"')
_limit: Final = argument_of(whole_number(1, 60_000))


def _scopes(text: str) -> tuple[Scope, ...]:
    names = {name.strip() for name in text.split(",")}
    if unknown := names.difference(SCOPES):
        raise argparse.ArgumentTypeError(
            f"there is no scope {min(unknown)!r}; expected any of {', '.join(SCOPES)}, separated by commas"
        )
    return tuple(scope for scope in SCOPES if scope in names)


def _of_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--of", choices=get_args(Holder), help="only keys of this kind of holder; default: of both")


def _name_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", metavar="NAME", help="the agent or operator, as `keys list` shows it")
    _of_argument(parser)


def _agent_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", metavar="NAME", help="the agent, as `keys list` shows it")


def _limit_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--requests", type=_limit, metavar="N", help="requests a minute")
    parser.add_argument("--decisions", type=_limit, metavar="N", help="decisions a minute of market time")
    parser.add_argument("--scopes", type=_scopes, help="scopes of the key, with commas: read, trade, operate")
    parser.add_argument(
        "--deadline",
        type=deadline_argument,
        metavar="SECONDS",
        help="time for a decision, default: AI_ATTEMPT_TIMEOUT_S",
    )


def _limits_arguments(parser: argparse.ArgumentParser) -> None:
    _agent_argument(parser)
    _limit_arguments(parser)


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", type=_id, metavar="NAME", help="a person or a program, or the id of an agent")
    _of_argument(parser)
    parser.add_argument("--variant", type=variant_argument, help="of an agent: whose prompt and limits apply")
    parser.add_argument("--owner", type=_id, help="the agent's owner")
    parser.add_argument("--model", help="its declared model, until it declares another one")
    parser.add_argument("--every", type=_cadence, help='how often a decision is due, such as "5m"; default: 1m')
    parser.add_argument("--capital", type=float, metavar="N", help="starting capital; default: SIM_INITIAL_CAPITAL")
    parser.add_argument("--webhook", type=_address, metavar="URL", help="address to send each due view to")
    _limit_arguments(parser)
    add_database_options(parser)


def _webhook_arguments(parser: argparse.ArgumentParser) -> None:
    _agent_argument(parser)
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("url", nargs="?", type=_address, metavar="URL", help="address to send each due view to")
    which.add_argument("--off", action="store_true", help="stop calling it")


@command("keys add", example="trader keys add scout --variant Apex --owner alice", arguments=_add_arguments)
async def add(options: argparse.Namespace) -> Result:
    """Create a key and print it once; it works within a second.

    With --variant it belongs to a new external agent with its own account; without, to an operator, a person or a
    program, with the rights of its --scopes.
    """
    is_agent = options.variant is not None
    if options.of not in (None, "agent" if is_agent else "operator"):
        raise ArgumentsError("an agent needs --variant, and an operator has none")
    if not is_agent and options.scopes is None:
        raise ArgumentsError("an operator needs --scopes, an agent --variant")
    misplaced = [f"--{name}" for name in _OF_AGENTS if getattr(options, name) is not None]
    if not is_agent and misplaced:
        raise ArgumentsError(f"{', '.join(misplaced)}: only for an agent, which needs --variant")
    return await run_in_database(_add_agent if is_agent else _add_operator, options, changes=True)


async def _add_operator(options: argparse.Namespace, target: TargetDatabase) -> Result:
    token, credential = issue(OPERATOR_MARK, options.name, SystemClock().now(), options.scopes)
    try:
        async with target.database.transaction() as conn:
            await insert_credential(conn, credential)
    except asyncpg.UniqueViolationError:
        raise StartError(
            f"The token {options.name!r} already exists; `trader keys rotate` replaces it with a new one."
        ) from None
    return _with_key(credential, token)


async def _add_agent(options: argparse.Namespace, target: TargetDatabase) -> Result:
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
            raise StartError(f"The model {entry.id!r} already exists; `trader keys rotate` gives an agent a new key.")
        if await select_known_account(conn, entry.id):
            raise StartError(f"The account {entry.id!r} already exists, and others traded it; choose another name.")
        await create_models(conn, [entry], now, Opening(capital, currency, accounts_max, is_live=False))
        key, credential = issue(
            AGENT_MARK,
            entry.id,
            now,
            options.scopes or _DEFAULT_SCOPES,
            account_id=entry.id,
            requests_per_minute=options.requests or REQUESTS_PER_MINUTE,
            decisions_per_minute=options.decisions or DECISIONS_PER_MINUTE,
        )
        await insert_credential(conn, credential)
        if webhook is not None:
            await upsert_webhook(conn, entry.id, webhook)
    return _with_key(credential, key, webhook)


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


def _with_key(holder: Credential, secret: str, webhook: Webhook | None = None) -> Result:
    if holder.account_id is None:
        head, word = f"{holder.name} may {', '.join(holder.scopes)} with the token:", "token"
        value: dict[str, Any] = {"name": holder.name, "scopes": holder.scopes, "token": secret}
    else:
        head, word = f"{holder.name} trades the account {holder.account_id}. Its key:", "key"
        value = {"id": holder.name, "accountId": holder.account_id, "key": secret}
    once = f"This is the only time that the {word} is shown; the database keeps its digest."
    lines = [head, "", f"  {secret}", "", once]
    if webhook is not None:
        value["webhookSecret"] = webhook.secret
        lines += ["", *_webhook_lines(holder.name, webhook)]
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


@database_command("keys list", example="trader keys list", arguments=_of_argument)
async def list_keys(options: argparse.Namespace, target: TargetDatabase) -> Result:
    """List external agents and operators with the first characters, scopes and limits of their keys."""
    async with target.database.reading() as conn:
        models = {model.id: model for model in await select_models(conn)}
        webhooks = {name: webhook.url for name, webhook in (await select_webhooks(conn)).items()}
        keys = await _present_keys(conn, options.of)
    rows = [_row(key, models, webhooks) for key in keys]
    heads = ("name", "key", "scopes", "since", "variant", "owner", "model", "webhook", "requests/min", "decisions/min")
    value: dict[str, Any] = {}
    if options.of != "operator":
        value["agents"] = [
            {
                **_agent_json(key, models[key.account_id].configuration.owner),
                "webhook": webhooks.get(key.account_id),
            }
            for key in keys
            if key.account_id is not None
        ]
    if options.of != "agent":
        value["tokens"] = [
            {
                "name": key.name,
                "tokenPrefix": key.prefix,
                "scopes": key.scopes,
                "createdAt": key.created_at,
                "revokedAt": key.revoked_at,
            }
            for key in keys
            if key.account_id is None
        ]
    return Result(value, table(heads, rows, text_columns=8))


def _row(key: Credential, models: Mapping[str, Model], webhooks: Mapping[str, str]) -> tuple[str, ...]:
    shown = f"{key.prefix}…" if key.revoked_at is None else f"{key.prefix}… revoked"
    row = (key.name, shown, " ".join(key.scopes), moment(key.created_at))
    if key.account_id is None:
        return (*row, "", "", "", "", "", "")
    model = models[key.account_id]
    limits = (str(key.requests_per_minute), str(key.decisions_per_minute))
    what = (model.variant, model.configuration.owner or "", model.router_model_name)
    return (*row, *what, webhooks.get(key.account_id, ""), *limits)


async def _present_keys(conn: Connection, of: Holder | None, name: str | None = None) -> Sequence[Credential]:
    """Return the latest key of each holder, which may be revoked."""
    latest = {(key.account_id, key.name): key for key in await select_credentials(conn)}
    return [
        key
        for key in latest.values()
        if of in (None, "operator" if key.account_id is None else "agent") and name in (None, key.name)
    ]


async def _key_of(conn: Connection, of: Holder | None, name: str) -> Credential:
    keys = await _present_keys(conn, of, name)
    if len(keys) > 1:
        raise StartError(f"An agent and an operator have the name {name!r}: choose one with --of.")
    if not keys:
        known = sorted(key.name for key in await _present_keys(conn, of))
        noun = _NOUNS[of]
        raise StartError(f"There is no {noun} {name!r}. Existing {noun.rpartition(' ')[2]}s: {allowed(known)}.")
    return keys[0]


def _agent_json(key: Credential, owner: str | None) -> dict[str, Any]:
    return {
        "id": key.name,
        "accountId": key.account_id,
        "owner": owner,
        "keyPrefix": key.prefix,
        "keyFingerprint": key.fingerprint,
        "scopes": key.scopes,
        "requestsPerMinute": key.requests_per_minute,
        "decisionsPerMinute": key.decisions_per_minute,
        "createdAt": key.created_at,
        "revokedAt": key.revoked_at,
    }


@database_command("keys rotate", example="trader keys rotate scout", arguments=_name_argument, changes=True)
async def rotate(options: argparse.Namespace, target: TargetDatabase) -> Result:
    """Replace a key, with the same scopes, and print it once; the old one stops working within a second."""
    async with target.database.transaction() as conn:
        before = await _key_of(conn, options.of, options.name)
        await update_credentials_revoked(conn, before.name, before.account_id)
        secret, credential = reissue(before, SystemClock().now())
        await insert_credential(conn, credential)
        if before.account_id is not None:
            await update_model_active(conn, before.account_id, is_active=True)
    return _with_key(credential, secret)


@database_command("keys revoke", example="trader keys revoke scout", arguments=_name_argument, changes=True)
async def revoke(options: argparse.Namespace, target: TargetDatabase) -> Result:
    """Revoke a key for good, within a second; an agent's positions, their exit plans and its results stay."""
    async with target.database.transaction() as conn:
        key = await _key_of(conn, options.of, options.name)
        count = await update_credentials_revoked(conn, key.name, key.account_id)
        if key.account_id is not None:
            await update_model_active(conn, key.account_id, is_active=False)
    what = f"The token {key.name}" if key.account_id is None else f"The key of {key.name}"
    line = f"{what} is revoked." if count else f"{what} was already revoked."
    return Result({"name" if key.account_id is None else "id": key.name, "revoked": count}, [line])


@database_command(
    "keys limits", example="trader keys limits scout --requests 300", arguments=_limits_arguments, changes=True
)
async def limits(options: argparse.Namespace, target: TargetDatabase) -> Result:
    """Show the scopes, rate limits and deadline of an agent, and change the given ones.

    A changed deadline changes the agent's configuration, so its next decision belongs to a new entrant.
    """
    (attempt_s,) = read_some(os.environ, options.env_file, "attempt_timeout_s")
    async with target.database.transaction() as conn:
        await _key_of(conn, "agent", options.name)
        key = await update_credential_limits(conn, options.name, options.requests, options.decisions, options.scopes)
        if key is None:
            raise StartError(f"The key of {options.name} is revoked; `trader keys rotate` makes a new one.")
        if options.deadline is not None:
            await update_model_configuration(conn, options.name, {"decision_age_max_s": options.deadline})
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
    return Result({**_agent_json(key, None), "deadlineSeconds": deadline_s}, lines)


@database_command(
    "keys webhook",
    example="trader keys webhook scout https://example.org/decide",
    arguments=_webhook_arguments,
    changes=True,
)
async def webhook(options: argparse.Namespace, target: TargetDatabase) -> Result:
    """Make the service send an agent each due view and use the response as its decision; `--off` stops that.

    The command prints the secret that signs the requests once; running it again creates a new one.
    """
    new = None if options.off else _new_webhook(options, options.url)
    async with target.database.transaction() as conn:
        await _key_of(conn, "agent", options.name)
        if new is None:
            await delete_webhooks(conn, options.name)
            return Result({"id": options.name, "webhook": None}, [f"{options.name} is not called."])
        await upsert_webhook(conn, options.name, new)
    return Result(
        {"id": options.name, "webhook": new.url, "webhookSecret": new.secret}, _webhook_lines(options.name, new)
    )
