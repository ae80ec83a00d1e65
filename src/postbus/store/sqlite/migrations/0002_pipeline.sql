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

-- What tasks of a Spark job have brought, until the job publishes it: each attempt of a task under a name of its own.
CREATE TABLE staged (
    query TEXT NOT NULL,
    batch INTEGER NOT NULL,
    part TEXT NOT NULL,
    position INTEGER NOT NULL,
    draft TEXT NOT NULL,
    created_at INTEGER NOT NULL,
    PRIMARY KEY (query, batch, part, position)
) WITHOUT ROWID;

-- The batches that were published, so that one that is brought again is not.
CREATE TABLE sunk (
    query TEXT NOT NULL,
    batch INTEGER NOT NULL,
    published INTEGER NOT NULL,
    created_at INTEGER NOT NULL,
    PRIMARY KEY (query, batch)
) WITHOUT ROWID;

INSERT INTO meta (key, value) VALUES ('audit_pruned_through', 0);
