PRAGMA application_id = 1886352244; -- "post"

-- Moments are whole microseconds since 1970 in UTC. JSON is kept as text.

CREATE TABLE meta (key TEXT PRIMARY KEY, value NOT NULL) WITHOUT ROWID;

-- AUTOINCREMENT, so that the id of a pruned event is never given to another one (I4).
CREATE TABLE events (
    id INTEGER PRIMARY KEY AUTOINCREMENT,
    uid TEXT NOT NULL,
    type TEXT NOT NULL,
    tags TEXT NOT NULL,
    key TEXT,
    title TEXT,
    description TEXT,
    payload TEXT NOT NULL,
    metadata TEXT NOT NULL,
    created_at INTEGER NOT NULL,
    priority INTEGER NOT NULL,
    max_retries INTEGER,
    checksum INTEGER NOT NULL
);

CREATE TABLE subscriptions (
    name TEXT PRIMARY KEY,
    mode TEXT NOT NULL CHECK (mode IN ('queue', 'ordered', 'spark')),
    patterns TEXT NOT NULL,
    tags TEXT NOT NULL,
    paused INTEGER NOT NULL DEFAULT 0,
    lease INTEGER,
    retry TEXT,
    created_at INTEGER NOT NULL
) WITHOUT ROWID;

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

-- What a worker's patterns and tags resolve to: a claim then probes a few exact index ranges, whatever the backlog.
-- `solo` marks the routes of deliveries whose last attempt ended by expiry, which are run alone.
CREATE TABLE routes (
    position INTEGER PRIMARY KEY AUTOINCREMENT,
    id INTEGER NOT NULL UNIQUE,
    subscription TEXT NOT NULL,
    priority INTEGER NOT NULL,
    type TEXT NOT NULL,
    tags TEXT NOT NULL,
    solo INTEGER NOT NULL
);

-- state: 0 pending, 1 leased, 2 dead, 3 parked. Claimable is due_at <= now and nothing else; dead and parked: NULL.
CREATE TABLE deliveries (
    event_id INTEGER NOT NULL,
    subscription TEXT NOT NULL,
    route INTEGER NOT NULL,
    state INTEGER NOT NULL DEFAULT 0,
    due_at INTEGER,
    ready_at INTEGER NOT NULL,
    created_at INTEGER NOT NULL,
    updated_at INTEGER NOT NULL,
    epoch INTEGER NOT NULL DEFAULT 0,
    attempt INTEGER NOT NULL DEFAULT 0,
    retry_count INTEGER NOT NULL DEFAULT 0,
    max_retries INTEGER,
    claimed_at INTEGER,
    worker_id TEXT,
    owner TEXT,
    errors TEXT,
    died_at INTEGER,
    last_retry_at INTEGER,
    tried INTEGER, -- the state, once it has been claimed: NULL before, so that its index holds few rows
    PRIMARY KEY (event_id, subscription),
    CHECK (tried IS NULL OR tried = state),
    CHECK ((state IN (2, 3)) = (due_at IS NULL))
) WITHOUT ROWID;

CREATE INDEX deliveries_due ON deliveries (route, due_at, event_id) WHERE due_at IS NOT NULL;

-- Leased, dead and waiting for a retry, each found without wading through what waits for its first attempt, and without
-- a look at the row: that is why the condition is on a column of the index. (SQLite covers no generated column.)
CREATE INDEX deliveries_tried ON deliveries (tried, subscription, created_at, event_id) WHERE tried IS NOT NULL;

-- The row that ends a delivery tells its whole story (type … errors), so facts need no join.
CREATE TABLE event_log (
    id INTEGER PRIMARY KEY AUTOINCREMENT,
    event_id INTEGER NOT NULL,
    subscription TEXT NOT NULL,
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
    errors TEXT
);

CREATE INDEX event_log_event ON event_log (event_id);

CREATE INDEX event_log_completed ON event_log (subscription, status, event_id)
    WHERE status IN ('COMPLETED', 'COMPLETED_WITH_ERRORS');

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

INSERT INTO meta (key, value) VALUES ('epoch', 0), ('pruned_through', 0), ('catalog', 1);
INSERT INTO meta (key, value) VALUES ('log_id', lower(hex(randomblob(16))));
INSERT INTO subscriptions (name, mode, patterns, tags, created_at)
    VALUES ('default', 'queue', '["*"]', '[]', CAST(unixepoch('subsec') * 1000000 AS INTEGER));
