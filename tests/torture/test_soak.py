"""What a soak checks beside every promise."""

from postbus.torture.checker import Verdict
from postbus.torture.trial import Sample, grown

FLAT = [Sample(500, 90), Sample(520, 100), Sample(480, 80), Sample(530, 110), Sample(510, 95), Sample(520, 100)]


def test_what_only_goes_up_and_down_has_not_grown():
    """A pruning more or less is no growth, nor is one sample that lies high."""
    assert list(grown(FLAT)) == []
    assert list(grown([*FLAT, Sample(900, 100)])) == []


def test_what_keeps_growing_is_a_verdict():
    """Memory and tables each on their own."""
    tables = [each._replace(tables=100 + 20 * place) for place, each in enumerate(FLAT)]
    assert list(grown(tables)) == [Verdict("grown", "tables: 120 bytes at first, 180 at the end")]
    memory = [each._replace(memory=500 + 100 * place) for place, each in enumerate(FLAT)]
    assert list(grown(memory)) == [Verdict("grown", "memory: 600 bytes at first, 900 at the end")]


def test_too_few_samples_say_nothing():
    """Everything grows in its first minutes."""
    assert list(grown([Sample(1, 1), Sample(2, 2), Sample(3, 3), Sample(9, 9)])) == []
