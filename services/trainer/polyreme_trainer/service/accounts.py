"""Who may use the training service, and how much.

Invariant: a key is in the environment only. What is kept, shown and compared is its digest.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field

from starlette.types import ASGIApp, Receive, Scope, Send

from polyreme.config.serve import ServeConfig, ServeQuota
from polyreme.errors import ConfigError
from polyreme.net.http_server import PROBES
from polyreme_trainer.service.http_answers import is_open, refusal, tenant_of, tenant_with

KEY_PREFIX = "tml-"
"""The SDK refuses other keys."""


@dataclass(frozen=True)
class Accounts:
    """The tenants by the digests of their keys; empty: everybody may use the service.

    Attributes:
        names: their names.
        quotas: of tenants that have their own; quota: of all others.
    """

    names: Mapping[str, str] = field(default_factory=dict)
    quotas: Mapping[str, ServeQuota] = field(default_factory=dict)
    quota: ServeQuota = field(default_factory=ServeQuota)

    @classmethod
    def read(cls, config: ServeConfig) -> "Accounts":
        """Reads keys from the environment. Raises ConfigError for one that is missing, not an API key, or another tenant's."""
        names: dict[str, str] = {}
        quotas = {}
        for tenant in config.tenants:
            key = os.environ.get(tenant.token_env, "").strip()
            if not key.startswith(KEY_PREFIX):
                raise ConfigError(
                    f"the API key of tenant {tenant.name} in the environment variable {tenant.token_env}",
                    f"one that does not begin with {KEY_PREFIX}" if key else "none",
                    f"Set it, for example to {KEY_PREFIX}$(openssl rand -hex 24).",
                )
            if (digest := tenant_with(key)) in names:
                raise ConfigError("a key of its own for each tenant", f"one of {names[digest]} and {tenant.name}", "Change one.")
            names[digest] = tenant.name
            quotas[digest] = tenant.quota or config.quota
        return cls(names, quotas, config.quota)

    def quota_of(self, tenant: str) -> ServeQuota:
        """The bounds of a tenant."""
        return self.quotas.get(tenant, self.quota)

    def admits(self, tenant: str) -> bool:
        """Whether a tenant may use the service."""
        return not self.names or tenant in self.names


class RequireAccount:
    """Answers 401 to requests without a key of an account."""

    def __init__(self, app: ASGIApp, accounts: Accounts) -> None:
        self._app, self._accounts = app, accounts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        asks_for_key = scope["type"] == "http" and scope["path"] not in PROBES and not is_open(scope["path"])
        app = self._app
        if asks_for_key and not self._accounts.admits(tenant_of(scope)):
            app = refusal(401, "expected the API key of an account of this service; found another one, or none")
        await app(scope, receive, send)
