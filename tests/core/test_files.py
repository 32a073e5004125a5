"""Files that a stranger may have made."""

import os
import time
from pathlib import Path

import msgspec
import pytest

from trader.core.files import decode_json, open_appending, read_lines, read_regular, replace_file


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with files of every kind; what must not be read or written lies beside it."""
    (tmp_path / "secret").write_text("mine")
    place = tmp_path / "given"
    (place / "inner").mkdir(parents=True)
    (place / "inner" / "file").write_text("theirs")
    (place / "link").symlink_to("../secret")
    (place / "outside").symlink_to("..")
    os.mkfifo(place / "fifo")
    with (place / "endless").open("wb") as sparse:
        sparse.truncate(1 << 40)
    return place


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("link", "Is a link"),
        ("outside/secret", "Not a directory"),
        ("fifo", "Not a regular file"),
        ("endless", "Has more than"),
        ("inner", "Is a directory"),
        ("none", "No such file"),
        ("a\0b", "No name of a file"),
        ("/dev/zero", "Not a regular file"),
    ],
)
def test_what_is_no_plain_file_is_refused_by_name_at_once(folder: Path, name: str, reason: str) -> None:
    file = folder / name
    below = folder if file.is_relative_to(folder) else None
    with pytest.raises(OSError, match=reason) as refused:
        read_regular(file, below=below)
    assert refused.value.filename == str(file)
    with pytest.raises(OSError, match=reason):
        list(read_lines(file, below=below))


def test_links_above_the_folder_that_was_named_are_the_users_own(folder: Path) -> None:
    own = folder.parent / "latest"
    own.symlink_to(folder)
    assert read_regular(own / "inner" / "file", below=own) == b"theirs"


@pytest.mark.parametrize("name", ["link", "fifo"])
def test_nothing_is_written_through_a_link(folder: Path, name: str) -> None:
    with pytest.raises(OSError, match=r"Is a link|Not a regular file"):
        open_appending(folder / name)
    replace_file(folder / name, "new")
    assert (folder / name).read_text() == "new"
    assert (folder.parent / "secret").read_text() == "mine"
    assert not list(folder.glob(".*")), "no draft stays"


@pytest.mark.parametrize("text", [b"[" * 51 + b"]" * 51, b'{"a":' * 10**6, b"[" * 10**6, b'["' + b'\\"[' * 10**6])
def test_json_is_read_to_a_depth(text: bytes) -> None:
    began = time.monotonic()
    with pytest.raises(msgspec.DecodeError):
        decode_json(text, object)
    assert time.monotonic() - began < 5
    assert decode_json(b'[["' + b"[" * 99 + b'"]' + b",[]" * 99 + b"]", list[object])


@pytest.mark.parametrize("text", [b"1e999", b"NaN", b"1" * 5000])
def test_numbers_that_no_machine_has_are_refused(text: bytes) -> None:
    with pytest.raises(msgspec.DecodeError):
        decode_json(text, float)
