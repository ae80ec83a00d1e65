"""Proof by trying: real processes and a seeded nemesis write a history, a checker holds it against the log."""
