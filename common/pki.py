"""Creates the federation's certificates and node keys with ``cryptography`` alone (no openssl, no ssh-keygen).

Called when a server is provisioned and when a site enrols. One private certificate authority per study signs the
server's TLS certificate. Every site makes its own ECDSA P-384 node key and gives away only the public key. Every
function keeps files that are still valid, so it may be called again. Formats: PEM certificates and PKCS#8 keys; node
keys in OpenSSH format, which Flower reads. Refuses to replace an existing key, to use a key that other users may read,
and to return a certificate that has expired or does not name the server.
"""

from __future__ import annotations

import ipaddress
import stat
from base64 import b64decode
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
    load_pem_private_key,
    load_ssh_private_key,
    load_ssh_public_key,
)
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from common.errors import InvalidInput
from common.objects import shared, write_atomically
from common.public_keys import fingerprint_of
from common.reading import parsing
from common.sockets import HOST_LIMIT, HOST_REMEDY

_CLOCK_SKEW = timedelta(minutes=5)


@dataclass(frozen=True, slots=True, kw_only=True)
class Authority:
    """A certificate authority on disk: ``certificate`` goes to every party, ``key`` (0600) stays with its owner."""

    certificate: Path
    key: Path


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerIdentity:
    """The files that a TLS server needs: the authority's certificate, its own certificate, and its private
    key (0600).
    """

    authority: Path
    certificate: Path
    key: Path


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeKeys:
    """A node's key pair in OpenSSH format. ``private`` (0600) never leaves the site."""

    private: Path
    public: Path


def create_authority(folder: Path, *, valid_days: int = 3650, now: datetime | None = None) -> Authority:
    """Create ``ca.crt`` and ``ca.key`` in a folder, or return the existing pair.

    Args:
        folder: The folder.
        valid_days: Days for which it is valid.
        now: Current time; the system's if None.

    Returns:
        The authority.

    Raises:
        InvalidInput: If only one file of the pair exists, the two do not match, or the certificate has expired.
    """
    now = now or datetime.now(UTC)
    _check_days(valid_days)
    authority = Authority(certificate=folder / "ca.crt", key=folder / "ca.key")
    if authority.key.exists() or authority.certificate.exists():
        _usable_authority(authority, now=now)
        return authority
    key = ec.generate_private_key(ec.SECP384R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "Consilium consortium CA")])
    certificate = (
        _certificate(subject, subject, key.public_key(), now=now, until=now + timedelta(days=valid_days))
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_usage(signs_certificates=True), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .sign(key, hashes.SHA384())
    )
    write_atomically(authority.key, _pem(key), mode=0o600, replace=False)
    write_atomically(authority.certificate, certificate.public_bytes(Encoding.PEM), replace=False)
    return authority


def issue_server_certificate(
    authority: Authority,
    folder: Path,
    *,
    names: Sequence[str],
    valid_days: int = 365,
    renew_before_days: int = 7,
    now: datetime | None = None,
) -> ServerIdentity:
    """Create ``server.crt``, ``server.key`` and a copy of ``ca.crt`` in a folder.

    An existing certificate is kept if this authority signed it, it has all the names, and it stays valid for
    ``renew_before_days``. Otherwise a new one is issued, with the existing key if there is one.

    Args:
        authority: The authority.
        folder: The folder.
        names: DNS names and IP addresses of the server.
        valid_days: Days for which it is valid.
        renew_before_days: Days before its end from which it is renewed.
        now: Current time; the system's if None.

    Returns:
        The files.

    Raises:
        InvalidInput: If names are missing or invalid, the authority is unusable, or others may read a key.
    """
    now = now or datetime.now(UTC)
    _check_days(valid_days)
    wanted = subject_names(names)
    issuer_key, issuer = _usable_authority(authority, now=now)
    identity = ServerIdentity(authority=folder / "ca.crt", certificate=folder / "server.crt", key=folder / "server.key")
    if identity.key.exists():
        key = _private_key(identity.key)
    else:
        key = ec.generate_private_key(ec.SECP384R1())
        write_atomically(identity.key, _pem(key), mode=0o600, replace=False)
    issuer_pem = issuer.public_bytes(Encoding.PEM)
    if not identity.authority.exists() or identity.authority.read_bytes() != issuer_pem:
        write_atomically(identity.authority, issuer_pem)
    if _still_good(identity.certificate, key, issuer, wanted, at=now + timedelta(days=renew_before_days)):
        return identity
    common_name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, names[0][:64])])
    until = min(now + timedelta(days=valid_days), issuer.not_valid_after_utc)
    certificate = (
        _certificate(common_name, issuer.subject, key.public_key(), now=now, until=until)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(x509.SubjectAlternativeName(wanted), critical=False)
        .add_extension(_usage(signs_certificates=False), critical=True)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(issuer_key.public_key()), critical=False)
        .sign(issuer_key, hashes.SHA384())
    )
    write_atomically(identity.certificate, certificate.public_bytes(Encoding.PEM))
    return identity


