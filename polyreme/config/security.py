"""TLS and tokens: of the services' own ports, and of HTTPS endpoints that rewards call."""

from pathlib import Path

from pydantic import Field, model_validator

from polyreme.config.section import Section


class EndpointSecurity(Section):
    """TLS trust and client identity for an HTTPS endpoint. The reward service reads files and token when it starts."""

    ca: Path | None = Field(
        None, description="PEM: CA certificates that sign the endpoint's. Without it, the system's CA certificates."
    )
    certificate: Path | None = Field(None, description="PEM: client certificate, for endpoints that ask for one.")
    key: Path | None = Field(None, description="PEM: private key of `certificate`, without a password.")
    token_env: str | None = Field(None, description="Environment variable with the bearer token to send.")

    @model_validator(mode="after")
    def _pairs(self) -> "EndpointSecurity":
        if (self.certificate is None) != (self.key is None):
            raise ValueError("`certificate` and `key` go together")
        return self


class SecurityConfig(Section):
    """Identity of a service and access to it. Files are read where a process starts: each machine has its own at these paths."""

    certificate: Path | None = Field(
        None,
        description="PEM: the server's certificate and its intermediate CAs. It turns TLS on; without it, use trusted networks only.",
    )
    key: Path | None = Field(None, description="PEM: private key of `certificate`, without a password.")
    ca: Path | None = Field(
        None, description="PEM: CA certificates that sign the peers'. Without it, the system's CA certificates."
    )
    mutual: bool = Field(
        False, description="Clients also need a certificate signed by `ca`. Polyreme's own clients show `certificate`."
    )
    server_name: str | None = Field(
        None, description="Name in all servers' certificates. Without it, each certificate carries its server's address."
    )
    token_env: str | None = Field(None, description="Environment variable with the bearer token that every call must carry.")

    @model_validator(mode="after")
    def _has_ca(self) -> "SecurityConfig":
        if (self.certificate is None) != (self.key is None):
            raise ValueError("`certificate` and `key` go together")
        if self.certificate is None and (self.mutual or self.token_env is None):
            raise ValueError("`security` needs `certificate` and `key`, or `token_env`")
        if self.mutual and self.ca is None:
            raise ValueError("`mutual` needs `ca`: without it, anyone with a certificate of a public CA could call")
        return self
