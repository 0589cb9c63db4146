"""API keys: who asks, what they may do, and how much of it.

``--api-key SECRET`` makes a key named ``key-1``, ``key-2``, … without limits and without admin
rights. ``--api-keys-file`` names a TOML or JSON file with a list ``keys``; each entry has a
``name``, a ``key`` (or its hex digest, ``key_sha256``), and may have ``admin``,
``requests_per_minute``, ``tokens_per_minute``, ``max_concurrent``, ``priority`` (added to that of
the key's requests, with ``--scheduling-policy priority``) and ``weight`` (its share when others
wait too). Without any key everybody is the one anonymous key, which may do everything.

Tokens are charged as they really are: the prompt's when a request is let in, the output's when it
ends. So a long answer can leave a debt, which the next requests wait for.
"""

import hashlib
import hmac
import math
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated

import msgspec
from starlette.requests import Request

from pageserve.api.errors import APIError
from pageserve.config import ConfigError

# Routes that take a slot and a request of the key's allowance: those that cost work.
LIMITED_PATHS = frozenset(
    {
        "/v1/chat/completions", "/v1/completions", "/apply-template",
        "/tokenize", "/v1/tokenize", "/detokenize", "/v1/detokenize",
    }
)  # fmt: skip

_Positive = Annotated[int, msgspec.Meta(ge=1)]


class KeyEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An entry of the key file."""

    name: Annotated[str, msgspec.Meta(min_length=1, max_length=64)]
    key: Annotated[str, msgspec.Meta(min_length=1)] | None = None
    key_sha256: Annotated[str, msgspec.Meta(pattern="^[0-9a-fA-F]{64}$")] | None = None
    admin: bool = False
    requests_per_minute: _Positive | None = None
    tokens_per_minute: _Positive | None = None
    max_concurrent: _Positive | None = None
    priority: Annotated[int, msgspec.Meta(ge=-(2**31), le=2**31)] = 0
    weight: Annotated[int, msgspec.Meta(ge=1, le=1000)] = 1

    @property
    def digest(self) -> bytes:
        """SHA-256 of the secret."""
        if self.key_sha256 is not None:
            return bytes.fromhex(self.key_sha256)
        assert self.key is not None
        return digest_of(self.key.encode())


class _KeyFile(msgspec.Struct, forbid_unknown_fields=True):
    keys: list[KeyEntry]


class TokenBucket:
    """``per_minute`` things a minute, all of them at once if nothing was taken for a minute."""

    def __init__(self, per_minute: int) -> None:
        self.per_minute = per_minute
        self._level = float(per_minute)
        self._at = time.monotonic()

    @property
    def level(self) -> float:
        """What may be taken now; negative after an overdraft."""
        now = time.monotonic()
        refill = (now - self._at) * self.per_minute / 60
        self._level = min(self.per_minute, self._level + refill)
        self._at = now
        return self._level

    def take(self, amount: int) -> None:
        """Take something whether it is there or not."""
        self._level = self.level - amount

    def seconds_until(self, amount: float) -> float:
        """Return how long until the level is ``amount``: 0.0 if it is there already."""
        return max(0.0, (amount - self.level) * 60 / self.per_minute)


class ApiKey:
    """A key and what is left of its allowance."""

    def __init__(self, entry: KeyEntry) -> None:
        self.name = entry.name
        self.admin = entry.admin
        self.priority = entry.priority
        self.weight = entry.weight
        self.max_concurrent = entry.max_concurrent
        self.num_active = 0
        rpm, tpm = entry.requests_per_minute, entry.tokens_per_minute
        self.requests = None if rpm is None else TokenBucket(rpm)
        self.tokens = None if tpm is None else TokenBucket(tpm)

    def take_request(self) -> None:
        """Count a request; raises the 429 of one too many. Give it back with :meth:`done`."""
        if self.requests is not None and (wait := self.requests.seconds_until(1)):
            limit = self.requests.per_minute
            raise _too_many(f"{self.name} may send {limit} requests per minute", wait)
        if self.max_concurrent is not None and self.num_active >= self.max_concurrent:
            raise _too_many(f"{self.name} may run {self.max_concurrent} requests at a time", 1)
        if self.requests is not None:
            self.requests.take(1)
        self.num_active += 1

    def done(self) -> None:
        """Note that a request that was counted has been answered."""
        self.num_active -= 1

    def check_tokens(self, amount: int) -> None:
        """Raise the 429 of a prompt of more tokens than the key has left."""
        if self.tokens is None:
            return
        limit = self.tokens.per_minute
        if amount > limit:
            error = _too_many(
                f"the request has {amount} tokens, but {self.name} may use {limit} per minute", 60
            )
            error.headers["x-should-retry"] = "false"
            raise error
        if wait := self.tokens.seconds_until(amount):
            raise _too_many(f"{self.name} may use {limit} tokens per minute", wait)

    def charge(self, amount: int) -> None:
        """Take tokens off the allowance."""
        if self.tokens is not None:
            self.tokens.take(amount)

    @property
    def is_limited(self) -> bool:
        """Whether answers to this key carry x-ratelimit headers."""
        return self.requests is not None or self.tokens is not None

    def headers(self) -> list[tuple[bytes, bytes]]:
        """Return OpenAI's x-ratelimit headers for each limit that the key has."""
        headers = []
        for what, bucket in ((b"requests", self.requests), (b"tokens", self.tokens)):
            if bucket is not None:
                full = _duration(bucket.seconds_until(bucket.per_minute))
                headers += [
                    (b"x-ratelimit-limit-" + what, b"%d" % bucket.per_minute),
                    (b"x-ratelimit-remaining-" + what, b"%d" % max(0, int(bucket.level))),
                    (b"x-ratelimit-reset-" + what, full.encode()),
                ]
        return headers


