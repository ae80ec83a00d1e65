"""What the contract says of this, held over HTTP."""

from tests.contract.test_dead_letters import *  # noqa: F403  every test of it runs here, on the fixtures of this folder
