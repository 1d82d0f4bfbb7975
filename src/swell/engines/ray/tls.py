"""Certificates for Ray's own connections between hosts (RAY_USE_TLS), made by an authority of the home.

    eval "$(python -m swell.engines.ray.tls HOME [NAME ...])"     on each node, before `ray start`

Without TLS Ray sends its token with nearly every message, and a reader of it can run code as the nodes'
user. Ray wants a certificate on every node for the addresses by which others reach it. So the home, which all
nodes see, has an authority (`ray-tls/ca.crt` and `ca.key`), made once, and every node has it sign a
certificate of its own. Who can read the home's private files can join; nobody else can.

A Ray of swell's own needs none of this: it listens on the loopback, so nothing it sends leaves the machine.
"""

from __future__ import annotations

import datetime
import fcntl
import ipaddress
import os
import shlex
import socket
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from swell.domain import SwellError
from swell.engines.ray.connection import is_loopback, own_address

if TYPE_CHECKING:
    from cryptography import x509
    from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey

FOLDER = "ray-tls"
VALID_DAYS = 3650
ADVICE = (
    "Ray's token, the scripts and --env go in clear between the hosts of this cluster: set up Ray's TLS (see "
    "docs/guides/ray.md, 'By hand'), or encrypt below it (WireGuard, the CNI's)"
)


def in_clear(addresses: Iterable[str], environment: Mapping[str, str]) -> bool:
    """Whether nodes at these addresses are several hosts, and Ray's connections between them have no TLS."""
    hosts = {address for address in addresses if not is_loopback(address)}
    return len(hosts) > 1 and environment.get("RAY_USE_TLS") not in ("1", "true", "True")


def ensure(home: Path, names: Iterable[str] = (), out: Path | None = None) -> dict[str, str]:
    """Make a certificate for this node, and the home's authority if there is none; returns Ray's variables.

    `names`: further addresses and host names by which others reach this node. `out`: where the certificate
    and its key go; a folder of this host in the home if it is not given.
    """
    folder = home / FOLDER
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    folder.chmod(0o700)
    out = folder / socket.gethostname() if out is None else out
    out.mkdir(mode=0o700, parents=True, exist_ok=True)
    descriptor = os.open(folder / "lock", os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)  # nodes that start together make one authority
        _make(folder, out, ["localhost", "127.0.0.1", socket.gethostname(), own_address(), *names])
    finally:
        os.close(descriptor)
    return {
        "RAY_USE_TLS": "1",
        "RAY_TLS_SERVER_CERT": str(out / "node.crt"),
        "RAY_TLS_SERVER_KEY": str(out / "node.key"),
        "RAY_TLS_CA_CERT": str(folder / "ca.crt"),
    }


def _make(folder: Path, out: Path, names: list[str]) -> None:
    try:
        from cryptography import x509
        from cryptography.hazmat.primitives import hashes
        from cryptography.hazmat.primitives.asymmetric import ec
        from cryptography.hazmat.primitives.serialization import load_pem_private_key
    except ImportError:
        raise SwellError("certificates need the package cryptography: pip install 'swell[ray]'") from None

    if not (folder / "ca.crt").exists():
        key = ec.generate_private_key(ec.SECP256R1())
        made = _unsigned("swell Ray authority", "swell Ray authority", key)
        made = made.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        _write_key(folder / "ca.key", key)
        _write(folder / "ca.crt", _pem(made.sign(key, hashes.SHA256())))
    authority = load_pem_private_key((folder / "ca.key").read_bytes(), None)
    assert isinstance(authority, ec.EllipticCurvePrivateKey)
    if _is_good(folder, out, set(names)):
        return  # processes of this node may be reading it
    own = ec.generate_private_key(ec.SECP256R1())
    known = [
        x509.IPAddress(ipaddress.ip_address(name)) if _is_ip(name) else x509.DNSName(name) for name in names
    ]
    node = _unsigned("swell Ray node", "swell Ray authority", own)
    node = node.add_extension(x509.SubjectAlternativeName(dict.fromkeys(known)), critical=False)
    node = node.add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
    _write_key(out / "node.key", own)
    _write(out / "node.crt", _pem(node.sign(authority, hashes.SHA256())))


def _is_good(folder: Path, out: Path, names: set[str]) -> bool:
    """Whether the node has a certificate of the authority for these names that is valid for a while."""
    from cryptography import x509
    from cryptography.exceptions import InvalidSignature

    try:
        own = x509.load_pem_x509_certificate((out / "node.crt").read_bytes())
        own.verify_directly_issued_by(x509.load_pem_x509_certificate((folder / "ca.crt").read_bytes()))
        known = own.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except (OSError, ValueError, TypeError, InvalidSignature, x509.ExtensionNotFound):
        return False
    covered = {*known.get_values_for_type(x509.DNSName), *map(str, known.get_values_for_type(x509.IPAddress))}
    left = own.not_valid_after_utc - datetime.datetime.now(datetime.UTC)
    return names <= covered and left.days > VALID_DAYS / 2 and (out / "node.key").exists()


def _unsigned(name: str, issuer: str, key: EllipticCurvePrivateKey) -> x509.CertificateBuilder:
    from cryptography import x509
    from cryptography.x509.oid import NameOID

    def named(text: str) -> x509.Name:
        return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])

    begins = datetime.datetime.now(datetime.UTC) - datetime.timedelta(days=1)  # clocks differ
    return (
        x509.CertificateBuilder()
        .subject_name(named(name))
        .issuer_name(named(issuer))
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(begins)
        .not_valid_after(begins + datetime.timedelta(days=VALID_DAYS))
    )


def _is_ip(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def _pem(certificate: x509.Certificate) -> bytes:
    from cryptography.hazmat.primitives.serialization import Encoding

    return certificate.public_bytes(Encoding.PEM)


def _write_key(path: Path, key: EllipticCurvePrivateKey) -> None:
    from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

    _write(path, key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))


def _write(path: Path, content: bytes) -> None:
    """Replace a file, which only its owner can read, as a whole."""
    temporary = path.with_name(f"{path.name}.{os.getpid()}")
    temporary.unlink(missing_ok=True)
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


def main() -> None:
    """Print, as lines of a shell, the variables that Ray wants on this node."""
    words = sys.argv[1:]
    out = None
    if "--out" in words:
        at = words.index("--out")
        out = Path(words[at + 1])
        del words[at : at + 2]
    if not words or words[0].startswith("-"):
        sys.exit("usage: python -m swell.engines.ray.tls HOME [NAME ...] [--out FOLDER]")
    try:
        found = ensure(Path(words[0]).resolve(), words[1:], out)
    except (SwellError, OSError, ValueError) as error:
        sys.exit(f"Ray's certificates cannot be made: {error}")
    for name, value in found.items():
        sys.stdout.write(f"export {name}={shlex.quote(value)}\n")


if __name__ == "__main__":
    main()
