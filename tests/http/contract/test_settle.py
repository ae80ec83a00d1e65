"""What the contract says of this, held over HTTP."""

from tests.contract.test_settle import *  # noqa: F403  every test of it runs here, on the fixtures of this folder
