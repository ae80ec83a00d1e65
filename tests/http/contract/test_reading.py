"""What the contract says of this, held over HTTP."""

from tests.contract.test_reading import *  # noqa: F403  every test of it runs here, on the fixtures of this folder

del test_a_sound_store_has_no_findings  # noqa: F821  a store is inspected where it is
