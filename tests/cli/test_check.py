"""`postbus check`: exit codes for probes."""

import pytest

from postbus import EventBus

from .conftest import URL


@pytest.fixture
def shop() -> None:
    """Leave two pending events, one of them for later, and a follower two positions behind."""
    bus = EventBus(URL)
    bus.follow("sales", start="beginning")(lambda _: None)
    bus.publish("a")
    bus.publish("b", delay=600)
    bus.shutdown()


@pytest.mark.parametrize(
    ("what", "bounds", "code", "state"),
    [
        ("depth", ("--warn", "2"), 0, "OK"),
        ("depth", ("--warn", "1", "--crit", "2"), 3, "WARNING"),
        ("depth", ("--warn", "1", "--crit", "1"), 3, "CRITICAL"),
        ("lag", ("--crit", "3"), 0, "OK"),
        ("lag", ("--crit", "2"), 3, "CRITICAL"),
        ("dead", ("--warn", "1"), 0, "OK"),
        ("age", ("--warn", "1h", "--crit", "1d"), 0, "OK"),
        ("age", ("--crit", "0s"), 3, "CRITICAL"),
    ],
)
def test_a_bound_that_is_reached_is_exit_3(what, bounds, code, state, shop, cli, data):
    """The state is the first word of one line, and a field of the JSON; what is scheduled does not count."""
    [told] = cli("check", what, *bounds, expect=code).stdout.splitlines()
    assert told.startswith(f"{state} {what}: ")
    assert data("check", what, *bounds, expect=code)["state"] == state


@pytest.mark.parametrize(("bounds", "code"), [(("--warn", "9"), 0), (("--warn", "1"), 1), (("--crit", "1"), 2)])
def test_nagios_gets_its_own_codes_and_figures(bounds, code, shop, cli):
    """With --format nagios: 0, 1, 2, and 'label'=value;warn;crit;min after the bar."""
    told = cli("check", "depth", *bounds, "--format", "nagios", expect=code).stdout
    limits = f"{bounds[1]};" if "--warn" in bounds else f";{bounds[1]}"
    assert told.rstrip().endswith(f" | 'default'=1;{limits};0")


def test_the_dead_letters_of_all_subscriptions_count(three_dead, cli, data):
    """Dead letters are counted where they lie; a named subscription is looked at alone (S0.9)."""
    found = data("check", "dead", "--crit", "3", expect=3)
    assert (found["value"], found["subscription"]) == (3, "default")
    cli("check", "dead", "--crit", "1", "--subscription", "nobody", expect=1)


def test_not_being_able_to_look_is_exit_1_and_unknown_to_nagios(cli):
    """A probe never takes "there is no bus" for "all is well"."""
    cli("check", "dead", "--crit", "1", expect=1)
    assert cli("check", "dead", "--crit", "1", "--format", "nagios", expect=3).stdout.startswith("POSTBUS UNKNOWN - ")


@pytest.mark.parametrize(
    "wrong",
    [
        ("depth",),
        ("depth", "--warn", "5", "--crit", "1"),
        ("depth", "--warn", "5m"),
        ("age", "--warn", "soon"),
        ("lag", "--warn", "1", "--subscription", "default"),
        ("width", "--warn", "1"),
    ],
)
def test_bounds_that_mean_nothing_are_wrong_usage(wrong, shop, cli):
    """No bound, bounds the wrong way round, a figure that is none: exit 2."""
    cli("check", *wrong, expect=2)
