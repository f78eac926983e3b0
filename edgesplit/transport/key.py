"""A run's key: who holds it can sign chunks, and tell whether one was signed with it.

Keyed BLAKE2b makes the code, since a header is short and its start costs nothing (a copy of the keyed state); SHA-256
stands for a payload, since processors have instructions for it.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
from pathlib import Path
from typing import Self

from edgesplit.errors import TransportError

MAC_BYTES = 16
_TEXT = re.compile(r"[0-9a-f]{64}\s*\Z")

Bytes = bytes | bytearray | memoryview


class Key:
    """32 secret bytes.

    Raises:
        TransportError: they are not 32.
    """

    def __init__(self, secret: bytes) -> None:
        if len(secret) != 32:
            raise TransportError(f"a run's key of {len(secret)} bytes: it must be 32")
        self._state = hashlib.blake2b(key=secret, digest_size=MAC_BYTES, person=b"edgesplit chunk")

    @classmethod
    def read(cls, path: str | Path) -> Self:
        """Read a key file: 64 hexadecimal digits.

        Raises:
            TransportError: it cannot be read or is none; its content is not repeated.
        """
        try:
            text = Path(path).read_text("ascii")
        except OSError as error:
            raise TransportError(f"cannot read the key file {str(path)!r}: {error.strerror or error}") from None
        except UnicodeDecodeError:
            text = ""
        if not _TEXT.match(text):
            raise TransportError(f"{str(path)!r} is no key file: copy the file 'key' of the run's folder")
        return cls(bytes.fromhex(text))

    @staticmethod
    def new_text() -> str:
        """Return the content of a new key file."""
        return secrets.token_hex(32) + "\n"

    def mac(self, head: Bytes, digest: bytes = b"") -> bytes:
        """Return the code of a chunk: of its header, and of its payload's digest where that is covered."""
        state = self._state.copy()
        state.update(head)
        state.update(digest)
        return state.digest()

    def fits(self, mac: Bytes, head: Bytes, digest: bytes = b"") -> bool:
        """Whether ``mac`` is the code."""
        return hmac.compare_digest(mac, self.mac(head, digest))


def digest_of(payload: Bytes) -> bytes:
    """Return what stands for a payload."""
    return hashlib.sha256(payload).digest()
