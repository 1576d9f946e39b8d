"""HTTP basic authentication: no bcrypt run per scrape, and no telling which users exist."""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import re
import secrets
import threading
from collections import OrderedDict
from collections.abc import Mapping

_HASH = re.compile(r"\$2[aby]\$(0[4-9]|1[0-9]|2[0-9]|3[01])\$[./A-Za-z0-9]{53}")
_CACHED = 100
_MAX_PASSWORD_BYTES = 72  # bcrypt ignores what comes after, and its Python library refuses more


def bcrypt_hash(value: object) -> bytes:
    """A bcrypt hash out of a configuration file.

    Raises:
        ValueError: it is none, or the bcrypt package is not installed.
    """
    if not isinstance(value, str) or _HASH.fullmatch(value) is None:
        raise ValueError("not a bcrypt hash ($2b$10$…), which htpasswd -nBC 10 makes")
    try:
        import bcrypt  # noqa: F401 - an extra that most installations do without
    except ImportError:
        raise ValueError("basic_auth_users needs the bcrypt package: pip install 'kvwatch[auth]'") from None
    return value.encode()


class BasicAuth:
    """Users, at least one, and the bcrypt hashes of their passwords.

    Outcomes are cached under a keyed hash that is worth nothing outside this process, right and wrong ones
    apart so that guesses cannot crowd out a scraper. bcrypt runs once at a time: guessing takes one core at
    most, and whoever is in the cache does not wait for it. A user who does not exist takes as long to refuse
    as one who does.
    """

    def __init__(self, users: Mapping[str, bytes]) -> None:
        self._users = dict(users)
        self._decoy = max(self._users.values(), key=_cost)
        self._key = secrets.token_bytes(32)
        self._known = {True: _Recent(), False: _Recent()}
        self._one_at_a_time = threading.Lock()

    def admits(self, authorization: str) -> bool:
        """Whether an ``Authorization`` header names a user and the right password."""
        credentials = _credentials(authorization)
        if credentials is None:
            return False
        user, password = credentials
        entry = hmac.digest(self._key, b"\0".join((user, password)), hashlib.sha256)
        for outcome, recent in self._known.items():
            if entry in recent:
                return outcome
        stored = self._users.get(user.decode(errors="replace"))
        with self._one_at_a_time:
            matches = _matches(password, stored or self._decoy)
        outcome = matches and stored is not None
        self._known[outcome].add(entry)
        return outcome


class _Recent:
    """A bounded set that forgets what was not asked for longest."""

    def __init__(self) -> None:
        self._entries: OrderedDict[bytes, None] = OrderedDict()
        self._lock = threading.Lock()

    def __contains__(self, entry: bytes) -> bool:
        with self._lock:
            known = entry in self._entries
            if known:
                self._entries.move_to_end(entry)
            return known

    def add(self, entry: bytes) -> None:
        with self._lock:
            self._entries[entry] = None
            while len(self._entries) > _CACHED:
                self._entries.popitem(last=False)


def _cost(stored: bytes) -> int:
    return int(stored[4:6])


def _credentials(authorization: str) -> tuple[bytes, bytes] | None:
    scheme, _, encoded = authorization.partition(" ")
    if scheme.lower() != "basic":
        return None
    try:
        user, colon, password = base64.b64decode(encoded.strip(), validate=True).partition(b":")
    except (binascii.Error, ValueError):
        return None
    return (user, password) if colon else None


def _matches(password: bytes, stored: bytes) -> bool:
    import bcrypt

    if len(password) > _MAX_PASSWORD_BYTES or b"\0" in password:
        return False
    return bcrypt.checkpw(password, stored)
