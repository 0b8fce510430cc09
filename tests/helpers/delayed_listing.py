"""Listings of a store that lag behind its objects, as those of an eventually consistent store do."""

from __future__ import annotations

import http.client
import threading
import time
import urllib.parse
from xml.etree import ElementTree

_NAMESPACE = "{http://s3.amazonaws.com/doc/2006-03-01/}"


class DelayedListings:
    """Answers listings with the objects that there were some seconds ago; reads of objects are not delayed.

    Args:
        target: the port of the S3 server.
    """

    def __init__(self, target: int) -> None:
        self._target = target
        self._lock = threading.Lock()
        self._before: list[tuple[float, str, int | None]] = []  # time, path and size of what a request changes

    def note_change(self, path: str) -> None:
        """Record what an object is before a request that may change it."""
        path = path.partition("?")[0]
        connection = http.client.HTTPConnection("127.0.0.1", self._target)
        connection.request("HEAD", path)
        response = connection.getresponse()
        size = int(response.headers["Content-Length"]) if response.status == 200 else None
        connection.close()
        with self._lock:
            self._before.append((time.monotonic(), urllib.parse.unquote(path), size))

    def answer(self, path: str, seconds: float) -> bytes:
        """Return the XML of a listing (``GET /bucket?list-type=2&...``) as it would have been some seconds ago."""
        bucket, _, query = path.partition("?")
        options = dict(urllib.parse.parse_qsl(query))
        prefix = options.get("prefix", "")
        found = self._listed(bucket, prefix)
        since = time.monotonic() - seconds
        with self._lock:
            changed = [(key, size) for when, key, size in self._before if when > since]
        for key, size in reversed(changed):  # the oldest of them last
            name = key.removeprefix(f"{bucket.rstrip('/')}/")
            if name.startswith(prefix):
                found.pop(name, None)
                if size is not None:
                    found[name] = size
        return _listing(found, prefix, options.get("delimiter", ""))

    def _listed(self, bucket: str, prefix: str) -> dict[str, int]:
        connection = http.client.HTTPConnection("127.0.0.1", self._target)
        connection.request("GET", f"{bucket}?list-type=2&prefix={urllib.parse.quote(prefix)}")
        root = ElementTree.fromstring(connection.getresponse().read())
        connection.close()
        entries = root.findall(f"{_NAMESPACE}Contents")
        return {
            entry.findtext(f"{_NAMESPACE}Key", ""): int(entry.findtext(f"{_NAMESPACE}Size", "0")) for entry in entries
        }


def _listing(found: dict[str, int], prefix: str, delimiter: str) -> bytes:
    folders = set()
    parts = []
    for key, size in sorted(found.items()):
        inside = key.removeprefix(prefix)
        if delimiter and delimiter in inside:
            folders.add(prefix + inside.partition(delimiter)[0] + delimiter)
        else:
            times = "<LastModified>2020-01-01T00:00:00.000Z</LastModified>"
            parts.append(f"<Contents><Key>{urllib.parse.quote(key)}</Key>{times}<Size>{size}</Size></Contents>")
    parts += [f"<CommonPrefixes><Prefix>{urllib.parse.quote(name)}</Prefix></CommonPrefixes>" for name in folders]
    head = f"<KeyCount>{len(parts)}</KeyCount><MaxKeys>1000</MaxKeys><IsTruncated>false</IsTruncated>"
    text = f'<ListBucketResult xmlns="{_NAMESPACE[1:-1]}">{head}<EncodingType>url</EncodingType>{"".join(parts)}'
    return f"{text}</ListBucketResult>".encode()
