"""Atomic writes, digests and files of JSON lines."""

import hashlib
import math

import pytest

from tfscale import files
from tfscale.files import append_json_lines, read_json, read_json_lines, sha256, write_atomically


def test_a_file_is_complete_or_the_one_before(tmp_path):
    path = tmp_path / "file"

    def fail(file):
        file.write(b"half")
        raise OSError("full")

    for contents in ([], ["before"]):
        for content in contents:
            write_atomically(path, content)
        with pytest.raises(OSError, match="full"):
            write_atomically(path, fail)
        assert [p.read_text() for p in tmp_path.iterdir()] == contents
    for content in (b"bytes", "text", lambda file: file.write(b"written")):
        write_atomically(path, content)
    assert path.read_bytes() == b"written"


def test_digests(tmp_path):
    content = bytes(range(256)) * 5000  # more than a block
    (tmp_path / "file").write_bytes(content)
    assert sha256(content) == sha256(tmp_path / "file") == hashlib.sha256(content).hexdigest()


def test_a_damaged_file_of_json_is_as_none(tmp_path):
    path = tmp_path / "file"
    assert read_json(path) == {}
    for content in (b"", b'{"a": 1', b"[1]", b"5", b"\xff\xfe\x00", b"[" * 10**5):
        path.write_bytes(content)
        assert read_json(path) == {}
    write_atomically(path, '{"a": 1}')
    assert read_json(path) == {"a": 1}


def test_json_lines(tmp_path):
    path = tmp_path / "new" / "lines.jsonl"
    assert read_json_lines(path) == []
    append_json_lines(path, [{"loss": math.nan, "parts": [1.5, math.inf]}])
    append_json_lines(path, [{"n": 1}])
    with path.open("ab") as file:
        file.write(b'[1]\n5\n"\xff"\n' + b"[" * 10**5 + b'\n{"n": 2, "cu')
    records = [{"loss": None, "parts": [1.5, None]}, {"n": 1}]
    assert read_json_lines(path) == records
    files.write_json_lines(path, records[1:])
    assert path.read_text() == '{"n": 1}\n'