class KeyRing:
    """All keys of a server."""

    def __init__(self, entries: Sequence[KeyEntry]) -> None:
        """Raises :class:`ConfigError` for entries without a secret or with a name in use."""
        self.is_open = not entries
        self.anonymous = ApiKey(KeyEntry("anonymous", admin=True))
        self._keys: list[tuple[bytes, ApiKey]] = []
        for entry in entries:
            if (entry.key is None) == (entry.key_sha256 is None):
                raise ConfigError(f"the key {entry.name!r} needs either key or key_sha256")
            if any(key.name == entry.name for _, key in self._keys):
                raise ConfigError(f"two keys are named {entry.name!r}")
            if any(digest == entry.digest for digest, _ in self._keys):
                raise ConfigError(f"the key {entry.name!r} has the secret of another one")
            self._keys.append((entry.digest, ApiKey(entry)))

    @property
    def keys(self) -> list[ApiKey]:
        """Every key that a request can have."""
        return [self.anonymous] if self.is_open else [key for _, key in self._keys]

    def refuse_priorities(self) -> None:
        """Raise the :class:`ConfigError` of keys with a priority where none is kept."""
        for key in self.keys:
            if key.priority:
                raise ConfigError(
                    f"the key {key.name!r} has a priority, which needs --scheduling-policy priority"
                )

    def find(self, credentials: Iterable[bytes]) -> ApiKey | None:
        """Return the key that one of the secrets belongs to."""
        found = None
        # All are compared, on digests of one length: time tells nothing about them.
        for credential in credentials:
            digest = digest_of(credential)
            for known, key in self._keys:
                if hmac.compare_digest(digest, known):
                    found = key
        return found


def load_keys(secrets: Sequence[str], path: str | None) -> KeyRing:
    """Return the keys given by flags and in the file; raises :class:`ConfigError`, also for a
    secret that no header could carry as it is: an empty one, one with spaces around it."""
    for secret in secrets:
        if problem := _unusable(secret):
            raise ConfigError(f"--api-key {problem}")
    entries = [KeyEntry(f"key-{i + 1}", secret) for i, secret in enumerate(dict.fromkeys(secrets))]
    if path is not None:
        entries += _read(Path(path))
    return KeyRing(entries)


def _read(path: Path) -> list[KeyEntry]:
    decode = msgspec.json.decode if path.suffix == ".json" else msgspec.toml.decode
    try:
        entries = decode(path.read_bytes(), type=_KeyFile).keys
    except OSError as error:
        raise ConfigError(f"--api-keys-file {path}: {error.strerror}") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"--api-keys-file {path}: {error}") from None
    if not entries:
        raise ConfigError(f"--api-keys-file {path} holds no keys")
    for entry in entries:
        if entry.key is not None and (problem := _unusable(entry.key)):
            raise ConfigError(f"--api-keys-file {path}: the key {entry.name!r} {problem}")
    return entries


def _unusable(secret: str) -> str | None:
    if not secret.strip():
        return "must not be empty"
    return "must not have spaces around it" if secret != secret.strip() else None


def digest_of(secret: bytes) -> bytes:
    """Return the SHA-256 that stands for a secret."""
    return hashlib.sha256(secret).digest()


def require_admin(http: Request) -> None:
    """Raise the 403 of a request whose key is no admin's."""
    key: ApiKey = http.scope["api_key"]
    if not key.admin:
        raise APIError(
            403, "insufficient_permissions", "this needs an admin key", type="permission_error"
        )


def _too_many(message: str, wait: float) -> APIError:
    return APIError(
        429,
        "rate_limit_exceeded",
        message,
        type="rate_limit_error",
        headers={"retry-after": str(max(1, math.ceil(wait)))},
    )


def _duration(seconds: float) -> str:
    """Return a time as OpenAI writes it: 20ms, 12s, 6m0s."""
    if seconds < 1:
        return f"{math.ceil(seconds * 1000)}ms"
    whole = math.ceil(seconds)
    return f"{whole}s" if whole < 60 else f"{whole // 60}m{whole % 60}s"
