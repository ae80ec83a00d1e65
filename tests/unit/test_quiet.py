"""The search for garbage is put off by some, and left off by nobody."""

import gc
import os
from collections.abc import Iterator

import pytest

from postbus.quiet import UNDISTURBED


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    yield
    gc.enable()


def test_it_is_off_inside_and_on_again_afterwards():
    """Also for one block within another."""
    with UNDISTURBED:
        assert not gc.isenabled()
        with UNDISTURBED:
            assert not gc.isenabled()
    assert gc.isenabled()


def test_it_is_on_again_whoever_of_two_leaves_first():
    """The second came when it was off, and must not take that for what is wanted."""
    UNDISTURBED.__enter__()
    UNDISTURBED.__enter__()
    for _ in range(2):
        UNDISTURBED.__exit__()
        assert gc.isenabled()


def test_where_nobody_wants_it_it_stays_off():
    """A program may do without."""
    gc.disable()
    with UNDISTURBED:
        assert not gc.isenabled()
    assert not gc.isenabled()


def test_a_forked_process_searches_though_its_parent_was_in_the_midst():
    """The thread that would leave the block is not there."""
    with UNDISTURBED:
        child = os.fork()
        if not child:
            os._exit(0 if gc.isenabled() else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
