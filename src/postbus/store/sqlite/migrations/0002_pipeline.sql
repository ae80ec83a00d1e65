-- How far each ordered subscription and each Spark stream has come in its stream (events, audit): the id of a row it has
-- seen, in the log it has seen it in. `epoch` fences whoever moves it.
CREATE TABLE checkpoints (
    subscription TEXT PRIMARY KEY,
    stream TEXT NOT NULL CHECK (stream IN ('events', 'audit')),
    position INTEGER NOT NULL,
    log_id TEXT NOT NULL,
    epoch INTEGER NOT NULL DEFAULT 0,
    moved_at INTEGER NOT NULL
) WITHOUT ROWID;

-- What tasks of a Spark job have brought, until the job publishes it: each attempt of a task is a part of its own, so that
-- what a failed one or a dead job left behind is never mistaken for another's.
CREATE TABLE parts (
    part INTEGER PRIMARY KEY AUTOINCREMENT,
    query TEXT NOT NULL,
    batch INTEGER NOT NULL,
    created_at INTEGER NOT NULL
);
CREATE INDEX parts_batch ON parts (query, batch);

CREATE TABLE staged (
    part INTEGER NOT NULL,
    position INTEGER NOT NULL,
    uid TEXT NOT NULL,
    chosen INTEGER NOT NULL,
    type TEXT NOT NULL,
    tags TEXT NOT NULL,
    key TEXT,
    title TEXT,
    description TEXT,
    payload TEXT NOT NULL,
    metadata TEXT NOT NULL,
    priority INTEGER NOT NULL,
    max_retries INTEGER,
    delay INTEGER,
    at INTEGER,
    PRIMARY KEY (part, position)
) WITHOUT ROWID;

-- The batches that were published, so that one that is brought again is not.
CREATE TABLE sunk (
    query TEXT NOT NULL,
    batch INTEGER NOT NULL,
    brought INTEGER NOT NULL,
    created_at INTEGER NOT NULL,
    PRIMARY KEY (query, batch)
) WITHOUT ROWID;

INSERT INTO meta (key, value) VALUES ('audit_pruned_through', 0);
