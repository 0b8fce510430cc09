"""Requests ranges of remote files, and compares the answers with the requests.

Proxies and servers answer with other ranges than those that were requested, or with another version of the file. Their
answers say so: Content-Range, total length and ETag. Source: RFC 9110, sections 8.8.3 and 14.4.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, TypeAlias

from hvdkit.data.files.filesystems import retrying
from hvdkit.data.files.listing import File
from hvdkit.errors import DataError, describe

if TYPE_CHECKING:
    from fsspec import AbstractFileSystem

_CONTENT_RANGE = re.compile(r"\s*bytes\s+(\d+)-(\d+)/(\d+|\*)\s*", re.IGNORECASE)
_COPY = "copy the files to a disk, or read them without the proxy"
_Request: TypeAlias = "Callable[[AbstractFileSystem, str, File, int, int], Awaitable[bytes]]"
"""Returns the bytes from a start to a stop of a file; at most one more if the server sends more."""


def read_range(filesystem: AbstractFileSystem, name: str, file: File, start: int, stop: int) -> bytes:
    """Return the bytes ``start`` to ``stop`` of a remote file.

    The answers of HTTP servers, S3 and GCS are checked for their range, the length of the whole file, and its tag or
    generation, and are a DataError if these are others; those of other file systems are checked for their length.
    """
    request = _request_of(filesystem)

    def attempt(**options: object) -> bytes:
        if request is None:
            data = filesystem.cat_file(name, start=start, end=stop, **options)
        else:
            import fsspec.asyn

            data = fsspec.asyn.sync(filesystem.loop, request, filesystem, name, file, start, stop, **options)
        if len(data) > stop - start:
            raise _without_ranges(file, start, stop)
        if len(data) < stop - start:  # a connection that was closed early
            raise ConnectionError(f"{len(data)} bytes instead of {stop - start}")
        return bytes(data)

    return retrying(filesystem, attempt)


def _request_of(filesystem: AbstractFileSystem) -> _Request | None:
    """Return how to get a range with its headers, which ``cat_file`` drops; None for other file systems.

    The type counts, because the file systems of fsspec's chains have all attributes of those that they wrap.
    """
    from fsspec.implementations.http import HTTPFileSystem

    kind = type(filesystem)
    if issubclass(kind, HTTPFileSystem):
        return _from_http
    if hasattr(kind, "_call_s3"):
        return _from_s3
    if "gs" in kind.protocol and hasattr(kind, "_call") and hasattr(kind, "url"):
        return _from_gcs
    return None


async def _from_http(filesystem: AbstractFileSystem, name: str, file: File, start: int, stop: int) -> bytes:
    options = dict(filesystem.kwargs)
    headers = {**options.pop("headers", {}), **_range(start, stop), "Accept-Encoding": "identity"}
    session = await filesystem.set_session()
    async with session.get(filesystem.encode_url(name), headers=headers, **options) as answer:
        if answer.status == 404:
            raise FileNotFoundError(name)
        if answer.status == 416:
            raise DataError(f"{file.url} has changed since it was listed: it ends before byte {stop}")
        answer.raise_for_status()
        if (encoding := answer.headers.get("Content-Encoding", "identity")) not in ("identity", ""):
            raise DataError(f"{file.url}: the server compresses what it sends ({encoding}); {_COPY}")
        _check(file, start, stop, answer.headers.get("Content-Range"), answer.headers.get("ETag"))
        return await _received(answer.content.read, stop - start)


async def _from_s3(filesystem: AbstractFileSystem, name: str, file: File, start: int, stop: int) -> bytes:
    bucket, key, version = filesystem.split_path(name)
    options = {"VersionId": version} if version else {}
    answer = await filesystem._call_s3("get_object", Bucket=bucket, Key=key, **_range(start, stop), **options)
    try:
        _check(file, start, stop, answer.get("ContentRange"), answer.get("ETag"))
        return await _received(answer["Body"].read, stop - start)
    finally:
        answer["Body"].close()


async def _from_gcs(filesystem: AbstractFileSystem, name: str, file: File, start: int, stop: int) -> bytes:
    headers, data = await filesystem._call("GET", filesystem.url(name), headers=_range(start, stop))
    generation = headers.get("X-Goog-Generation", file.version)
    if file.version.isdigit() and generation != file.version:  # otherwise it is a time
        raise _changed(file, "generation", generation)
    _check(file, start, stop, headers.get("Content-Range"), headers.get("ETag"))
    return bytes(data)


def _range(start: int, stop: int) -> dict[str, str]:
    return {"Range": f"bytes={start}-{stop - 1}"}


async def _received(read: Callable[[int], Awaitable[bytes]], size: int) -> bytes:
    """Return what a server sends, up to one byte more than ``size``."""
    data = bytearray()
    while len(data) <= size and (part := await read(size + 1 - len(data))):
        data += part
    return bytes(data)


def _check(file: File, start: int, stop: int, content_range: str | None, tag: str | None) -> None:
    """Raise DataError if an answer is another range than the requested one, or of another version of the file."""
    if tag and file.version.endswith('"') and _strong(tag) != _strong(file.version):  # otherwise it is a time
        raise _changed(file, "tag", tag)
    if content_range is None:
        if (start, stop) != (0, file.size):
            raise _without_ranges(file, start, stop)
        return
    found = _CONTENT_RANGE.fullmatch(content_range)
    total = found[3] if found else "*"
    if total not in ("*", str(file.size)):
        raise DataError(f"{file.url} has changed since it was listed: {file.size} bytes, then {total} bytes")
    if found is None or (int(found[1]), int(found[2])) != (start, stop - 1):
        got = f"an answer with {content_range!r}"
        expected = f"'bytes {start}-{stop - 1}/{file.size}', as requested"
        raise DataError(describe(file.url, got, expected, _COPY))


def _changed(file: File, what: str, then: str) -> DataError:
    return DataError(f"{file.url} has changed since it was listed: its {what} was {file.version}, then {then}")


def _strong(tag: str) -> str:
    """Return a tag without the mark of a weak one, which servers and proxies add to answers."""
    return tag.removeprefix("W/")


def _without_ranges(file: File, start: int, stop: int) -> DataError:
    where = f"bytes {start} to {stop} of {file.url}"
    return DataError(f"{where} could not be read: the server does not know ranges; copy the files to a disk")
