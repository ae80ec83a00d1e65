-- How far each ordered subscription and each Spark stream has come in its stream (events, audit): the id of a row it has
-- seen, in the log it has seen it in. `epoch` fences whoever moves it.
CREATE TABLE postbus.checkpoints (
    subscription text PRIMARY KEY,
    stream text NOT NULL CHECK (stream IN ('events', 'audit')),
    position bigint NOT NULL,
    log_id text NOT NULL,
    epoch bigint NOT NULL DEFAULT 0,
    moved_at timestamptz NOT NULL
) WITH (fillfactor = 50, autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 1000);

-- What tasks of a Spark job have brought, until the job publishes it: each attempt of a task under a name of its own.
CREATE TABLE postbus.staged (
    query text NOT NULL,
    batch bigint NOT NULL,
    part text NOT NULL,
    position bigint NOT NULL,
    draft text NOT NULL,
    created_at timestamptz NOT NULL
);
CREATE INDEX staged_part ON postbus.staged (query, batch, part);

-- The batches that were published, so that one that is brought again is not.
CREATE TABLE postbus.sunk (
    query text NOT NULL,
    batch bigint NOT NULL,
    published bigint NOT NULL,
    created_at timestamptz NOT NULL,
    PRIMARY KEY (query, batch)
);

INSERT INTO postbus.meta (key, value) VALUES ('audit_pruned_through', '0');
