"""A certificate authority for one test, and PEM files from it."""

import datetime
import ipaddress
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID


@dataclass(frozen=True)
class Issued:
    """A certificate for 127.0.0.1 or another name, for servers and clients, with its key and its CA."""

    certificate: Path
    key: Path
    ca: Path

    def section(self, **fields: object) -> dict[str, object]:
        """The `security` section that names these files."""
        return {"certificate": str(self.certificate), "key": str(self.key), "ca": str(self.ca), **fields}


def issue(folder: Path, name: str = "127.0.0.1", *others: str) -> Issued:
    """Creates a CA and one certificate from it for `name` and `others`, as files in a new folder."""
    folder.mkdir()
    authority_key, key = ec.generate_private_key(ec.SECP256R1()), ec.generate_private_key(ec.SECP256R1())
    authority = _certificate(("the test's CA",), authority_key, "the test's CA", authority_key, True)
    certificate = _certificate((name, *others), key, "the test's CA", authority_key, False)
    found = Issued(folder / "certificate.pem", folder / "key.pem", folder / "ca.pem")
    found.certificate.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    found.ca.write_bytes(authority.public_bytes(serialization.Encoding.PEM))
    found.key.write_bytes(pem_key(key, serialization.NoEncryption()))
    return found


def pem_key(key: ec.EllipticCurvePrivateKey, encryption: serialization.KeySerializationEncryption) -> bytes:
    return key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, encryption)


def _certificate(
    names: tuple[str, ...], key: ec.EllipticCurvePrivateKey, issuer: str, issuer_key: ec.EllipticCurvePrivateKey, is_ca: bool
) -> x509.Certificate:
    now = datetime.datetime.now(datetime.UTC)
    builder = (
        x509.CertificateBuilder()
        .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, names[0])]))
        .issuer_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, issuer)]))
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(hours=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.BasicConstraints(ca=is_ca, path_length=None), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(issuer_key.public_key()), critical=False)
    )
    if not is_ca:
        found = [x509.IPAddress(ipaddress.ip_address(name)) if name[0].isdigit() else x509.DNSName(name) for name in names]
        builder = builder.add_extension(x509.SubjectAlternativeName(found), critical=False)
    return builder.sign(issuer_key, hashes.SHA256())
