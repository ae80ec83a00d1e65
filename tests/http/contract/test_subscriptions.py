"""What the contract says of this, held over HTTP."""

from tests.contract.test_subscriptions import *  # noqa: F403  every test of it runs here, on the fixtures of this folder

del test_every_mode_is_stored  # noqa: F821  a Spark stream is made where the database is
