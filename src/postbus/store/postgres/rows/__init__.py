"""The core of PostgreSQL until it has the new one: a row for each delivery."""
