"""Settings: file < environment < arguments, and nothing unknown."""

from pathlib import Path

import pytest

from postbus.bus import EventBus
from postbus.config import Settings
from postbus.errors import InvalidRequest
from postbus.retry import RetryPolicy


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Work in an empty folder."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_defaults_are_those_of_the_documents():
    """Sixty seconds of lease, ten at a time, thirty to shut down (S2.5, S1.14)."""
    settings = Settings.load()
    assert (settings.url, settings.lease, settings.poll_interval) == ("sqlite:///postbus.db", 60, 1)
    assert (settings.concurrency, settings.shutdown_timeout, settings.auto_migrate) == (10, 30, True)
    assert settings.retry == RetryPolicy()


def test_the_file_is_read(folder: Path):
    """`postbus.toml`, nested tables included."""
    (folder / "postbus.toml").write_text('lease = 5\nurl = "sqlite:///x.db"\n[retry]\nmax_retries = 9\n')
    settings = Settings.load()
    assert (settings.lease, settings.url, settings.retry.max_retries) == (5, "sqlite:///x.db", 9)


def test_pyproject_is_read_where_there_is_no_file(folder: Path):
    """`[tool.postbus]`; a file of our own goes before it."""
    (folder / "pyproject.toml").write_text("[tool.other]\na = 1\n[tool.postbus]\nlease = 7\n")
    assert Settings.load().lease == 7
    (folder / "postbus.toml").write_text("lease = 8\n")
    assert Settings.load().lease == 8


def test_the_environment_goes_before_the_file_and_arguments_before_both(folder: Path, monkeypatch: pytest.MonkeyPatch):
    """File, environment, arguments: the nearest wins, each for itself."""
    (folder / "postbus.toml").write_text("lease = 5\nconcurrency = 5\npoll_interval = 5\n")
    monkeypatch.setenv("POSTBUS_CONCURRENCY", "6")
    monkeypatch.setenv("POSTBUS_POLL_INTERVAL", "6")
    monkeypatch.setenv("POSTBUS_RETRY__MAX_RETRIES", "6")
    settings = Settings.load(poll_interval=7, lease=None)
    assert (settings.lease, settings.concurrency, settings.poll_interval) == (5, 6, 7)
    assert settings.retry.max_retries == 6


def test_the_bus_goes_by_the_environment(folder: Path, monkeypatch: pytest.MonkeyPatch):
    """Without an argument, POSTBUS_URL says where it lives."""
    monkeypatch.setenv("POSTBUS_URL", "sqlite:///from_environment.db")
    bus = EventBus()
    bus.publish("a")
    bus.shutdown()
    assert (folder / "from_environment.db").exists()


def test_a_bus_that_only_has_handlers_opens_nothing(folder: Path):
    """Made by a module, and imported before a fork, it has nothing open there; its first use opens the store (I1)."""
    bus = EventBus("sqlite:///bus.db")
    bus.subscribe("*", print, subscription="side")
    bus.follow("s")(print)
    assert list(folder.iterdir()) == []
    assert {each.name for each in bus.subscriptions.list()} == {"default", "side", "s"}
    assert (folder / "bus.db").exists()
    bus.shutdown()


def test_an_unknown_key_in_the_file_fails(folder: Path):
    """A slip of the pen is not passed over."""
    (folder / "postbus.toml").write_text("leese = 5\n")
    with pytest.raises(InvalidRequest, match="leese"):
        Settings.load()


def test_an_unknown_key_of_the_policy_fails(folder: Path):
    """Inside tables too."""
    (folder / "postbus.toml").write_text("[retry]\nretries = 5\n")
    with pytest.raises(InvalidRequest, match="retries"):
        Settings.load()


def test_an_unknown_argument_fails():
    """As in the file."""
    with pytest.raises(InvalidRequest, match="colour"):
        Settings.load(colour="red")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("lease", 0),
        ("lease", -1),
        ("lease", "soon"),
        ("poll_interval", 0),
        ("concurrency", 0),
        ("concurrency", 1.5),
        ("prefetch", 0),
        ("shutdown_timeout", -1),
        ("worker_id", ""),
    ],
)
def test_a_setting_out_of_range_is_refused_by_name(name: str, value: object):
    """The message names it."""
    with pytest.raises(InvalidRequest, match=name):
        Settings.load(**{name: value})


def test_all_wrong_settings_are_named_at_once():
    """One look is enough to mend them."""
    with pytest.raises(InvalidRequest, match=r"lease.*concurrency|concurrency.*lease"):
        Settings.load(lease=0, concurrency=0)


def test_settings_are_frozen():
    """What a bus was opened with does not change under it."""
    settings = Settings.load()
    with pytest.raises(ValueError, match="frozen"):
        settings.lease = 1
