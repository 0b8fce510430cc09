"""Manifests and headers of other contents, with valid checksums: an error that names the file and the field."""

from __future__ import annotations

import contextlib
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.faults import edited, rewritten
from helpers.forged import bounded_memory, copied, mutations, outcomes, read_everything, save_as, state_of

import hvdkit as hk
from hvdkit import cluster
from hvdkit.checkpoint import bounds
from hvdkit.checkpoint.generators import numpy_state, python_state, state_to_json
from hvdkit.checkpoint.manifest import NAME, Manifest, step_name
from hvdkit.checkpoint.writing import Snapshot
from hvdkit.commands import cli
from hvdkit.errors import printable

TIB = 2**40


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    return save_as(tmp_path_factory.mktemp("whole") / step_name(20), size=2, rows=7)


@pytest.fixture
def one(whole, tmp_path) -> Path:
    return copied(whole, tmp_path)


def part(content: dict[str, Any]) -> dict[str, Any]:
    return content["variables"]["table"]["parts"][0]


def weight(content: dict[str, Any]) -> dict[str, Any]:
    return content["variables"]["w"]


def common(content: dict[str, Any]) -> dict[str, Any]:
    return content["files"]["replicated.safetensors"]


FORGED: dict[str, Callable[[dict[str, Any]], object]] = {
    "size: got 1000000000": lambda c: c.update(size=10**9),
    "size: got 1048576, expected the number of ranks that wrote a file": lambda c: c.update(size=2**20),
    "size: got 3": lambda c: c.update(size=3),
    "step: got -1": lambda c: c.update(step=-1),
    "step: got 19, expected 20": lambda c: c.update(step=19),
    "step: got True": lambda c: c.update(step=True),
    r"step: got 1\.5": lambda c: c.update(step=1.5),
    "created: got a list, expected a string": lambda c: c.update(created=[]),
    "created: got '300 characters', expected at most 200": lambda c: c.update(created="x" * 300),
    "versions: got None": lambda c: c.update(versions=None),
    "versions.hvdkit: got 7": lambda c: c.update(versions={"hvdkit": 7}),
    "values: got a list": lambda c: c.update(values=[1]),
    "at most 100 levels": lambda c: c.update(values={"x": json.loads("[" * 200 + "]" * 200)}),
    "rank_values: got a dict, expected an array": lambda c: c.update(rank_values={}),
    r"rank_values\[0\]: got 1": lambda c: c.update(rank_values=[1]),
    "lacks values of rank 0 .'x'": lambda c: c.update(rank_values=["x"]),
    "variables: got None": lambda c: c.update(variables=None),
    "files: got a list": lambda c: c.update(files=[]),
    r"files\['replicated.safetensors'\].bytes: got '1'": lambda c: c["files"]["replicated.safetensors"].update(
        bytes="1"
    ),
    "bytes, but 7 were written": lambda c: common(c).update(bytes=7),
    "files.*got None, expected a value": lambda c: common(c).pop("bytes"),
    "expected the name of a file": lambda c: c["files"].update({"x" * 300: common(c)}),
    r"expected the name of a file.*": lambda c: c["files"].update({"\ud800": common(c)}),
    "characters that UTF-8 can encode": lambda c: c["variables"].update({"\ud800": weight(c)}),
    r"variables.table.kind: got 'x', expected one of": lambda c: c["variables"]["table"].update(kind="x"),
    "kind: got a list": lambda c: c["variables"]["table"].update(kind=["sharded"]),
    "dtype: got 'object'": lambda c: weight(c).update(dtype="object"),
    "dtype: got 'S1000000000'": lambda c: weight(c).update(dtype="S1000000000"),
    "dtype: got a dict": lambda c: weight(c).update(dtype={}),
    r"shape\[0\]: got -5": lambda c: weight(c).update(shape=[-5]),
    r"shape\[0\]: got '5'": lambda c: weight(c).update(shape=["5"]),
    r"shape: got 33, expected at most 32 elements": lambda c: weight(c).update(shape=[1] * 33),
    "expected at most 4611686018427387904 bytes": lambda c: weight(c).update(shape=[2**40, 2**40, 0]),
    r"does not match manifest.json \(got float32\[5\], expected float32\[2, 3\]\)": lambda c: c["variables"][
        "w"
    ].update(shape=[2, 3]),
    r"got float32\[5\], expected int32\[5\]": lambda c: weight(c).update(dtype="int32"),
    "w.shape: got a list, expected at most the .* bytes of all files": lambda c: weight(c).update(shape=[TIB]),
    "partition: got a list": lambda c: c["variables"]["table"].update(partition=[]),
    "has 2 parts, expected 1": lambda c: c["variables"]["table"].update(kind="replicated"),
    "has an index, expected none": lambda c: c["variables"]["table"].update(kind="per_rank"),
    "'w', float32.5. .sharded., .* lies outside: None": lambda c: weight(c).update(kind="sharded"),
    "parts: got None": lambda c: weight(c).update(parts=None),
    "'w', .*, has 0 parts, expected 1": lambda c: weight(c).update(parts=[]),
    r"parts\[0\].index: got 7, expected an array": lambda c: part(c).update(index=7),
    r"index\[0\]: got a list, expected \[start, stop, step\]": lambda c: part(c).update(index=[[0, 7, 0], [0, 2, 1]]),
    r"index\[1\]: got a list": lambda c: part(c).update(index=[[0, 7, 2], [0, 2]]),
    r"index\[0\]: got a list, .* ": lambda c: part(c).update(index=[[-2, 7, 2], [0, 2, 1]]),
    "lies outside": lambda c: part(c).update(index=[[0, 9, 2], [0, 2, 1]]),
    "lies outside.*": lambda c: part(c).update(index=[[0, 7, 2]]),
    "in shard-00000-of-00002.safetensors and again in": lambda c: part(c).update(index=[[0, 7, 1], [0, 2, 1]]),
    "and again": lambda c: part(c).update(index=[[1, 7, 2], [0, 2, 1]]),
    "has two parts in one file": lambda c: c["variables"]["table"]["parts"].extend(50 * [part(c)]),
    "names 1503 files, and its folder has 4": lambda c: c["files"].update({f"f{i}": common(c) for i in range(1500)}),
    "is not covered: 2 of 14": lambda c: part(c).update(index=[[0, 6, 2], [0, 2, 1]]),
    "file: got 5": lambda c: part(c).update(file=5),
    "is in nowhere, which is not among the files": lambda c: part(c).update(file="nowhere"),
    "checksum: got 'zz'": lambda c: part(c).update(checksum="zz"),
    "'table' does not match manifest.json": lambda c: part(c).update(checksum="0" * 32),
    "of rank 0 is in shard-00001": lambda c: c["variables"]["mean"]["parts"].reverse(),
    "format: got 'x'": lambda c: c.update(format="x"),
    "format_version: got '2'": lambda c: c.update(format_version="2"),
    "has format version 3, and this hvdkit": lambda c: c.update(format_version=3),
    r"rank_values: got a list, expected an object": lambda c: c.update(format_version=1),
    "rank_values.r: got 1, expected a value for each": lambda c: c.update(format_version=1, rank_values={"r": [1]}),
}
HEADERS: dict[str, Callable[[dict[str, Any]], object]] = {
    r"shape\[0\]: got -4": lambda e: e["table"].update(shape=[-4, 2]),
    r"got float32\[2, 4\], expected float32\[4, 2\]": lambda e: e["table"].update(shape=[2, 4]),
    r"got int32\[4, 2\], expected float32": lambda e: e["table"].update(dtype="I32"),
    "dtype: got 'F31'": lambda e: e["table"].update(dtype="F31"),
    "shape: got 'x'": lambda e: e["table"].update(shape="x"),
    "data_offsets: got 3, expected 2 elements": lambda e: e["table"].update(data_offsets=[0, 1, 2]),
    "data_offsets: got '0 to 1', expected those of 32 bytes": lambda e: e["table"].update(data_offsets=[0, 1]),
    "expected at most 4611686018427387904 bytes": lambda e: e["table"].update(shape=[2**62, 2**62]),
    "table: got a list, expected an object": lambda e: e.update(table=[]),
    "starts at byte": lambda e: e["table"].update(data_offsets=[2**40, 2**40 + 32]),
    "no checksum of 16 digits for each": lambda e: e["__metadata__"].update({"xxh3_64 table": "0"}),
    "no checksum of 16 digits": lambda e: e["__metadata__"].update({"xxh3_64 table": "\u00e9" * 16}),
    "checksum differs": lambda e: e["__metadata__"].update({"xxh3_64 table": "0" * 16}),
    "'table' has no checksums": lambda e: e["__metadata__"].pop("xxh3_64 table"),
    "__metadata__: .*: got 5, expected a string": lambda e: e["__metadata__"].update({"xxh3_64 table": 5}),
    "was not written by hvdkit": lambda e: e.pop("__metadata__"),
    "__metadata__: got a list": lambda e: e.update(__metadata__=[]),
    "'mean' starts at byte 32, expected 0": lambda e: e.pop("table"),
    "rank_values: got 5, expected an object": lambda e: e["__metadata__"].update(rank_values="5"),
    "is damaged .RecursionError|levels of nesting": lambda e: e["__metadata__"].update(
        rank_values='{"x":' + "[" * 10**5
    ),
    "is damaged .JSONDecodeError": lambda e: e["__metadata__"].update(rank_values="{"),
    "lacks values of rank 0": lambda e: e["__metadata__"].pop("rank_values"),
}