def create_node_keys(folder: Path, *, comment: str = "") -> NodeKeys:
    """Create ``node`` and ``node.pub`` (ECDSA P-384, OpenSSH format) in a folder, or return the existing pair.

    A missing public key is written again from the private key.

    Args:
        folder: The folder.
        comment: Comment of the public key.

    Returns:
        The files.

    Raises:
        InvalidInput: If the private key is damaged, of another kind, readable by others, or does not match the public
            key.
    """
    keys = NodeKeys(private=folder / "node", public=folder / "node.pub")
    if keys.private.exists():
        key = load_node_key(keys.private)
    elif keys.public.exists():
        raise InvalidInput(
            f"{keys.public} has no private key beside it",
            remedy="put the private key back, or remove the public key and register the new key with the server",
        )
    else:
        key = ec.generate_private_key(ec.SECP384R1())
        write_atomically(
            keys.private,
            key.private_bytes(Encoding.PEM, PrivateFormat.OpenSSH, NoEncryption()),
            mode=0o600,
            replace=False,
        )
    line = node_key_line(key.public_key())
    if keys.public.exists():
        if read_node_public_key(keys.public) != line:
            raise InvalidInput(
                f"{keys.public} does not belong to {keys.private}",
                remedy="remove the public key; it is written again from the private key",
            )
    else:
        suffix = f" {comment}" if comment else ""
        write_atomically(keys.public, f"{line}{suffix}\n".encode(), replace=False)
    return keys


def read_node_public_key(path: Path) -> str:
    """Return the public key in a file, without its comment.

    Args:
        path: An OpenSSH public key.

    Returns:
        ``ecdsa-sha2-nistp384 BASE64``.

    Raises:
        InvalidInput: For any other file.
    """
    with parsing(f"{path} is not an OpenSSH public key", remedy="use the .pub file that the site made"):
        text = path.read_bytes().decode("ascii")
    return node_key_line(parse_node_key(text))


def parse_node_key(line: str) -> ec.EllipticCurvePublicKey:
    """Return the public node key in a line of OpenSSH's format.

    Args:
        line: The line.

    Returns:
        The key.

    Raises:
        InvalidInput: For any other kind of key.
    """
    with parsing("not an OpenSSH public key", remedy="use the .pub file that the site made"):
        key = load_ssh_public_key(line.encode())
    if not isinstance(key, ec.EllipticCurvePublicKey) or not isinstance(key.curve, ec.SECP384R1):
        raise InvalidInput(
            "public key is not a node key",
            limit="an ECDSA key on the curve P-384",
            remedy="use the file node.pub that the site made",
        )
    return key


def node_key_line(key: ec.EllipticCurvePublicKey) -> str:
    """Return a node key as ``ecdsa-sha2-nistp384 BASE64``, the form in which node keys are compared.

    Args:
        key: The public key.

    Returns:
        The line.
    """
    return key.public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH).decode()


def load_node_key(path: Path) -> ec.EllipticCurvePrivateKey:
    """Read a site's private node key.

    Args:
        path: The file.

    Returns:
        The key.

    Raises:
        InvalidInput: If it is damaged, of another kind, or readable by others.
    """
    with parsing(f"{path} is not a readable OpenSSH private key", limit="a key without a password"):
        key = load_ssh_private_key(_private_bytes(path), password=None)
    return _p384(key, path)


def node_fingerprint(line: str) -> str:
    """Return the fingerprint of a node key as ``ssh-keygen -l`` prints it.

    Args:
        line: The public key in OpenSSH's format.

    Returns:
        ``SHA256:…``.

    Raises:
        InvalidInput: If it is no node key.
    """
    return fingerprint_of(b64decode(node_key_line(parse_node_key(line)).split()[1]))


def validity(certificate: Path) -> tuple[datetime, datetime]:
    """Return the times between which a certificate is valid.

    Args:
        certificate: A PEM file.

    Returns:
        First and last time in UTC.

    Raises:
        InvalidInput: If the file is no certificate.
    """
    read = _read_certificate(certificate)
    return read.not_valid_before_utc, read.not_valid_after_utc


def expires(certificate: Path) -> datetime:
    """Return the time at which a certificate stops being valid; see :func:`validity`.

    Args:
        certificate: A PEM file.

    Returns:
        The time in UTC.

    Raises:
        InvalidInput: If the file is no certificate.
    """
    return validity(certificate)[1]


