"""The error tree: one class per answer a caller can give.

Every error carries the same optional fields, so that a message, a JSON report and a test read the
same facts: ``path`` (file), ``tensor``, ``array``, ``index``, ``value``, ``expected``, ``phase``; where several things
are wrong, ``count`` of a ``unit`` and the ``first``; ``found`` and the ``limit`` it exceeds; ``hint``, ``reasons``.
``exit_code`` follows sysexits, so scripts can branch on it: 65 give up on this file, 69/73/74/75
environment, 78 raise a limit, 3 choose another format.
"""

from __future__ import annotations

from typing import Any

_LONGEST = 200


def printable(text: object, limit: int = _LONGEST) -> str:
    """``text`` with control, bidi and surrogate characters escaped and cut at ``limit`` characters."""
    whole = str(text)[: limit + 1]
    if not whole.isprintable():  # surrogates are not printable either
        whole = "".join(ch if ch.isprintable() else ch.encode("unicode_escape").decode("ascii") for ch in whole)
    return whole if len(whole) <= limit else whole[: limit - 3] + "..."


class SpformatError(Exception):
    """Root of every error this package raises on purpose."""

    exit_code = 70

    def __init__(self, message: str, **fields: Any) -> None:
        super().__init__(message)
        self.message = message
        self.fields: dict[str, Any] = {k: v for k, v in fields.items() if v is not None}

    @property
    def code(self) -> str:
        return type(self).__name__

    def __getattr__(self, name: str) -> Any:
        if name in _FIELDS:
            return self.__dict__.get("fields", {}).get(name)
        raise AttributeError(name)

    def at(self, **fields: Any) -> SpformatError:
        """Add what an outer layer knows (file, tensor) without overwriting what is there; returns self."""
        for key, value in fields.items():
            if value is not None:
                self.fields.setdefault(key, value)
        return self

    def where(self) -> str:
        """``file: tensor 'w'`` as far as known: the prefix of the human message."""
        parts = []
        if self.fields.get("path") is not None:
            parts.append(printable(self.fields["path"]))
        if self.fields.get("tensor") is not None:
            parts.append(f"tensor '{printable(self.fields['tensor'])}'")
        return ": ".join(parts)

    def __str__(self) -> str:
        where = self.where()
        return f"{where}: {self.message}" if where else self.message

    def __reduce__(self) -> tuple[Any, ...]:
        return (_rebuild, (type(self), self.message, self.fields))

    def to_json(self) -> dict[str, Any]:
        """The same facts for machines: ``{"code", "exit_code", "message", **fields}``."""
        plain = {k: _plain(v) for k, v in self.fields.items()}
        return {"code": self.code, "exit_code": self.exit_code, "message": str(self), **plain}


_FIELDS = frozenset("path tensor array index value expected phase unit count first found limit hint reasons".split())


def _rebuild(cls: type[SpformatError], message: str, fields: dict[str, Any]) -> SpformatError:
    return cls(message, **fields)


def _plain(value: Any) -> Any:
    if isinstance(value, (str, int, float, bool, type(None))):
        return value
    if isinstance(value, (list, tuple)):
        return [_plain(v) for v in value]
    if isinstance(value, dict):
        return {str(k): _plain(v) for k, v in value.items()}
    item = getattr(value, "item", None)
    if callable(item) and getattr(value, "ndim", 1) == 0:
        return _plain(item())
    return str(value)


class UsageError(SpformatError, ValueError):
    """Bad arguments: a parameter out of range, a name that does not exist."""

    exit_code = 2


class InputError(SpformatError, OSError):
    """The input is missing, unreadable or not a regular file."""

    exit_code = 66


class UnreachableError(InputError):
    """A server of the network cannot be reached, or does not answer: try again later."""

    exit_code = 69


class FormatError(SpformatError, ValueError):
    """The file or object is bad: do not retry."""

    exit_code = 65


class ContainerError(FormatError):
    """Header, JSON, offsets or coverage of a safetensors file."""


class VersionError(FormatError):
    """A container or format version this release does not read."""


class DescriptorError(FormatError):
    """The ``spformat`` descriptor breaks its schema."""


class ArrayError(FormatError):
    """dtype, rank or length relations between arrays (checked when an object is built)."""


class InvariantError(FormatError):
    """Array contents break an invariant (checked by ``validate()``)."""


class PointerError(InvariantError):
    """A pointer array does not start at 0, end at its length, or goes down."""


class IndexBoundsError(InvariantError):
    """An index outside the range it may address."""


class OrderError(InvariantError):
    """Indices not strictly increasing, or repeated."""


class PatternError(InvariantError):
    """Positions or metadata that no legal n:m pattern has."""


class IntegrityError(FormatError):
    """A checksum or digest does not match."""


class LimitError(SpformatError, ValueError):
    """A configured limit refused a possibly legitimate input; the message names the flag to raise."""

    exit_code = 78


class StructureError(SpformatError, ValueError):
    """The input is fine, the target format cannot hold it without losing values.

    Fields: ``unit`` ("group", "window", "column", "value", "dtype"), ``count`` of offending units, ``first``
    (coordinates), ``found``, ``limit``, and ``hint`` naming the mask function or flag that would make it fit.
    """

    exit_code = 3


class NoKernelError(SpformatError, NotImplementedError):
    """No kernel takes this problem; ``reasons`` is the list ``explain`` returns."""

    exit_code = 69


class PathError(SpformatError, ValueError):
    """Traversal, symlink escape, unsafe file name."""

    exit_code = 77


class OutputError(SpformatError, OSError):
    """The output cannot be created: it exists, is the input, is not a regular file, or is not allowed."""

    exit_code = 73


class WriteError(SpformatError, OSError):
    """ENOSPC, EDQUOT, EIO, EFBIG while writing; nothing was published."""

    exit_code = 74


class DurabilityUnknown(WriteError):
    """The file is complete, but its directory entry could not be flushed to disk."""


class LockedError(SpformatError, OSError):
    """Another run holds the folder; temporary."""

    exit_code = 75


class DeviceError(SpformatError, RuntimeError):
    """No usable backend or device; the CUDA context is intact."""

    exit_code = 69


class DeviceUnavailable(DeviceError):
    """The backend or device asked for is missing; the message says what to install."""


class DeviceMemoryError(DeviceError):
    """Not enough device memory; the context stays usable."""


class DeviceFault(SpformatError, RuntimeError):
    """A sticky CUDA error: the process must end."""

    exit_code = 70


class InternalError(SpformatError, RuntimeError):
    """A bug in spformat; please report it."""

    exit_code = 70
