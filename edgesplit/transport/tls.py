"""TLS to a broker: the context of what the user named, and what went wrong in words that say what to do."""

from __future__ import annotations

import socket
import ssl
from pathlib import Path

from edgesplit.errors import TransportError
from edgesplit.transport.access import Access
from edgesplit.transport.address import Address

_EXPIRED, _NOT_YET, _WRONG_NAME, _WRONG_IP = 10, 9, 62, 64  # OpenSSL's X509_V_ERR_...
_CLIENT_ALERTS = ("CERTIFICATE_REQUIRED", "HANDSHAKE_FAILURE", "BAD_CERTIFICATE", "ACCESS_DENIED")
_REFUSED_ALERTS = ("UNKNOWN_CA", "CERTIFICATE_UNKNOWN", "CERTIFICATE_REVOKED", "UNSUPPORTED_CERTIFICATE")

ALERT_S = 1.0


class Watched(ssl.SSLSocket):
    """Remembers what ended the connection: a broker refuses a client's certificate when it is first read from."""

    trouble: ssl.SSLError | None = None

    def recv(self, buflen: int = 1024, flags: int = 0) -> bytes:
        """As of any socket."""
        try:
            return super().recv(buflen, flags)
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
            raise
        except ssl.SSLError as error:
            self.trouble = error
            raise


def context(access: Access) -> ssl.SSLContext:
    """Return the context for a broker's TLS.

    Raises:
        TransportError: a file is missing, unreadable, no certificate or key, or they do not belong together.
    """
    ca, cert, key = access.file("ca"), access.file("cert"), access.file("cert_key")
    if key is not None and cert is None:
        raise TransportError(f"{key[1]} is {key[0]!r}, but no certificate is named: add --cert")
    if ca is not None:
        _check_readable(*ca)
    try:
        made = ssl.create_default_context(cafile=ca[0] if ca else None)
    except (ssl.SSLError, ValueError) as error:
        raise TransportError(f"{_named(ca)} holds no certificates in PEM format ({_reason(error)})") from None
    made.sslsocket_class = Watched
    if cert is not None:
        _load_pair(made, cert, key)
    return made


def _load_pair(made: ssl.SSLContext, cert: tuple[str, str], key: tuple[str, str] | None) -> None:
    for file in (cert, key):
        if file is not None:
            _check_readable(*file)

    def locked() -> str:
        raise _LockedError

    try:
        made.load_cert_chain(cert[0], key[0] if key else None, password=locked)
    except _LockedError:
        raise TransportError(
            f"{_named(key or cert)} is encrypted: write it without a passphrase (openssl pkey -in FILE -out NEW), "
            "readable by its owner only"
        ) from None
    except ssl.SSLError as error:
        if "KEY_VALUES_MISMATCH" in str(error):
            what = f"{_named(key or cert)} is not the key of the certificate {cert[0]!r}"
        elif key is None:
            what = f"{_named(cert)} does not hold a certificate and its private key: name the key with --cert-key"
        else:
            what = f"{_named(cert)} and {_named(key)} are not a certificate and a private key in PEM format"
        raise TransportError(f"{what} ({_reason(error)})") from None


class _LockedError(Exception):
    """A private key asks for its passphrase."""


def alert(address: Address, made: ssl.SSLContext) -> ssl.SSLError | None:
    """Return what a broker says to a client that says nothing, within a second.

    Its refusal of a certificate is lost where the connection is reset because of what it has not read any more.
    """
    try:
        plain = socket.create_connection((address.host, address.port), timeout=ALERT_S)
        with made.wrap_socket(plain, server_hostname=address.host) as sock:
            sock.recv(1)
    except ssl.SSLError as error:
        return error
    except OSError:
        pass
    return None


def trouble(address: Address, access: Access, error: Exception) -> TransportError:
    """Return the error for a TLS connection that did not come about, or that the broker ended with an alert."""
    reason = _reason(error)
    if isinstance(error, ssl.SSLCertVerificationError):
        return TransportError(f"the broker at {address} {_distrust(address, access, error)}")
    if any(alert in reason.upper().replace(" ", "_") for alert in _CLIENT_ALERTS) and access.file("cert") is None:
        return TransportError(
            f"the broker at {address} demands a certificate of its clients ({reason}): name yours with --cert and "
            "--cert-key"
        )
    alerts = (*_CLIENT_ALERTS, *_REFUSED_ALERTS, "EXPIRED")
    if (cert := access.file("cert")) and any(alert in reason.upper().replace(" ", "_") for alert in alerts):
        return TransportError(
            f"the broker at {address} refuses the certificate of {_named(cert)} ({reason}): has it expired, and is it "
            "signed by a CA that the broker trusts?"
        )
    if "WRONG_VERSION_NUMBER" in reason.upper().replace(" ", "_") or "RECORD_LAYER" in reason.upper().replace(" ", "_"):
        plain = "ws" if address.websockets else "mqtt"
        return TransportError(
            f"what listens at {address} does not speak TLS: use {plain}://, or the port of the broker's TLS listener"
        )
    return TransportError(f"no TLS connection to the broker at {address} comes about: {reason}")


def _distrust(address: Address, access: Access, error: ssl.SSLCertVerificationError) -> str:
    if error.verify_code == _EXPIRED:
        return "shows a certificate that has expired: renew it there, or set this machine's clock if that is wrong"
    if error.verify_code == _NOT_YET:
        return "shows a certificate that is not valid yet: is this machine's clock right?"
    if error.verify_code in (_WRONG_NAME, _WRONG_IP):
        return (
            f"shows a certificate of another host: put a name that it was made for into the url, not {address.host!r}"
        )
    if (ca := access.file("ca")) is not None:
        return (
            f"shows a certificate that {_named(ca)} does not vouch for ({error.verify_message}): is it of the right CA?"
        )
    return (
        f"shows a certificate that this system does not trust ({error.verify_message}): name the file of its CA with "
        "--ca or EDGESPLIT_CA"
    )


def _check_readable(path: str, option: str) -> None:
    try:
        with Path(path).open("rb") as file:
            file.read(1)
    except OSError as error:
        raise TransportError(f"{option}: cannot read {path!r}: {error.strerror or error}") from None


def _named(file: tuple[str, str] | None) -> str:
    return f"{file[1]} {file[0]!r}" if file else "the system's CA file"


def _reason(error: Exception) -> str:
    reason = getattr(error, "reason", None)
    return str(reason or error).lower().replace("_", " ")