def test_forged_manifests_are_damage(whole, tmp_path):
    with bounded_memory():
        for number, (expected, change) in enumerate(FORGED.items()):
            (tmp_path / str(number)).mkdir()
            path = copied(whole, tmp_path / str(number))
            edited(path, change)
            with pytest.raises(hk.CheckpointError, match=expected) as caught:
                read_everything(path)
            is_newer = "format version" in expected
            assert isinstance(caught.value, hk.CorruptCheckpointError) != is_newer, expected
            assert f"{path}/" in str(caught.value), caught.value
            assert outcomes(path), expected
            assert (
                hk.checkpoint.latest(path.parent) is None
                or "match" in expected
                or "lacks" in expected
                or "got f" in expected
            )


@pytest.mark.full
def test_forged_headers_are_damage(whole, tmp_path):
    shard = "shard-00000-of-00002.safetensors"
    with bounded_memory():
        for number, (expected, change) in enumerate(HEADERS.items()):
            (tmp_path / str(number)).mkdir()
            path = copied(whole, tmp_path / str(number))
            rewritten(path, shard, change)
            with pytest.raises(hk.CorruptCheckpointError, match=expected) as caught:
                read_everything(path)
            assert f"{path}/{shard}: " in str(caught.value)
            assert outcomes(path), expected


