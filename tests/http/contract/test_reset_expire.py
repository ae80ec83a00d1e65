"""What the contract says of this, held over HTTP."""

from tests.contract.test_reset_expire import *  # noqa: F403  every test of it runs here, on the fixtures of this folder

# Behind a server every lease is the server's own to end, by time: it cannot know which process has died.
del test_the_leases_of_a_dead_process_are_ended_before_their_time  # noqa: F821
del test_what_a_dead_process_held_on_its_last_attempt_is_dead  # noqa: F821
del test_no_owners_means_no_leases  # noqa: F821
del test_who_says_that_it_is_alive_is_not_dead  # noqa: F821
