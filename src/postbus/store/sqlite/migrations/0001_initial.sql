PRAGMA application_id = 1885500787; -- "pbus"

-- Moments are whole microseconds since 1970 in UTC. JSON is kept as text. What may be large stands last in its row.

CREATE TABLE meta (key TEXT PRIMARY KEY, value NOT NULL) WITHOUT ROWID;

-- The log. AUTOINCREMENT, so that the id of a pruned event is never given to another one (I4).
-- due_at: only with a delay or a time; NULL: at once. erased_at: no pass hands it out any more.
CREATE TABLE events (
    id INTEGER PRIMARY KEY AUTOINCREMENT,
    uid TEXT NOT NULL,
    type TEXT NOT NULL,
    tags TEXT NOT NULL,
    priority INTEGER NOT NULL,
    due_at INTEGER,
    max_retries INTEGER,
    created_at INTEGER NOT NULL,
    erased_at INTEGER,
    checksum INTEGER NOT NULL,
    key TEXT,
    title TEXT,
    description TEXT,
    metadata TEXT NOT NULL,
    payload TEXT NOT NULL
);

-- Special events: a claim finds them beyond its cursor, so that priority overtakes a backlog.
CREATE INDEX events_special ON events (id) WHERE due_at IS NOT NULL OR priority <> 0;

-- A number is never used again: the audit log names subscriptions by it.
CREATE TABLE subscriptions (
    number INTEGER PRIMARY KEY AUTOINCREMENT,
    name TEXT NOT NULL UNIQUE,
    mode TEXT NOT NULL CHECK (mode IN ('queue', 'ordered', 'spark')),
    patterns TEXT NOT NULL,
    tags TEXT NOT NULL,
    paused INTEGER NOT NULL DEFAULT 0,
    lease INTEGER,
    retry TEXT,
    created_at INTEGER NOT NULL
);

-- The names of deleted subscriptions, for the audit log.
CREATE TABLE former_subscriptions (number INTEGER PRIMARY KEY, name TEXT NOT NULL);

-- How far each queue subscription has handed out the log; `looked`: how far special events were looked for.
CREATE TABLE cursors (
    subscription INTEGER PRIMARY KEY,
    position INTEGER NOT NULL,
    looked INTEGER NOT NULL
);

-- Events above a cursor that were dealt with early: a pass leaves them out.
CREATE TABLE skips (
    subscription INTEGER NOT NULL,
    event_id INTEGER NOT NULL,
    PRIMARY KEY (subscription, event_id)
) WITHOUT ROWID;

-- Leases. `ids`: up to 1,024 event ids, ascending, within 16,384 of each other (encoded by arrays.py). `done`: one bit
-- an event, lowest first; the block goes with its last bit. An epoch is number << 10 | place.
CREATE TABLE blocks (
    number INTEGER PRIMARY KEY,
    subscription INTEGER NOT NULL,
    first_id INTEGER NOT NULL,
    last_id INTEGER NOT NULL,
    due_at INTEGER NOT NULL,
    claimed_at INTEGER NOT NULL,
    owner TEXT NOT NULL,
    worker_id TEXT NOT NULL,
    ids BLOB NOT NULL,
    done BLOB NOT NULL
);

CREATE INDEX blocks_ids ON blocks (subscription, first_id, last_id);
CREATE INDEX blocks_due ON blocks (due_at);
CREATE INDEX blocks_owner ON blocks (owner);

-- Deliveries about which something individual is known.
-- state: 0 pending, 1 held (in a block, with a history), 2 dead, 3 parked. due_at: of pending rows only.
-- fresh: without a history, and so deleted when claimed. epoch: of an attempt that expired, until somebody claims the row: it may still be completed under it.
CREATE TABLE deliveries (
    subscription INTEGER NOT NULL,
    event_id INTEGER NOT NULL,
    state INTEGER NOT NULL,
    kind INTEGER NOT NULL,
    priority INTEGER NOT NULL,
    due_at INTEGER,
    ready_at INTEGER NOT NULL,
    alone INTEGER NOT NULL,
    attempt INTEGER NOT NULL,
    retry_count INTEGER NOT NULL,
    max_retries INTEGER,
    epoch INTEGER,
    worker_id TEXT,
    claimed_at INTEGER,
    created_at INTEGER NOT NULL,
    updated_at INTEGER NOT NULL,
    died_at INTEGER,
    last_retry_at INTEGER,
    errors TEXT,
    fresh INTEGER NOT NULL,
    PRIMARY KEY (subscription, event_id),
    CHECK ((state = 0) = (due_at IS NOT NULL))
) WITHOUT ROWID;

-- A worker of some types finds its due rows by kind, a worker of all types without it.
CREATE INDEX deliveries_due ON deliveries (subscription, alone, kind, priority, due_at, event_id) WHERE state = 0;
CREATE INDEX deliveries_any ON deliveries (subscription, alone, priority, due_at, event_id) WHERE state = 0;
CREATE INDEX deliveries_tried ON deliveries (subscription, kind) WHERE state = 0 AND fresh = 0;
CREATE INDEX deliveries_dead ON deliveries (subscription, created_at, event_id) WHERE state = 2;

-- What kinds of events rows are about: type and tags, by a hash of both.
CREATE TABLE kinds (
    position INTEGER PRIMARY KEY AUTOINCREMENT,
    id INTEGER NOT NULL UNIQUE,
    type TEXT NOT NULL,
    tags TEXT NOT NULL
);

