"""External agents on the wire: who they are, what they are shown, and what they decide."""

from trader.api.schemas.common import UNSET, Input, UnsetType, VariantId, Wire
from trader.api.schemas.simulator import AccountId
from trader.domain.models import Model
from trader.domain.operations.credentials import Credential, Scope
from trader.errors import ForeignAccount


class AgentInput(Input, kw_only=True):
    """Input of an agent. A key speaks for one account, so `accountId` may be left out; another's is refused."""

    account_id: AccountId | UnsetType = UNSET

    def require_own(self, key: Credential) -> None:
        """Check that the account is the key's.

        :raises ForeignAccount: it is another one
        """
        if self.account_id is not UNSET and self.account_id != key.account_id:
            raise ForeignAccount(f"this key speaks for the account {key.account_id} and not for {self.account_id}")


class WhoAmIOutput(Wire, kw_only=True):
    """An agent and its key: the first characters, what it may do, and how often a minute.

    A decision is due every `decisionEverySeconds`; what is not decided by then counts as missed.
    """

    agent_id: str
    account_id: str
    variant: VariantId
    owner: str | UnsetType = UNSET
    model: str
    decision_every_seconds: int
    key_prefix: str
    scopes: list[Scope]
    requests_per_minute: int | None
    decisions_per_minute: int | None

    @classmethod
    def of(cls, model: Model, key: Credential) -> "WhoAmIOutput":
        return cls.from_attributes(
            model.configuration,
            agent_id=model.id,
            account_id=model.id,
            variant=model.variant,
            model=model.router_model_name,
            decision_every_seconds=int(model.configuration.cadence.total_seconds()),
            key_prefix=key.prefix,
            scopes=list(key.scopes),
            requests_per_minute=key.requests_per_minute,
            decisions_per_minute=key.decisions_per_minute,
        )