def test_sizes_that_a_file_claims_are_not_believed(one, monkeypatch):
    """The manifest is a sparse file of 1 TiB, or has more than the limit; a header is longer than its file."""
    text = (one / NAME).read_bytes()
    with bounded_memory():
        with (one / NAME).open("r+b") as file:
            file.truncate(TIB)
        for reader in (Manifest.load, hk.checkpoint.inspect, hk.checkpoint.verify):
            with pytest.raises(hk.CorruptCheckpointError, match=r"manifest.json: has 1099511627776 bytes, expected at"):
                reader(one)
        (one / NAME).write_bytes(text)
        monkeypatch.setattr(bounds, "MANIFEST_BYTES", 1000)
        monkeypatch.setattr(bounds, "MANIFEST_BYTES_PER_FILE", 0)
        with pytest.raises(hk.CorruptCheckpointError, match=rf"has {len(text)} bytes, expected at most 1000"):
            Manifest.load(one)
        with pytest.raises(hk.CheckpointError, match=r"would have \d+ bytes, expected at most 1000; save"):
            Manifest(step=1, size=1, values={"x": "y" * 3000}).write(one)
        monkeypatch.undo()
        shard = one / "shard-00001-of-00002.safetensors"
        content = shard.read_bytes()
        for count in (len(content) - 7, 10**8, 2**63, 2**64 - 1):
            shard.write_bytes(count.to_bytes(8, "little") + content[8:])
            with pytest.raises(hk.CorruptCheckpointError, match="is not a safetensors file"):
                hk.checkpoint.verify(one)