-- The audit log. A row is one entry, or (last_id) up to 1,024 entries of one action on one block, for first attempts
-- of one type and tags: entry k has the id id + k, the event ids[k], the epoch epoch + places[k], and took times[k].
-- subscription 0: none. The entry that ends a delivery tells its whole story (type ... errors), so facts need no join.
CREATE TABLE event_log (
    id INTEGER PRIMARY KEY AUTOINCREMENT,
    first_id INTEGER NOT NULL,
    last_id INTEGER,
    entries INTEGER NOT NULL DEFAULT 1,
    subscription INTEGER NOT NULL,
    action TEXT NOT NULL,
    created_at INTEGER NOT NULL,
    status TEXT,
    attempt INTEGER,
    epoch INTEGER,
    worker_id TEXT,
    status_code INTEGER,
    error_type TEXT,
    error_message TEXT,
    execution_time_ms REAL,
    type TEXT,
    tags TEXT,
    priority INTEGER,
    event_created_at INTEGER,
    ready_at INTEGER,
    claimed_at INTEGER,
    retry_count INTEGER,
    errors TEXT,
    ids BLOB,
    places BLOB,
    created BLOB,
    times BLOB
);

CREATE INDEX event_log_event ON event_log (first_id) WHERE last_id IS NULL;
CREATE INDEX event_log_arrays ON event_log (first_id, last_id) WHERE last_id IS NOT NULL;
CREATE INDEX event_log_completed ON event_log (subscription, status, first_id)
    WHERE status IN ('COMPLETED', 'COMPLETED_WITH_ERRORS');

-- Which functions handle what, in which process: for people and `doctor`. The functions live in the processes.
CREATE TABLE handlers (
    id TEXT PRIMARY KEY,
    name TEXT NOT NULL,
    subscription TEXT NOT NULL,
    pattern TEXT NOT NULL,
    tags TEXT NOT NULL,
    worker_id TEXT NOT NULL,
    owner TEXT NOT NULL,
    seen_at INTEGER NOT NULL
) WITHOUT ROWID;

-- Only uids that a producer supplied, for a stated window: `events` itself can then be pruned by range.
CREATE TABLE dedup (
    uid TEXT PRIMARY KEY,
    event_id INTEGER NOT NULL,
    digest BLOB NOT NULL,
    created_at INTEGER NOT NULL
) WITHOUT ROWID;

CREATE INDEX dedup_age ON dedup (created_at);

CREATE TABLE breakers (
    name TEXT PRIMARY KEY,
    failures INTEGER NOT NULL,
    opened_at INTEGER,
    probe_until INTEGER
) WITHOUT ROWID;

-- How far each ordered subscription and each Spark stream has come in its stream (events, audit): the id of a row it
-- has seen, in the log it has seen it in. `epoch` fences whoever moves it. The reader of an ordered subscription is the
-- process (`holder`, a nonce; `worker_id`, for people) that drew the epoch last, until `held_until`. `locked`: whether it
-- holds the lock of that name as well. `crashes`: how many readers ended without a word since the position moved.
-- `trying`: the event that the reader is about to handle, told once an earlier one has crashed. `stopped`: why the last
-- reader stopped for good, if nobody has got further since; `stopped_before`: at which event.
CREATE TABLE checkpoints (
    subscription TEXT PRIMARY KEY,
    stream TEXT NOT NULL CHECK (stream IN ('events', 'audit')),
    position INTEGER NOT NULL,
    log_id TEXT NOT NULL,
    epoch INTEGER NOT NULL DEFAULT 0,
    moved_at INTEGER NOT NULL,
    holder TEXT,
    worker_id TEXT,
    locked INTEGER NOT NULL DEFAULT 0,
    held_until INTEGER,
    crashes INTEGER NOT NULL DEFAULT 0,
    stopped TEXT,
    stopped_before INTEGER,
    trying INTEGER
) WITHOUT ROWID;

-- What tasks of a Spark job have brought, until the job publishes it: each attempt of a task is a part of its own, so
-- that what a failed one or a dead job left behind is never mistaken for another's.
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

-- Who may use the HTTP API, and for what. Of the secret itself only its SHA-256 is kept. `scopes`: a JSON array.
CREATE TABLE tokens (
    id TEXT PRIMARY KEY,
    name TEXT NOT NULL,
    digest TEXT NOT NULL,
    scopes TEXT NOT NULL,
    created_at INTEGER NOT NULL,
    expires_at INTEGER,
    revoked_at INTEGER
) WITHOUT ROWID;

-- number: the last one given to a block. catalog: changes to subscriptions that a process must notice.
INSERT INTO meta (key, value) VALUES ('number', 0), ('pruned_through', 0), ('audit_pruned_through', 0), ('catalog', 1);
INSERT INTO meta (key, value) VALUES ('log_id', lower(hex(randomblob(16)))), ('generation', 2);
INSERT INTO subscriptions (name, mode, patterns, tags, created_at)
    VALUES ('default', 'queue', '["*"]', '[]', CAST(unixepoch('subsec') * 1000000 AS INTEGER));
INSERT INTO cursors (subscription, position, looked) SELECT number, 0, 0 FROM subscriptions;
