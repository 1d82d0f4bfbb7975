"""The certificate of a job and its private key, computed from the job's secret (decision 0025).

TLS as Python offers it wants a certificate, and everybody who has the secret must come to the same one
without asking anybody. So the private key is a hash of the secret, on the curve P-256, and the certificate is
signed by that key itself. Computing both takes some 15 ms, once in a process; OpenSSL does the rest.
"""

from __future__ import annotations

import base64
import hashlib
import hmac

_P = 2**256 - 2**224 + 2**192 + 2**96 - 1
_ORDER = 0xFFFFFFFF00000000FFFFFFFFFFFFFFFFBCE6FAADA7179E84F3B9CAC2FC632551
_GENERATOR = (
    0x6B17D1F2E12C4247F8BCE6E563A440F277037D812DEB33A0F4A13945D898C296,
    0x4FE342E2FE1A7F9B8EE7EB4A7C0F9E162BCE33576B315ECECBB6406837BF51F5,
)
Point = tuple[int, int]

_P256 = bytes.fromhex("06082a8648ce3d030107")
_EC_KEY = bytes.fromhex("06072a8648ce3d0201")
_ECDSA_SHA256 = bytes.fromhex("06082a8648ce3d040302")
_COMMON_NAME = bytes.fromhex("0603550403")
_SEQUENCE, _SET, _INTEGER, _BITS, _OCTETS, _TEXT, _TIME, _LONG_TIME = 0x30, 0x31, 2, 3, 4, 0x0C, 0x17, 0x18


def certificate(secret: str) -> tuple[str, str]:
    """The certificate and the private key that belong to a secret, in PEM."""
    key = _number(secret, b"key")
    public = b"\0\4" + b"".join(part.to_bytes(32, "big") for part in _times(key))
    algorithm = _der(_SEQUENCE, _ECDSA_SHA256)
    name = _der(_SEQUENCE, _der(_SET, _der(_SEQUENCE, _COMMON_NAME, _der(_TEXT, b"swell job"))))
    body = _der(
        _SEQUENCE,
        _der(0xA0, _integer(2)),  # version 3
        _integer(1),
        algorithm,
        name,
        _der(_SEQUENCE, _der(_TIME, b"200101000000Z"), _der(_LONG_TIME, b"99991231235959Z")),
        name,
        _der(_SEQUENCE, _der(_SEQUENCE, _EC_KEY, _P256), _der(_BITS, public)),
    )
    signed = _der(_SEQUENCE, body, algorithm, _der(_BITS, b"\0" + _signature(secret, key, body)))
    private = _der(
        _SEQUENCE,
        _integer(1),
        _der(_OCTETS, key.to_bytes(32, "big")),
        _der(0xA0, _P256),
        _der(0xA1, _der(_BITS, public)),
    )
    return _pem("CERTIFICATE", signed), _pem("EC PRIVATE KEY", private)


def _number(secret: str, purpose: bytes) -> int:
    """A number that only those who have the secret can tell; another one for each purpose."""
    found = hmac.new(secret.encode(), b"swell certificate|" + purpose, hashlib.sha512).digest()
    return int.from_bytes(found, "big") % (_ORDER - 1) + 1


def _signature(secret: str, key: int, body: bytes) -> bytes:
    """An ECDSA signature. Its one-time number depends on what is signed: two texts must never share one."""
    digest = hashlib.sha256(body).digest()
    once = _number(secret, b"signature|" + digest)
    r = _times(once)[0] % _ORDER
    s = pow(once, -1, _ORDER) * (int.from_bytes(digest, "big") + r * key) % _ORDER
    return _der(_SEQUENCE, _integer(r), _integer(s))


def _times(factor: int) -> Point:
    """The generator of the curve, `factor` times."""
    total: Point | None = None
    power = _GENERATOR
    while factor:
        if factor & 1:
            total = power if total is None else _add(total, power)
        power = _add(power, power)
        factor >>= 1
    assert total is not None
    return total


def _add(a: Point, b: Point) -> Point:
    """The sum of two points, neither of which is the other's negative."""
    if a == b:
        slope = (3 * a[0] * a[0] - 3) * pow(2 * a[1], -1, _P)
    else:
        slope = (b[1] - a[1]) * pow(b[0] - a[0], -1, _P)
    x = (slope * slope - a[0] - b[0]) % _P
    return x, (slope * (a[0] - x) - a[1]) % _P


def _der(tag: int, *parts: bytes) -> bytes:
    body = b"".join(parts)
    size = len(body)
    if size < 128:
        return bytes([tag, size]) + body
    length = size.to_bytes(2, "big").lstrip(b"\0")
    return bytes([tag, 0x80 + len(length)]) + length + body


def _integer(value: int) -> bytes:
    return _der(_INTEGER, value.to_bytes(value.bit_length() // 8 + 1, "big"))


def _pem(kind: str, der: bytes) -> str:
    return f"-----BEGIN {kind}-----\n{base64.encodebytes(der).decode()}-----END {kind}-----\n"