@pytest.mark.full
def test_json_with_more_arrays_than_its_length_explains(one, tmp_path, monkeypatch):
    """``[[],[],...]`` of 30 MB would take 900 MB and most of a minute."""
    manifest = (one / NAME).read_bytes()
    many = b"[" + b"[]," * 8_000_000 + b"1]"
    (one / NAME).write_bytes(many)
    with bounded_memory():
        for reader in (Manifest.load, hk.checkpoint.inspect, hk.checkpoint.verify):
            with pytest.raises(hk.CorruptCheckpointError, match=r"manifest.json: has 8000001 brackets, expected"):
                reader(one)
    (one / NAME).write_bytes(manifest)
    monkeypatch.setattr("hvdkit.checkpoint.schema.JSON_VALUES", 1000)
    dense = [[] for _ in range(3000)]
    with pytest.raises(hk.CheckpointError, match=r"manifest.json: cannot be saved: it has \d+ brackets"):
        Manifest(step=1, size=1, values={"x": dense}).write(tmp_path)
    snapshot = Snapshot.of(state_of(0, 1, 4), 0)
    snapshot.rank_values = {"x": dense}
    with pytest.raises(hk.CheckpointError, match=r"a rank's values cannot be saved: JSON that has \d+ brackets"):
        snapshot.metadata()
    pairs = [[number, number] for number in range(100_000)]  # a history of a few megabytes
    Manifest(step=1, size=1, values={"x": pairs}).write(tmp_path)
    assert Manifest.load(tmp_path).values == {"x": pairs}


def test_a_truncated_file_whose_header_claims_any_size(one):
    """The header of a truncated file shows which tensors are affected, but none of its numbers can be believed."""
    shard = "shard-00000-of-00002.safetensors"

    def claim(entries: dict[str, Any]) -> None:
        entries["table"] |= {"shape": [1, 2**50], "data_offsets": [0, 2**52]}
        entries["mean"]["data_offsets"] = [2**52, 2**52 + 12]
        entries["__metadata__"]["xxh3_64 table"] = "0" * 16

    rewritten(one, shard, claim)

    def agree(content: dict[str, Any]) -> None:
        content["files"][shard]["bytes"] += 2**52 - 32
        content["variables"]["table"] |= {
            "shape": [1, 2**50],
            "parts": [part(content) | {"index": [[0, 1, 1], [0, 2**50, 1]], "checksum": "0" * 32}],
        }

    edited(one, agree)
    with bounded_memory():
        errors = outcomes(one)
    assert len(errors) == 3 and all("(truncated?)" in error for error in errors), errors


def test_what_cannot_be_read_again_is_not_saved(tmp_path):
    """An error of the save, instead of a checkpoint that is damaged from the beginning."""
    deep: Any = 1
    for _ in range(150):
        deep = [deep]
    for values, problem in (
        ({"x": deep}, r"values.x: got '101 levels', expected at most 100 levels"),
        ({"x" * 5000: 1}, "values: got '5000 characters', expected at most 4096"),
        ({"\ud800": 1}, "values: got .*, expected characters that UTF-8 can encode"),
    ):
        with pytest.raises(hk.CheckpointError, match=f"cannot be saved: {problem}"):
            Manifest(step=1, size=1, values=values).write(tmp_path)
    assert not [*tmp_path.iterdir()]
    Manifest(step=1, size=1, values={"x": {10: 1, 9: 2}}).write(tmp_path)  # keys as JSON has them
    assert Manifest.load(tmp_path).values == {"x": {"10": 1, "9": 2}}


def test_ranks_whose_parts_overlap_are_an_error_of_the_save(tmp_path):
    class Overlapping:
        shape, dtype, partition = (4, 2), "float32", "mine"
        local_index = (range(3), range(2))
        local = np.zeros((3, 2), np.float32)

        def assign_local(self, values) -> None:
            raise AssertionError

    with cluster.alone(), pytest.raises(hk.CheckpointError, match=r"'t', .*, is not covered: 2 of 8 .*local_index"):
        hk.checkpoint.save(tmp_path / step_name(1), {"t": Overlapping()})
    assert not [*tmp_path.iterdir()]