def certificate_names(certificate: Path) -> list[str]:
    """Return the DNS names and addresses of a certificate.

    Args:
        certificate: A PEM file.

    Returns:
        The names.

    Raises:
        InvalidInput: If the file is no certificate.
    """
    named = _read_certificate(certificate).extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    return [str(name.value) for name in named]


def _check_days(valid_days: int) -> None:
    if not 1 <= valid_days <= 36500:
        raise InvalidInput("days for which a certificate is valid", value=valid_days, limit="1 to 36500")


def subject_names(names: Sequence[str]) -> list[x509.GeneralName]:
    """Convert a server's names to names in a certificate.

    Args:
        names: DNS names and IP addresses.

    Returns:
        The names; DNS names in lower case.

    Raises:
        InvalidInput: If the list is empty, or a name is neither a DNS name nor an IP address.
    """
    if isinstance(names, str) or not names:
        raise InvalidInput("names of the server", value=names, limit="at least one DNS name or IP address")
    found: list[x509.GeneralName] = []
    for name in names:
        try:
            found.append(x509.IPAddress(ipaddress.ip_address(name)))
            continue
        except ValueError:
            pass
        labels = name.split(".")
        if len(name) > 253 or not all(
            0 < len(label) <= 63 and label.isascii() and label.replace("-", "").isalnum() and label.strip("-") == label
            for label in labels
        ):
            raise InvalidInput("name of the server", value=name, limit=HOST_LIMIT, remedy=HOST_REMEDY)
        found.append(x509.DNSName(name.lower()))
    return found


def _certificate(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey, *, now: datetime, until: datetime
) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _CLOCK_SKEW)  # sites' clocks may run behind
        .not_valid_after(until)
    )


def _usage(*, signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        encipher_only=False,
        decipher_only=False,
    )


def _usable_authority(authority: Authority, *, now: datetime) -> tuple[ec.EllipticCurvePrivateKey, x509.Certificate]:
    for path in (authority.key, authority.certificate):
        if not path.exists():
            raise InvalidInput(
                f"{path} is missing",
                remedy="put it back, or remove the other file of the pair and enrol every site again",
            )
    key, certificate = _private_key(authority.key), _read_certificate(authority.certificate)
    if certificate.public_key() != key.public_key():
        raise InvalidInput(
            f"{authority.key} is not the key of {authority.certificate}",
            remedy="put back the key and the certificate that belong together",
        )
    if not certificate.not_valid_before_utc <= now < certificate.not_valid_after_utc:
        raise InvalidInput(
            f"{authority.certificate} is not valid now",
            value=now.isoformat(timespec="seconds"),
            limit=f"{certificate.not_valid_before_utc:%Y-%m-%d} to {certificate.not_valid_after_utc:%Y-%m-%d}",
            remedy="make a new authority and send its certificate to every site",
        )
    return key, certificate


def _still_good(
    path: Path,
    key: ec.EllipticCurvePrivateKey,
    issuer: x509.Certificate,
    wanted: Sequence[x509.GeneralName],
    *,
    at: datetime,
) -> bool:
    if not path.exists():
        return False
    certificate = _read_certificate(path)
    try:
        certificate.verify_directly_issued_by(issuer)
        named = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except (InvalidSignature, ValueError, TypeError, x509.ExtensionNotFound):
        return False
    return (
        certificate.public_key() == key.public_key()
        and set(wanted) <= set(named)
        and certificate.not_valid_before_utc <= at < certificate.not_valid_after_utc
    )


def _read_certificate(path: Path) -> x509.Certificate:
    with parsing(f"{path} is not a readable PEM certificate", remedy="give a certificate in PEM form"):
        return x509.load_pem_x509_certificate(path.read_bytes())


def _private_key(path: Path) -> ec.EllipticCurvePrivateKey:
    with parsing(f"{path} is not a readable private key", limit="PEM without a password"):
        key = load_pem_private_key(_private_bytes(path), password=None)
    return _p384(key, path)


def _p384(key: object, path: Path) -> ec.EllipticCurvePrivateKey:
    if not isinstance(key, ec.EllipticCurvePrivateKey) or not isinstance(key.curve, ec.SECP384R1):
        raise InvalidInput(f"{path} is a key of another kind", limit="an ECDSA key on the curve P-384")
    return key


def _private_bytes(path: Path) -> bytes:
    mode = stat.S_IMODE(path.stat().st_mode)
    if mode & (0o037 if shared(path.parent) else 0o077):
        raise InvalidInput(f"others may read {path}", value=f"{mode:04o}", limit="0600", remedy=f"chmod 600 {path}")
    return path.read_bytes()


def _pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
