"""Check that Perfetto and chrome://tracing can load a trace."""

from __future__ import annotations


def check_trace(document):
    """Assert that a trace conforms to the Trace Event Format, in the parts that are used."""
    assert set(document) == {"traceEvents", "displayTimeUnit", "otherData"}
    before, named, tracks = 0.0, {}, {}
    for event in document["traceEvents"]:
        assert isinstance(event["pid"], int) and isinstance(event["tid"], int) and isinstance(event["name"], str)
        if event["ph"] == "M":
            key = "sort_index" if event["name"].endswith("_sort_index") else "name"
            assert event["name"] in {"process_name", "process_sort_index", "thread_name", "thread_sort_index"}
            assert list(event["args"]) == [key]
            assert not tracks, "names come first"
            named[event["name"], event["pid"], event["tid"]] = event["args"][key]
            continue
        assert event["ph"] == "X"
        assert event["ts"] >= before and event["dur"] >= 0
        before = event["ts"]
        tracks.setdefault((event["pid"], event["tid"]), []).append((event["ts"], event["ts"] + event["dur"]))
    for (pid, tid), slices in tracks.items():
        assert ("process_name", pid, 0) in named and ("thread_name", pid, tid) in named
        open_ = []
        for start, end in slices:  # a viewer stacks the slices of a track: they must be nested or disjoint
            while open_ and open_[-1] <= start + 0.002:
                open_.pop()
            assert not open_ or end <= open_[-1] + 0.002, (named["thread_name", pid, tid], start, end, open_)
            open_.append(end)
    return named
