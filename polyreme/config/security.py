"""TLS and bearer tokens, for the services' own ports and for HTTPS endpoints that rewards call.

Invariant: a configuration names files and environment variables and never contains a secret.
"""

from pathlib import Path

from pydantic import Field, model_validator

from polyreme.config.section import Operational, Section


class EndpointSecurity(Section):
    """TLS trust and client identity for an HTTPS endpoint. The reward service reads the files and the token when it starts."""

    ca: Path | None = Field(
        None, description="PEM file with the CA certificates that sign the endpoint's. null: the system's CA certificates."
    )
    certificate: Path | None = Field(None, description="PEM file with the client certificate, for endpoints that require one.")
    key: Path | None = Field(None, description="PEM file with the private key of `certificate`, unencrypted.")
    token_env: str | None = Field(None, description="Environment variable with the bearer token to send.")

    @model_validator(mode="after")
    def _pairs(self) -> "EndpointSecurity":
        if (self.certificate is None) != (self.key is None):
            raise ValueError("`certificate` and `key` go together")
        return self


class SecurityConfig(Section):
    """Identity of a service and access to it. Each process reads the files on its own machine, so machines may differ."""

    certificate: Path | None = Field(
        None,
        description="PEM file with the server's certificate and its intermediate CAs. null: no TLS, for trusted networks only.",
    )
    key: Path | None = Field(None, description="PEM file with the private key of `certificate`, unencrypted.")
    ca: Path | None = Field(
        None, description="PEM file with the CA certificates that sign the peers'. null: the system's CA certificates."
    )
    mutual: bool = Field(
        False, description="Require a client certificate signed by `ca`. Polyreme's own clients present `certificate`."
    )
    server_name: str | None = Field(
        None, description="Host name in the certificates of all servers. null: each certificate names its server's address."
    )
    token_env: str | None = Field(None, description="Environment variable with the bearer token that every request must carry.")

    @model_validator(mode="after")
    def _has_ca(self) -> "SecurityConfig":
        if (self.certificate is None) != (self.key is None):
            raise ValueError("`certificate` and `key` go together")
        if self.certificate is None and (self.mutual or self.token_env is None):
            raise ValueError("`security` needs `certificate` and `key`, or `token_env`")
        if self.mutual and self.ca is None:
            raise ValueError("`mutual` needs `ca`: otherwise every holder of a certificate from a public CA could call")
        return self


class ServiceSection(Section):
    """A service whose worker processes run code of users."""

    worker_memory_mib: Operational[int] = Field(
        4096, ge=64, description="Memory limit of each worker process (RLIMIT_DATA), in MiB."
    )
    worker_environment: Operational[list[str]] = Field(
        [],
        description="Names of environment variables to pass to worker processes in addition to the usual ones, such as an API"
        " key.",
    )
    security: Operational[SecurityConfig | None] = Field(
        None, description="TLS and tokens of both ports. null: plain connections, for loopback only."
    )
