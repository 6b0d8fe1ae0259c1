"""The database that an Optuna study is kept in, with what a study needs of it and Optuna leaves out.

Every call is tried again for a while: a server may restart, a network may be gone for a minute. SQLite has one writer
at a time, so every transaction asks to be it from its first statement and waits for its turn; without that two workers
could take the same trial, and a reader that turns writer is told "database is locked" however long it would wait.
Trials are named by their numbers. Only what Optuna's `RDBStorage` and `Study` show in public is used.
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import os
import random
import sqlite3
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import quote

import optuna
import sqlalchemy
from optuna.trial import FrozenTrial, TrialState
from sqlalchemy.engine import URL, make_url

from tilewright.errors import UserError
from tilewright.train.signals import uninterrupted

Result = TypeVar("Result")
_TROUBLE = (sqlalchemy.exc.SQLAlchemyError, optuna.exceptions.StorageInternalError)
_GARBLED = (ValueError, TypeError, KeyError, AttributeError, RecursionError)
_HEAD = 3.0  # seconds in which the maker of a study has written its head
_BUSY = 60.0  # seconds that SQLite waits for its turn
_RACE = ("already exists", "duplicate", "UNIQUE", "locked", "deadlock", "concurrently")  # words of being second
_MAKING_TABLES = 0x74696C65  # the advisory lock of PostgreSQL that is held meanwhile
_FILLED = ("version_info", "alembic_version")  # tables of Optuna that are never empty
_SERVER = {
    "connect_timeout": 10, "keepalives_idle": 10, "keepalives_interval": 5, "keepalives_count": 3,
    "tcp_user_timeout": 30_000,
}  # fmt: skip


class StorageLost(UserError):
    """The storage of a study is out of reach, and has been for longer than is waited.

    `answer` is what is known of the study, where something is.
    """

    answer: Any = None


class Storage:
    """A study in a database.

    Args:
        url: `sqlite:///FILE` or `postgresql://USER@HOST/DATABASE`.
        name: of the study.
        patience: seconds for which a call is tried again.
        saved: the file that has what is finished, for the sentence that says so.
        exists: refuse a study that is not there, instead of beginning it.
    """

    def __init__(self, url: str, name: str, patience: float, saved: Path, *, exists: bool = False) -> None:
        optuna.logging.set_verbosity(optuna.logging.ERROR)  # what goes wrong here is said in our own words
        warnings.filterwarnings("ignore", category=optuna.exceptions.ExperimentalWarning)
        self.name, self.patience, self.saved = name, patience, saved
        self._lost = ""  # what was said when it had been waited for in vain: nobody waits again
        self._url = checked(url)
        missing = UserError(f"There is no study {name} in {shown(self._url)}; give its folder, or --storage.")
        if exists and not _has_studies(self._url):  # whose tables Optuna would make
            raise missing
        self._database = _open(self._url, patience)
        self._ids: dict[int, int] = {}
        if exists and name not in self._patiently(lambda: optuna.get_all_study_names(self._database)):
            self.close()
            raise missing
        self.created = not exists and self._patiently(self._create)
        self._study_id = self._patiently(lambda: self._database.get_study_id_from_name(name))
        self._study = self._patiently(lambda: optuna.load_study(study_name=name, storage=self._database))
        self._offset = self._patiently(self._clock_offset)

    def now(self) -> float:
        """Seconds since 1970 by the server's clock: those of the workers' machines need not agree, and may be set."""
        return time.monotonic() + self._offset

    def notes(self) -> dict[str, Any]:
        """What is noted of the study."""
        return self._patiently(lambda: self._study.user_attrs)

    def note(self, name: str, value: Any) -> None:
        """Note something of the study."""
        self._patiently(lambda: self._study.set_user_attr(name, value))

    def settle(self, head: Mapping[str, Any]) -> None:
        """Give a new study its head; refuse one whose head is another."""
        if self.created:
            self.note("head", dict(head))
        deadline = time.monotonic() + _HEAD
        while (found := self.notes().get("head")) is None and time.monotonic() < deadline:
            time.sleep(0.1)
        if found is None and not self.trials():  # its maker died at once
            self.note("head", dict(head))
            return
        if not isinstance(found, dict):
            raise UserError(f"The study {self.name} was not made by tilewright tune; choose another --study.")
        different = [name for name in head if found.get(name) != head[name]]
        if not different:
            return
        if "tilewright" in different or "schema" in different:
            what = f"was made by Tilewright {found.get('tilewright')} and this is {head.get('tilewright')};"
        elif "space" in different:
            what = "is of another configuration or of other levers; give the arguments it was begun with, or"
        else:
            what = (
                "; ".join(f"was made with {name} {found.get(name)} and this is {head[name]}" for name in different)
                + ";"
            )
        raise UserError(f"The study {self.name} {what} choose another --study.")

    def trials(self) -> list[FrozenTrial]:
        """All trials in the order of their numbers, less those that cannot be read. Not to be changed."""
        return self._patiently(self._read)

    def add(self, trial: FrozenTrial) -> None:
        """Add a trial, with all that it has, at once."""
        self._patiently(lambda: self._study.add_trial(trial))

    def attach(self, number: int, name: str, value: Any, *, patient: bool = True) -> bool:
        """Attach something to a trial; False where it has ended."""

        def call() -> bool:
            self._database.set_trial_user_attr(self._id(number), name, value)
            return True

        return self._unless_ended(call, patient)

    def move(self, number: int, state: TrialState, value: float | None = None, *, patient: bool = True) -> bool:
        """Put a trial in another state; False where it has ended, or somebody else was first to run it."""
        values = None if value is None else [value]
        return self._unless_ended(
            lambda: self._database.set_trial_state_values(self._id(number), state, values), patient
        )

    def close(self) -> None:
        """Close all connections."""
        self._database.remove_session()
        self._database.engine.dispose()

    def _unless_ended(self, call: Callable[[], bool], patient: bool) -> bool:
        def attempt() -> bool:
            try:
                return call()
            except RuntimeError:  # Optuna's for a trial that has ended
                return False

        return self._patiently(attempt, self.patience if patient else 0.0)

    def _patiently(self, call: Callable[[], Result], patience: float | None = None) -> Result:
        """Call a function, again for a while if the storage fails, and hold interrupts back so that no lock is left."""
        if self._lost:
            raise StorageLost(self._lost)
        patience = self.patience if patience is None else patience
        deadline, pause = time.monotonic() + patience, 0.05
        while True:
            try:
                with uninterrupted():
                    return call()
            except KeyError as error:
                raise StorageLost(
                    f"The study {self.name} is no longer in {shown(self._url)}; {self._merged}"
                ) from error
            except _TROUBLE as error:
                if "disk is full" in (reason := _reason(error)) or "No space left" in reason:
                    raise UserError(
                        f"The disk of {shown(self._url)} is full; make room and go on with --resume: nothing that was "
                        "finished before is lost."
                    ) from error
                if time.monotonic() + pause > deadline:
                    lost = f"The storage {shown(self._url)} has been out of reach for {self.patience:g} s ({reason}); "
                    lost += self._merged
                    if patience == self.patience:
                        self._lost = lost
                    raise StorageLost(lost) from error
            time.sleep(pause * random.uniform(0.5, 1.5))  # not all workers at once
            pause = min(2 * pause, 2.0)

    @property
    def _merged(self) -> str:
        return (
            f"what this machine has finished is saved in {self.saved}, and is merged into the study when you go on "
            "with --resume."
        )

    def _create(self) -> bool:
        try:
            optuna.create_study(study_name=self.name, storage=self._database, direction="maximize")
        except optuna.exceptions.DuplicatedStudyError:
            return False
        return True

    def _clock_offset(self) -> float:
        server = None
        if self._database.engine.name == "postgresql":
            with self._database.engine.connect() as connection:
                server = connection.scalar(sqlalchemy.text("SELECT extract(epoch FROM clock_timestamp())"))
        return float(server or time.time()) - time.monotonic()

    def _id(self, number: int) -> int:
        if number not in self._ids:
            self._ids[number] = self._database.get_trial_id_from_study_id_trial_number(self._study_id, number)
        return self._ids[number]

    def _read(self) -> list[FrozenTrial]:
        try:
            return self._study.get_trials(deepcopy=False)
        except _GARBLED:
            self._database.get_study_name_from_id(self._study_id)  # a KeyError where the study itself is gone
        # One bad value makes Optuna give up on all trials: read them one by one.
        found: list[FrozenTrial] = []
        for number in itertools.count():
            try:
                trial_id = self._id(number)
            except KeyError:
                return found
            try:
                found.append(self._database.get_trial(trial_id))
            except _GARBLED:
                warnings.warn(f"Trial {number} of {self.name} cannot be read and is left out.", stacklevel=2)
        raise AssertionError  # counting does not end


def in_folder(folder: Path) -> str:
    """The storage of a study that nobody shares: a file in its folder."""
    return URL.create("sqlite", database=str(folder.resolve() / "study.db")).render_as_string()


def checked(text: str) -> URL:
    """The URL of a storage of a kind that a study can be kept in."""
    kinds = "give sqlite:///FILE or postgresql://USER@HOST/DATABASE."
    try:
        url = make_url(text)
    except (sqlalchemy.exc.ArgumentError, ValueError) as error:
        raise UserError(f"The storage is no URL that can be read; {kinds}") from error
    if url.get_backend_name() in ("postgres", "postgresql"):
        return url.set(drivername="postgresql+psycopg")
    if url.get_backend_name() != "sqlite":
        raise UserError(f"The storage {shown(url)} is of a kind that does not keep studies; {kinds}")
    if url.database in (None, "", ":memory:"):
        raise UserError("The storage sqlite:// names no file, so nothing would be kept; give sqlite:///FILE.")
    return url.set(drivername="sqlite")


def shown(url: URL) -> str:
    """A URL without its secrets.

    >>> shown(make_url("postgresql://me:secret@host/db?password=secret&sslmode=require"))
    'postgresql://me:***@host/db?password=***&sslmode=require'
    """
    hidden = {name: "***" for name in url.query if "pass" in name.lower() and name.lower() != "passfile"}
    return url.update_query_dict(hidden).render_as_string().replace("%2A%2A%2A", "***")


def reach(text: str, flag: str) -> None:
    """Refuse a storage that cannot be opened, before anything is measured for it; `flag` is what named it."""
    url = checked(text)
    if url.drivername != "sqlite":
        _has_studies(url)
        return
    folder = Path(url.database or "").parent
    try:
        made = not folder.exists()
        folder.mkdir(parents=True, exist_ok=True)
        if made:
            folder.rmdir()
    except OSError as error:
        raise UserError(f"Cannot write {folder}: {error.strerror}; choose another {flag}.") from error


def _has_studies(url: URL) -> bool:
    """Whether a database has the tables of Optuna, filled in; nothing is made or changed in it."""
    how: dict[str, Any] = {"connect_args": _SERVER}
    if url.drivername == "sqlite":
        path = Path(url.database or "")
        if not path.is_file():
            return False
        to_read = f"file:{quote(str(path.resolve()))}?mode=ro"
        how = {"creator": lambda: sqlite3.connect(to_read, timeout=_BUSY, uri=True)}
    with _explained(url):
        engine = sqlalchemy.create_engine(url, **how)
        try:
            with engine.connect() as connection:
                tables = sqlalchemy.inspect(connection)
                return tables.has_table("studies") and all(
                    tables.has_table(name) and connection.scalar(sqlalchemy.text(f"SELECT count(*) FROM {name}"))
                    for name in _FILLED
                )
        finally:
            engine.dispose()


def _open(url: URL, patience: float) -> optuna.storages.RDBStorage:
    """The database, with its tables made; refused in a sentence where it cannot be reached."""
    deadline = time.monotonic() + patience
    while True:
        try:
            with _explained(url):
                return _sqlite(url) if url.drivername == "sqlite" else _server(url)
        except _Busy:
            if time.monotonic() > deadline:
                raise
        time.sleep(random.uniform(0.05, 0.3))


class _Busy(UserError):
    """The database is locked by another worker that begins at the same time."""


@contextlib.contextmanager
def _explained(url: URL) -> Iterator[None]:
    """Say in a sentence why a database cannot be opened."""
    try:
        yield
    except ImportError as error:
        raise UserError(
            "A PostgreSQL storage needs a driver that is not installed: pip install 'tilewright[postgresql]'."
        ) from error
    except RuntimeError as error:
        raise UserError(f"The storage {shown(url)} is of another version of Optuna: {_reason(error)}") from error
    except OSError as error:
        raise UserError(f"Cannot write {url.database}: {error.strerror}; choose another --storage.") from error
    except (*_TROUBLE, sqlite3.Error) as error:
        reason = _reason(error)
        kind = _Busy if any(word in reason for word in _RACE) else UserError
        raise kind(
            f"Cannot open the storage {shown(url)}: {reason}; start its server or choose another --storage."
        ) from error


def _server(url: URL) -> optuna.storages.RDBStorage:
    engine = sqlalchemy.create_engine(url, connect_args=_SERVER)
    try:
        with engine.begin() as turn:  # one after the other: Optuna makes its tables in several transactions
            turn.execute(sqlalchemy.text("SET LOCAL lock_timeout = '30s'"))
            turn.execute(sqlalchemy.text("SELECT pg_advisory_xact_lock(:key)"), {"key": _MAKING_TABLES})
            return optuna.storages.RDBStorage(_text(url), {"pool_pre_ping": True, "connect_args": _SERVER})
    finally:
        engine.dispose()


def _sqlite(url: URL) -> optuna.storages.RDBStorage:
    assert url.database is not None
    folder = Path(url.database).parent
    folder.mkdir(parents=True, exist_ok=True)
    turn = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(turn, fcntl.LOCK_EX)  # one after the other: making the tables is no transaction
        with contextlib.closing(sqlite3.connect(url.database, timeout=_BUSY)) as connection:
            connection.execute("PRAGMA journal_mode=WAL")  # kept in the file: readers do not wait for the writer
        # Python begins no transactions by itself: `begin` does.
        arguments = {"timeout": _BUSY, "isolation_level": None}
        database = optuna.storages.RDBStorage(_text(url), {"connect_args": arguments})
    finally:
        os.close(turn)
    database.engine.dispose()
    sqlalchemy.event.listen(database.engine, "connect", _read_anything)
    sqlalchemy.event.listen(database.engine, "begin", lambda opened: opened.exec_driver_sql("BEGIN IMMEDIATE"))
    return database


def _read_anything(connection: sqlite3.Connection, _: Any) -> None:
    connection.text_factory = lambda content: content.decode(errors="replace")


def _text(url: URL) -> str:
    """Escape the braces of a URL, which Optuna takes for a template."""
    return url.render_as_string(hide_password=False).replace("{", "{{").replace("}", "}}")


def _reason(error: BaseException) -> str:
    """What the driver said, in a line."""
    while not isinstance(error, sqlalchemy.exc.DBAPIError) and error.__cause__ is not None:
        error = error.__cause__
    said = str(error.orig if isinstance(error, sqlalchemy.exc.DBAPIError) else error).strip()
    return (said.splitlines() or [type(error).__name__])[0].rstrip(".")
