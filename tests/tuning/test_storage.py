"""Where trials are kept: names, files, passwords, and errors in one sentence."""

from __future__ import annotations

import sqlite3
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy.exc import ArgumentError

from tuning.storage import StorageError, StorageName, explained
from tuning.summary import summarise


def test_a_locked_database_is_explained():
    with (
        pytest.raises(StorageError, match=r"stayed locked.*journal:PATH.*PostgreSQL"),
        explained(StorageName("sqlite:///a.db")),
    ):
        raise sqlite3.OperationalError("database is locked")
    with pytest.raises(StorageError, match=r"damaged.*journal:PATH"), explained(StorageName("sqlite:///a.db")):
        raise sqlite3.DatabaseError("database disk image is malformed")
    with pytest.raises(KeyError), explained(StorageName("sqlite:///a.db")):
        raise KeyError("of our own")


def test_a_file_that_is_no_database(ledger, tmp_path):
    (tmp_path / "study.db").write_text("nothing of the kind, but long enough to be looked at " * 20)
    with pytest.raises(StorageError, match=r"study\.db.*damaged"):
        ledger(storage=f"sqlite:///{tmp_path / 'study.db'}")


@pytest.mark.parametrize(
    "text",
    ["study.db", "journal:", "sqlite:///:memory:", "sqlite://", "sqlite:///", "sqlite+pysqlite://", "://",
     "sqlite:///file::memory:?uri=true", "sqlite:///file:study?mode=memory&cache=shared&uri=true"],
)  # fmt: skip
def test_what_is_no_storage(text, tmp_path):
    with pytest.raises(ValueError, match="--storage must be journal:PATH or a database URL"):
        StorageName.of(text, tmp_path)


@pytest.mark.parametrize(
    ("text", "file"),
    [("journal:a/b.log", "a/b.log"), ("sqlite:///a/b.db", "a/b.db"), ("sqlite:////a/b.db?timeout=9", "/a/b.db"),
     ("sqlite+pysqlite:///b.db", "b.db"), ("postgresql://me:secret@host/a", None)],
)  # fmt: skip
def test_the_file_of_a_storage(text, file, tmp_path):
    assert StorageName.of(text, tmp_path).file == (None if file is None else Path(file))


def test_a_tilde_is_the_users_directory(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    storage = StorageName.of("sqlite:///~/deep/study.db?timeout=9", tmp_path)
    assert storage.url == f"sqlite:///{tmp_path}/deep/study.db?timeout=9"
    assert storage.file == tmp_path / "deep" / "study.db"
    storage.open()
    assert storage.file.is_file()
    assert StorageName.of("journal:~/j.log", tmp_path).file == tmp_path / "j.log"


def test_passwords_are_not_shown(ledger, tmp_path):
    storage = StorageName.of("postgresql+nodriver://me:secret@host/studies", tmp_path)
    assert storage.shown == "postgresql+nodriver://me:***@host/studies"
    with (
        pytest.raises(StorageError, match=r"--storage postgresql\+nodriver://me:\*\*\*@host") as caught,
        explained(storage),
    ):
        raise ArgumentError(f"no luck with {storage.url}, password=secret")
    assert "secret" not in str(caught.value)
    with pytest.raises(ValueError, match=r"got 'postgresql://me:\*\*\*@host:door/studies'"):
        StorageName.of("postgresql://me:secret@host:door/studies", tmp_path)
    book = ledger()
    book.storage = storage
    assert summarise(book, 1, 0.0, "completed")["storage"] == storage.shown


def test_a_file_that_is_no_journal_is_named(tmp_path: Any) -> None:
    for content in ('{"a": 1}\n', "5\n"):
        file = tmp_path / "file.log"
        file.write_text(content)
        with pytest.raises(StorageError, match=r"--storage journal:.*is no journal of Optuna"):
            StorageName.of(f"journal:{file}", tmp_path).open()
