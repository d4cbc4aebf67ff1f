"""Where trials are kept: a journal file, or a database."""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import optuna
from optuna.storages import BaseStorage, RDBStorage
from optuna.storages.journal import JournalFileBackend, JournalFileOpenLock
from sqlalchemy.engine import URL, make_url
from sqlalchemy.exc import ArgumentError

from tuning.locking import StudyLock

JOURNAL = "journal:"
_BUSY_SECONDS = 120
_DAMAGE = ("malformed", "not a database", "Invalid log format")
_ADVICE = "use --storage journal:PATH (the default, made for this) or a database server such as PostgreSQL"


class StorageError(RuntimeError):
    """The storage could not be read or written."""


@dataclass(frozen=True)
class StorageName:
    """A storage by its name, which goes to worker processes.

    Attributes:
        url: "journal:PATH", or a database URL as SQLAlchemy has it.
    """

    url: str

    @classmethod
    def of(cls, text: str | None, directory: Path) -> StorageName:
        """The storage that `--storage` means; None is a journal in the study's directory.

        Raises:
            ValueError: If the text is no such name.
        """
        if text is None:
            return cls(f"{JOURNAL}{directory / 'journal.log'}")
        given = re.sub(r"(://[^/@]*?):[^@]*@", r"\1:***@", text)
        wrong = f"--storage must be journal:PATH or a database URL such as sqlite:///study.db, got {given!r}"
        if text.startswith(JOURNAL) and text != JOURNAL:
            return cls(text)
        try:
            url = make_url(text)
        except (ArgumentError, ValueError) as error:
            raise ValueError(wrong) from error
        if url.get_backend_name() == "sqlite" and _in_memory(url):
            raise ValueError(f"{wrong}: a database in memory is lost with its process, and no other process sees it")
        if url.get_backend_name() == "sqlite" and str(url.database).startswith("~"):
            url = url.set(database=str(Path(str(url.database)).expanduser()))
            return cls(url.render_as_string(hide_password=False))
        return cls(text)

    @property
    def shown(self) -> str:
        """The name without the password, for files and messages."""
        return self.url if self.url.startswith(JOURNAL) else make_url(self.url).render_as_string(hide_password=True)

    @property
    def file(self) -> Path | None:
        """The file that holds it, if it is one on this machine."""
        if self.url.startswith(JOURNAL):
            return Path(self.url.removeprefix(JOURNAL)).expanduser()
        url = make_url(self.url)
        return Path(url.database) if url.get_backend_name() == "sqlite" and url.database else None

    def without_password(self, text: str) -> str:
        """A text in which the password, if there is one, is not to be read."""
        password = None if self.url.startswith(JOURNAL) else make_url(self.url).password
        return text.replace(self.url, self.shown).replace(password, "***") if password else text

    def lock(self, directory: Path) -> StudyLock:
        """The lock of everybody on this machine who uses the storage: beside its file, else in the directory."""
        file = self.file
        return StudyLock(directory / "study.lock" if file is None else file.with_name(f"{file.name}.tune"))

    def open(self) -> BaseStorage:
        """Opens it, and creates it where it does not exist; hold the lock meanwhile.

        Raises:
            ValueError: If the file's directory cannot be made, or a driver is missing.
            StorageError: If it is damaged or locked.
        """
        file = self.file
        if file is not None:
            try:
                file.parent.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise ValueError(f"--storage {self.shown}: cannot make {file.parent}: {error.strerror}") from error
        with explained(self), warnings.catch_warnings():
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
            if self.url.startswith(JOURNAL):
                assert file is not None
                try:
                    backend = JournalFileBackend(str(file), lock_obj=JournalFileOpenLock(str(file)))
                    return optuna.storages.JournalStorage(backend)
                except (KeyError, TypeError, OSError) as error:
                    raise StorageError(f"--storage {self.shown}: is no journal of Optuna: {error!r}") from error
            options: dict[str, Any] = {}
            if self.url.startswith("sqlite"):
                options = {"connect_args": {"timeout": _BUSY_SECONDS}}
            try:
                return RDBStorage(self.url, engine_kwargs=options)
            except ImportError as error:
                raise ValueError(f"--storage {self.shown}: the database's driver is not installed: {error}") from error


@contextmanager
def explained(storage: StorageName) -> Iterator[None]:
    """Turns a database's errors into one sentence with a way out and without the password."""
    url = storage.shown
    try:
        yield
    except (StorageError, optuna.exceptions.DuplicatedStudyError, optuna.exceptions.TrialPruned):
        raise
    except Exception as error:
        text = storage.without_password(" ".join(" ".join(str(cause) for cause in _chain(error)).split()))
        if "database is locked" in text:
            raise StorageError(
                f"--storage {url}: the database stayed locked for {_BUSY_SECONDS} s (several processes, or a "
                f"dashboard, on one SQLite file): {_ADVICE}"
            ) from error
        if isinstance(error, json.JSONDecodeError) or any(sign in text for sign in _DAMAGE):
            raise StorageError(
                f"--storage {url}: the file is damaged ({text[:200]}); restore a copy, or {_ADVICE}"
            ) from error
        if "sqlalchemy" in type(error).__module__ or isinstance(error, optuna.exceptions.StorageInternalError):
            raise StorageError(f"--storage {url}: {text[:300]}") from error
        raise


def _in_memory(url: URL) -> bool:
    return not url.database or ":memory:" in url.database or "memory" in str(url.query.get("mode", ""))


def _chain(error: BaseException) -> Iterator[BaseException]:
    """An error and those that it came from: Optuna's own say less than the database's."""
    found: BaseException | None = error
    while found is not None:
        yield found
        found = found.__cause__
