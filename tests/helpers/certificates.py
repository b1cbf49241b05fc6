"""A certificate for a server of a test, made without other programs and packages."""

import base64
import hashlib
import secrets
import textwrap
import time
from pathlib import Path
from typing import NamedTuple

_SHA256_WITH_RSA, _RSA = "2a864886f70d01010b", "2a864886f70d010101"
_COMMON_NAME, _PUBLIC_EXPONENT = "550403", 65537
# Numbers of extensions: key usage, basic constraints, alternative names, key identifier.
_USAGE, _CONSTRAINTS, _NAMES, _KEY_ID = "551d0f", "551d13", "551d11", "551d0e"


class Certificate(NamedTuple):
    """Files in PEM; the chain is the certificate that signs itself."""

    chain: Path
    key: Path


def write_certificate(folder: Path, address: str) -> Certificate:
    """Write a new certificate for an IPv4 address, valid for a day, and its key."""
    p, q = _prime(1024), _prime(1024)
    n, d = p * q, pow(_PUBLIC_EXPONENT, -1, (p - 1) * (q - 1))
    public = _sequence(_integer(n), _integer(_PUBLIC_EXPONENT))
    algorithm = _sequence(_tag(6, bytes.fromhex(_SHA256_WITH_RSA)), _tag(5, b""))
    name = _sequence(
        _tag(0x31, _sequence(_tag(6, bytes.fromhex(_COMMON_NAME)), _tag(12, b"tfscale test")))
    )
    now = time.time()
    begin, end = (time.strftime("%y%m%d%H%M%SZ", time.gmtime(now + s)) for s in (-3600, 86400))
    extensions = (
        _extension(_CONSTRAINTS, _sequence(_tag(1, b"\xff")), is_critical=True),
        _extension(_USAGE, _tag(3, b"\x02\x84"), is_critical=True),
        _extension(_KEY_ID, _tag(4, hashlib.sha256(public).digest()[:20])),
        _extension(_NAMES, _sequence(_tag(0x87, bytes(map(int, address.split(".")))))),
    )
    body = _sequence(
        _tag(0xA0, _integer(2)),
        _integer(secrets.randbits(64) + 1),
        algorithm,
        name,
        _sequence(_tag(0x17, begin.encode()), _tag(0x17, end.encode())),
        name,
        _sequence(_sequence(_tag(6, bytes.fromhex(_RSA)), _tag(5, b"")), _tag(3, b"\x00" + public)),
        _tag(0xA3, _sequence(*extensions)),
    )
    digest = _sequence(
        _sequence(_tag(6, bytes.fromhex("608648016503040201")), _tag(5, b"")),
        _tag(4, hashlib.sha256(body).digest()),
    )
    length = (n.bit_length() + 7) // 8
    padded = b"\x00\x01" + b"\xff" * (length - len(digest) - 3) + b"\x00" + digest
    signature = pow(int.from_bytes(padded, "big"), d, n).to_bytes(length, "big")
    numbers = (0, n, _PUBLIC_EXPONENT, d, p, q, d % (p - 1), d % (q - 1), pow(q, -1, p))
    chain, key = folder / "chain.pem", folder / "key.pem"
    chain.write_text(_pem("CERTIFICATE", _sequence(body, algorithm, _tag(3, b"\x00" + signature))))
    key.write_text(_pem("RSA PRIVATE KEY", _sequence(*map(_integer, numbers))))
    return Certificate(chain, key)


def _prime(bits: int) -> int:
    while True:
        candidate = secrets.randbits(bits) | (3 << (bits - 2)) | 1
        small = any(candidate % p == 0 for p in (3, 5, 7, 11, 13, 17, 19, 23, 29, 31, 37))
        if not small and candidate % _PUBLIC_EXPONENT != 1 and _is_prime(candidate):
            return candidate


def _is_prime(candidate: int, rounds: int = 24) -> bool:
    """Miller and Rabin's test."""
    odd = candidate - 1
    twos = (odd & -odd).bit_length() - 1
    odd >>= twos
    for _ in range(rounds):
        power = pow(secrets.randbelow(candidate - 3) + 2, odd, candidate)
        if power in (1, candidate - 1):
            continue
        for _ in range(twos - 1):
            power = power * power % candidate
            if power == candidate - 1:
                break
        else:
            return False
    return True


# ASN.1, as DER writes it.


def _tag(tag: int, content: bytes) -> bytes:
    length = len(content)
    if length < 128:
        return bytes([tag, length]) + content
    size = length.to_bytes((length.bit_length() + 7) // 8, "big")
    return bytes([tag, 128 | len(size)]) + size + content


def _sequence(*parts: bytes) -> bytes:
    return _tag(0x30, b"".join(parts))


def _integer(value: int) -> bytes:
    return _tag(2, value.to_bytes(value.bit_length() // 8 + 1, "big"))


def _extension(number: str, value: bytes, is_critical: bool = False) -> bytes:
    critical = [_tag(1, b"\xff")] if is_critical else []
    return _sequence(_tag(6, bytes.fromhex(number)), *critical, _tag(4, value))


def _pem(kind: str, content: bytes) -> str:
    lines = textwrap.wrap(base64.b64encode(content).decode(), 64)
    return "\n".join([f"-----BEGIN {kind}-----", *lines, f"-----END {kind}-----", ""])