def test_states_of_generators_are_checked():
    """NumPy would read memory beyond the 624 numbers."""
    for bits in (np.random.PCG64, np.random.PCG64DXSM, np.random.MT19937, np.random.Philox, np.random.SFC64):
        state = bits(1).state
        saved = json.loads(json.dumps(state_to_json(state)))
        other = bits(2)
        other.state = numpy_state(saved, other.state)
        assert other.random_raw(5).tolist() == bits(1).random_raw(5).tolist()
        for broken in [*mutations(saved), None, 5, [], {}]:
            with contextlib.suppress(hk.CorruptCheckpointError, ValueError):
                other.state = numpy_state(broken, other.state)
                other.random_raw(1000)
    mersenne = json.loads(json.dumps(state_to_json(np.random.MT19937(1).state)))
    for change in ({"pos": 10**6}, {"pos": -1}, {"key": {"array": [1], "dtype": "uint32"}}, {"key": 5}, {"extra": 1}):
        broken = {**mersenne, "state": {**mersenne["state"], **change}}
        with pytest.raises(hk.CorruptCheckpointError, match=r"(pos|key|state): got .*, expected "):
            numpy_state(broken, np.random.MT19937(1).state)
    with pytest.raises(ValueError, match="generator: got 'MT19937', expected 'PCG64'"):
        numpy_state(mersenne, np.random.PCG64(1).state)
    state = random.Random(1).getstate()
    assert python_state(json.loads(json.dumps(state))) == state
    words = list(state[1])
    for broken in ([3, words[1:], None], [3, [*words[:-1], 625], None], [3, [2**32, *words[1:]], None], [3, words], 7):
        with pytest.raises(hk.CorruptCheckpointError, match=r"got .*, expected "):
            python_state(broken)


# --- text for a terminal


def test_text_from_files_is_escaped(one, capfd):
    """Names, dates and notes may contain commands for the terminal."""
    evil = "\x1b]0;title\x07\x9b31m\u202e\n\r"

    def rename(content: dict[str, Any]) -> None:
        content["variables"][f"v{evil}"] = content["variables"].pop("w")
        content["variables"]["table"]["partition"] = evil
        content["values"][evil] = {evil: evil}
        content["created"] = evil
        content["versions"] = {evil: evil}

    def rename_header(entries: dict[str, Any]) -> None:
        entries[f"v{evil}"] = entries.pop("w")
        entries["__metadata__"][f"xxh3_64 v{evil}"] = entries["__metadata__"].pop("xxh3_64 w")

    edited(one, rename)
    export = ["export", "--overwrite", "--to", str(one.parent / "to")]
    for is_whole in (False, True):
        if is_whole:
            rewritten(one, "replicated.safetensors", rename_header)
        for path in (one, one.parent):
            for command, *options in (["inspect"], ["inspect", "--json"], ["verify"], export):
                cli.main(["checkpoint", command, str(path), *options])
        cli.main(["checkpoint", "export", str(one), "--to", str(one.parent / "x"), "--names", "nothing"])
        (one.parent / f".damaged-{one.name}").write_text(evil)
        cli.main(["checkpoint", "inspect", str(one.parent)])
        (one.parent / f".damaged-{one.name}").unlink()
    shown = "".join(capfd.readouterr())
    assert printable(shown, keep="\n") == shown
    assert r"v\x1b]0;title\x07\x9b31m\u202e\n\r" in shown and r"sharded \x1b]0" in shown
    hk.checkpoint.verify(one)


def test_a_name_with_line_ends_adds_no_line_to_an_error(whole, tmp_path):
    """The line could be one that hvdkit writes itself, such as "[rank 0] intact"."""
    logdir = tmp_path / "run\n[rank 0] intact\r\u2028"
    logdir.mkdir()
    path = copied(whole, logdir)

    def rename(content: dict[str, Any]) -> None:
        content["variables"]["v\nintact"] = content["variables"].pop("w")
        content["variables"]["table"]["partition"] = "\nintact"

    edited(path, rename)
    for act in (
        lambda: hk.checkpoint.verify(path),
        lambda: hk.checkpoint.restore(path, {"v\nintact": np.zeros(4, np.float32)}),
        lambda: hk.checkpoint.restore(path, {"table": np.zeros(4, np.float32)}),
        lambda: hk.checkpoint.restore(path, {"other": 1}),
        lambda: hk.checkpoint.restore(logdir / "other", {"other": 1}),
        lambda: hk.checkpoint.inspect(logdir / "other"),
        lambda: hk.checkpoint.save(path / "manifest.json" / "x", {"other": 1}),
        lambda: hk.checkpoint.save(logdir / "step-000000001", {"other": 1}, step=2),
        lambda: hk.checkpoint.export_npy(path, logdir / "to", names=["nothing"]),
    ):
        with cluster.alone(), pytest.raises((hk.HvdkitError, ValueError, OSError)) as error:
            act()
        assert str(error.value).isprintable()
    for file in path.glob("*.safetensors"):
        file.unlink()
    with pytest.raises(hk.CorruptCheckpointError) as error:
        hk.checkpoint.verify(path)
    lines = str(error.value).split("\n")
    assert len(lines) > 1 and all(line.startswith(printable(path)) for line in lines), lines
