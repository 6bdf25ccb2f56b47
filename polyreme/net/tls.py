"""TLS, mutual TLS and bearer tokens: reads and checks the files and variables in a SecurityConfig or an EndpointSecurity.

Invariant: a secret is read where it is used. Configurations, and therefore run records, contain only paths and names of
environment variables. A file that cannot be used is an error when its server or client starts, not at the first handshake.
"""

import hmac
import os
import ssl
from pathlib import Path

import grpc

from polyreme.config.security import EndpointSecurity, SecurityConfig
from polyreme.errors import ConfigError


def server_context(config: SecurityConfig) -> ssl.SSLContext | None:
    """TLS of an HTTP server; None: the configuration has no certificate. Raises ConfigError."""
    if config.certificate is None:
        return None
    context = _context(ssl.Purpose.CLIENT_AUTH, config.ca if config.mutual else None, (config.certificate, config.key))
    if config.mutual:
        context.verify_mode = ssl.CERT_REQUIRED
    return context


def client_context(config: EndpointSecurity) -> ssl.SSLContext:
    """TLS of an HTTP client. Raises ConfigError."""
    return _context(ssl.Purpose.SERVER_AUTH, config.ca, (config.certificate, config.key))


def peer_context(config: SecurityConfig) -> ssl.SSLContext | None:
    """TLS of an HTTP client of servers with this configuration; None: they have no certificate. Raises ConfigError."""
    if config.certificate is None:
        return None
    shown = (config.certificate, config.key) if config.mutual else (None, None)
    return _context(ssl.Purpose.SERVER_AUTH, config.ca, shown)


def server_credentials(config: SecurityConfig) -> grpc.ServerCredentials | None:
    """TLS of a gRPC server; None: the configuration has no certificate. Raises ConfigError."""
    if config.certificate is None or config.key is None:
        return None
    server_context(config)  # gRPC accepts any bytes, then fails every handshake
    pair = (config.key.read_bytes(), config.certificate.read_bytes())
    roots = config.ca.read_bytes() if config.mutual and config.ca else None
    return grpc.ssl_server_credentials([pair], roots, require_client_auth=config.mutual)


def channel_credentials(config: SecurityConfig) -> grpc.ChannelCredentials:
    """TLS of a gRPC client, and the token with every call. Raises ConfigError."""
    _context(ssl.Purpose.SERVER_AUTH, config.ca, (config.certificate, config.key) if config.mutual else (None, None))
    roots = config.ca.read_bytes() if config.ca else None
    shown = (config.key, config.certificate) if config.mutual else (None, None)
    key, certificate = (path.read_bytes() if path else None for path in shown)
    credentials = grpc.ssl_channel_credentials(roots, key, certificate)
    if (expected := token(config)) is not None:
        credentials = grpc.composite_channel_credentials(credentials, grpc.access_token_call_credentials(expected))
    return credentials


def check_files(config: SecurityConfig) -> None:
    """Reads all files and the token that a server and its clients will read. Raises ConfigError."""
    server_credentials(config)
    if config.certificate is not None:
        channel_credentials(config)
    token(config)


def token(config: SecurityConfig | EndpointSecurity) -> str | None:
    """The bearer token; None when the configuration names none. Raises ConfigError when its variable is empty."""
    if config.token_env is None:
        return None
    value = os.environ.get(config.token_env, "").strip()
    if not value or not value.isascii() or not value.isprintable():
        raise ConfigError(
            f"a token of printable ASCII in the environment variable {config.token_env}",
            "other characters" if value else "none",
            "Set it for the service and for its callers, or remove token_env.",
        )
    return value


def authorized(header: bytes, expected: str) -> bool:
    """Whether an `authorization` header has the token. Compares in constant time."""
    scheme, _, given = header.partition(b" ")
    return scheme.lower() == b"bearer" and hmac.compare_digest(given.strip(), expected.encode())


def _context(purpose: ssl.Purpose, trusted: Path | None, shown: tuple[Path | None, Path | None]) -> ssl.SSLContext:
    certificate, key = shown
    used = [path for path in (certificate, key, trusted) if path is not None]
    if missing := [str(path) for path in used if not path.is_file()]:
        raise ConfigError("the files that `security` names", f"no file {', '.join(missing)}", "Fix `security`.")
    try:
        context = ssl.create_default_context(purpose, cafile=trusted)
        if certificate is not None:
            context.load_cert_chain(certificate, key, password=_no_password)
    except (OSError, ValueError) as error:  # ssl.SSLError is an OSError
        raise ConfigError(f"matching PEM files {', '.join(map(str, used))}", str(error), "Fix `security`.") from None
    return context


def _no_password() -> str:
    """Without this callback OpenSSL would ask for a password on the terminal."""
    raise ValueError("expected a key without a password; found an encrypted one")
