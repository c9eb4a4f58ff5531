"""API keys from a file that may change while the server runs."""

import hashlib
import hmac
import logging
import os
from dataclasses import dataclass
from pathlib import Path

from mbd_core.serving.api.errors import ApiError, clip

SCHEME = "Bearer"
SHORTEST = 16  # characters of a key
ADMINISTRATOR = "administrator"

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Key:
    """A client's key: its SHA-256, and whether its client may administer the server."""

    digest: bytes
    administrator: bool


def read_keys(path: Path) -> dict[str, Key]:
    """Each client's key. A line is `NAME KEY` or `NAME KEY administrator`; `#` begins a comment.

    Raises `ValueError` that names the line and never a key.
    """
    try:
        lines = path.read_text().splitlines()
    except OSError as error:
        raise ValueError(f"API keys: {path} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise ValueError(f"API keys: {path} is not UTF-8: {error.reason} at byte {error.start}") from None
    keys: dict[str, Key] = {}
    for number, line in enumerate(lines, start=1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        place = f"API keys: {path}, line {number}"
        if len(words) not in (2, 3) or words[2:] not in ([], [ADMINISTRATOR]):
            raise ValueError(
                f"{place}: {len(words)} words; write a client's name and its key, and '{ADMINISTRATOR}' after the key "
                "of an administrator"
            )
        name, key = words[:2]
        if name in keys:
            raise ValueError(f"{place}: client '{name}' stands there twice; give one of them another name")
        if len(key) < SHORTEST:
            raise ValueError(f"{place}: the key has {len(key)} characters; it needs at least {SHORTEST}")
        keys[name] = Key(digest=hashlib.sha256(key.encode()).digest(), administrator=len(words) == 3)
    if not keys:
        raise ValueError(f"API keys: {path} holds no key; nobody could be served")
    return keys


class ApiKeys:
    """The clients that may send requests.

    A changed file is read again; if it is malformed, the last keys stay valid.
    """

    def __init__(self, path: Path) -> None:
        """Raises the `ValueError` of `read_keys`."""
        self._path, self._state = path, _state(path)
        self._keys = read_keys(path)

    def client(self, authorization: str) -> str:
        """The client whose key an `Authorization` header holds; `ApiError` (401) for any other header.

        All keys are compared, each in constant time.
        """
        self._refresh()
        scheme, _, key = authorization.partition(" ")
        digest = hashlib.sha256(key.strip().encode()).digest()
        names = [name for name, entry in self._keys.items() if hmac.compare_digest(entry.digest, digest)]
        if not names or scheme.lower() != SCHEME.lower():
            raise ApiError(
                401,
                "an API key of this server is needed; send it as 'Authorization: Bearer KEY' or 'x-api-key: KEY'",
                code="invalid_api_key",
                headers={"WWW-Authenticate": SCHEME},
            )
        return names[0]

    def has(self, authorization: str) -> bool:
        """Whether an `Authorization` header holds a key."""
        try:
            self.client(authorization)
        except ApiError:
            return False
        return True

    def administrator(self, authorization: str) -> str:
        """The client, if its key is an administrator's; `ApiError` (401, 403) otherwise."""
        name = self.client(authorization)
        if not self._keys[name].administrator:
            raise ApiError(403, f"the key of '{clip(name)}' is no administrator's", code="not_an_administrator")
        return name

    def _refresh(self) -> None:
        state = _state(self._path)
        if state == self._state:
            return
        self._state = state
        try:
            self._keys = read_keys(self._path)
        except ValueError as error:
            log.error("%s; the keys that were read before stay valid", error)


def _state(path: Path) -> tuple[int, int, int] | None:
    """A value that changes when the file, or the target of a link, changes; `None` if there is no file."""
    try:
        now = os.stat(path)
    except OSError:
        return None
    return now.st_ino, now.st_mtime_ns, now.st_size
