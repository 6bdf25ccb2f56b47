"""Explains failed requests."""

import ssl

from polyreme.config.security import EndpointSecurity


def explain(error: Exception, url: str, security: EndpointSecurity | None) -> tuple[str, bool]:
    """Explains why there was no HTTP reply, and whether a retry may help.

    Args:
        error: the error of httpx or of its transport.
        url: URL of the request.
        security: security settings of the client.
    """
    what = str(error) or type(error).__name__
    if not url.startswith("https:"):
        return f"expected an HTTP reply; found {what}", True
    cause = _tls(error)
    if isinstance(cause, ssl.SSLCertVerificationError):
        trusted = f"`security.ca` ({security.ca})" if security and security.ca else "this system, without `security.ca`,"
        return f"expected a certificate that {trusted} trusts; found {cause.verify_message.rstrip('.')}", False
    if cause is not None and cause.reason == "WRONG_VERSION_NUMBER":
        return "expected TLS; found another protocol. Use http:// if the server does not support TLS", False
    if not str(error) or cause is not None:  # the server closed the connection without an HTTP reply
        shown = (
            f"does not accept the certificate in `security.certificate` ({security.certificate})"
            if security and security.certificate
            else "requires a client certificate: set `security.certificate` and `security.key`"
        )
        return f"expected an HTTP reply; found the connection closed ({cause or what}). Perhaps the server {shown}", True
    return f"expected an HTTP reply; found {what}", True


def refused(http_status: int, security: EndpointSecurity | None) -> str:
    """Advice for status 401 or 403; '' for any other status."""
    if http_status not in (401, 403):
        return ""
    if security is None or security.token_env is None:
        return ". It may require a token: set `security.token_env`"
    return f". It rejects the token in ${security.token_env}"


def _tls(error: BaseException | None) -> ssl.SSLError | None:
    while error is not None and not isinstance(error, ssl.SSLError):
        error = error.__cause__ or error.__context__
    return error
