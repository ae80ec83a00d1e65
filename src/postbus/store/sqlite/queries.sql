-- Every statement of the SQLite store. Parameters are positional. What yields many rows yields one JSON array of them:
-- each row fetched singly gives up Python's lock, which costs more than the query where handlers are busy.

-- ── catalog ──────────────────────────────────────────────────────────────────────────────────────────────────────────

-- name: catalog
-- Whether subscriptions have changed, how far the kinds go, the log's head, no time (the process's clock decides), and
-- the kinds added since the last look.
SELECT (SELECT value FROM meta WHERE key = 'catalog'),
       coalesce((SELECT seq FROM sqlite_sequence WHERE name = 'kinds'), 0),
       coalesce((SELECT seq FROM sqlite_sequence WHERE name = 'events'), 0),
       NULL,
       (SELECT json_group_array(json_array(id, type, tags))
          FROM (SELECT id, type, tags FROM kinds WHERE position > ?1 ORDER BY position));

-- name: subscriptions
SELECT number, name, mode, patterns, tags, paused, lease, retry, created_at FROM subscriptions ORDER BY name;

-- name: former_subscriptions
SELECT number, name FROM former_subscriptions;

-- name: add_subscription
INSERT INTO subscriptions (name, mode, patterns, tags, lease, retry, created_at) VALUES (?, ?, ?, ?, ?, ?, ?)
ON CONFLICT (name) DO NOTHING RETURNING number;

-- name: add_cursor
INSERT INTO cursors (subscription, position, looked)
SELECT ?1, start, start FROM (
    SELECT CASE ?2 WHEN 'now' THEN max(value, (SELECT coalesce(max(id), 0) FROM events)) WHEN 'beginning' THEN value
                   ELSE CAST(?2 AS INTEGER) END AS start
      FROM meta WHERE key = 'pruned_through');

-- name: hold_deliveries
-- Whoever decides what becomes of a delivery locks it first: here there is one writer.
SELECT ?1, ?2;

-- name: hold_alone
SELECT ?1, ?2;

-- name: lock_leases
SELECT ?1;

-- name: hold_pruned
SELECT 1;

-- name: kind
SELECT id, type, tags FROM kinds WHERE id = ?;

-- name: lock_kinds
SELECT 1;

-- name: former
INSERT INTO former_subscriptions (number, name) SELECT number, name FROM subscriptions WHERE number = ?;

-- name: drop_subscription
DELETE FROM subscriptions WHERE number = ?;

-- name: drop_cursor
DELETE FROM cursors WHERE subscription = ?;

-- name: add_kind
-- Another process may have registered it since this one last looked.
INSERT INTO kinds (id, type, tags) VALUES (?, ?, ?) ON CONFLICT (id) DO NOTHING;

-- name: count_kinds
SELECT count(*) FROM kinds;

-- name: drop_unused_kinds
-- Other processes notice by meta.catalog, bumped in the same transaction.
DELETE FROM kinds WHERE id NOT IN (SELECT kind FROM deliveries);

-- ── append ───────────────────────────────────────────────────────────────────────────────────────────────────────────

-- name: add_event
INSERT INTO events (id, uid, type, tags, key, title, description, payload, metadata, created_at, priority, max_retries,
                    checksum, due_at)
VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?);

-- ── claim ────────────────────────────────────────────────────────────────────────────────────────────────────────────

-- name: cursor
SELECT position, looked FROM cursors WHERE subscription = ?;

-- name: move_cursor
UPDATE cursors SET position = ?, looked = ? WHERE subscription = ?;

-- name: next_events
SELECT json_group_array(json_array(id, type, tags, priority, coalesce(due_at, created_at), max_retries, created_at,
                                   due_at IS NOT NULL OR priority <> 0, erased_at IS NOT NULL))
  FROM (SELECT id, type, tags, priority, due_at, max_retries, created_at, erased_at
          FROM events WHERE id > ? ORDER BY id LIMIT ?);

-- name: specials
-- Special events beyond what was looked at, and whether they are erased, or a skip tells that they were dealt with.
SELECT json_group_array(json_array(id, type, tags, priority, coalesce(due_at, created_at), max_retries, created_at,
                                   erased_at IS NOT NULL
                                   OR EXISTS (SELECT 1 FROM skips WHERE subscription = ?1 AND event_id = id)))
  FROM (SELECT id, type, tags, priority, due_at, max_retries, created_at, erased_at
          FROM events INDEXED BY events_special
         WHERE (due_at IS NOT NULL OR priority <> 0) AND id > ?2 ORDER BY id LIMIT ?3);

-- name: any_special
SELECT 1 FROM events INDEXED BY events_special WHERE (due_at IS NOT NULL OR priority <> 0) AND id > ? LIMIT 1;

-- name: add_skips
INSERT INTO skips (subscription, event_id) SELECT ?1, value FROM json_each(?2) WHERE true ON CONFLICT DO NOTHING;

-- name: take_skips
DELETE FROM skips WHERE subscription = ? AND event_id <= ? RETURNING event_id;

-- name: priorities
-- Hops from one priority that pending rows have to the next lower one.
WITH RECURSIVE present (priority) AS (
    SELECT max(priority) FROM deliveries INDEXED BY deliveries_any WHERE state = 0 AND subscription = ?1 AND alone = ?2
    UNION ALL
    SELECT (SELECT max(d.priority) FROM deliveries AS d INDEXED BY deliveries_any
             WHERE d.state = 0 AND d.subscription = ?1 AND d.alone = ?2 AND d.priority < present.priority)
      FROM present WHERE present.priority IS NOT NULL)
SELECT priority FROM present WHERE priority IS NOT NULL;

-- name: due_any
-- One exact range of the index, whatever the backlog, and whatever is scheduled for later.
SELECT json_group_array(json_array(due_at, event_id, attempt, retry_count, max_retries, fresh))
  FROM (SELECT due_at, event_id, attempt, retry_count, max_retries, fresh FROM deliveries INDEXED BY deliveries_any
         WHERE state = 0 AND subscription = ?1 AND alone = ?2 AND priority = ?3 AND due_at <= ?4
           AND (due_at, event_id) > (?5, ?6)
         ORDER BY due_at, event_id LIMIT ?7);

-- name: due_kind
SELECT json_group_array(json_array(due_at, event_id, attempt, retry_count, max_retries, fresh))
  FROM (SELECT due_at, event_id, attempt, retry_count, max_retries, fresh FROM deliveries INDEXED BY deliveries_due
         WHERE state = 0 AND subscription = ?1 AND alone = ?2 AND priority = ?3 AND due_at <= ?4
           AND (due_at, event_id) > (?5, ?6) AND kind = ?8
         ORDER BY due_at, event_id LIMIT ?7);

-- name: kinds_with_due
-- Hops from one kind to the next one present in the index: the cost is the kinds that hold something, not those ever
-- registered, and the caller stops as soon as it has enough.
WITH RECURSIVE present (kind) AS (
    SELECT (SELECT min(kind) FROM deliveries INDEXED BY deliveries_due
             WHERE state = 0 AND subscription = ?1 AND alone = ?2 AND kind > ?5)
    UNION ALL
    SELECT (SELECT min(d.kind) FROM deliveries AS d INDEXED BY deliveries_due
             WHERE d.state = 0 AND d.subscription = ?1 AND d.alone = ?2 AND d.kind > present.kind)
      FROM present WHERE present.kind IS NOT NULL)
SELECT kind FROM present
 WHERE kind IS NOT NULL
   AND EXISTS (SELECT 1 FROM deliveries AS d INDEXED BY deliveries_due
                WHERE d.state = 0 AND d.subscription = ?1 AND d.alone = ?2 AND d.kind = present.kind
                  AND d.priority = ?3 AND d.due_at <= ?4);

-- name: next_lease_end
SELECT min(due_at) FROM blocks WHERE subscription = ? AND due_at > ?;

-- name: draw_numbers
UPDATE meta SET value = value + ? WHERE key = 'number' RETURNING value;

-- name: add_block
INSERT INTO blocks (number, subscription, first_id, last_id, due_at, claimed_at, owner, worker_id, ids, done)
VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?);

-- name: take_fresh
DELETE FROM deliveries WHERE subscription = ? AND event_id IN (SELECT value FROM json_each(?));

-- name: hold_rows
UPDATE deliveries SET state = 1, due_at = NULL, epoch = NULL, fresh = 0, attempt = attempt + 1,
       worker_id = ?3, claimed_at = ?4, updated_at = ?4
 WHERE subscription = ?1 AND event_id IN (SELECT value FROM json_each(?2));

-- ── leases ───────────────────────────────────────────────────────────────────────────────────────────────────────────

-- name: blocks_by_number
-- The ids of a block of one event stand in first_id alone.
SELECT json_group_array(json_array(b.number, b.subscription, b.first_id, hex(b.ids), hex(b.done), b.worker_id, b.due_at,
                                   b.claimed_at))
  FROM json_each(?1) AS asked CROSS JOIN blocks AS b ON b.number = asked.value;

-- name: blocks_around
SELECT json_group_array(json_array(number, subscription, first_id, hex(ids), hex(done), worker_id, due_at, claimed_at))
  FROM blocks INDEXED BY blocks_ids
 WHERE subscription = ?1 AND first_id <= ?3 AND first_id >= ?2 - 16384 AND last_id >= ?2;

-- name: overdue_blocks
SELECT json_group_array(json_array(number, subscription, first_id, hex(ids), hex(done), worker_id, due_at, claimed_at))
  FROM (SELECT number, subscription, first_id, ids, done, worker_id, due_at, claimed_at
          FROM blocks INDEXED BY blocks_due WHERE due_at <= ? ORDER BY due_at LIMIT ?);

-- name: blocks_of
SELECT json_group_array(json_array(number, subscription, first_id, hex(ids), hex(done), worker_id, due_at, claimed_at))
  FROM (SELECT b.number, b.subscription, b.first_id, b.ids, b.done, b.worker_id, b.due_at, b.claimed_at
          FROM json_each(?1) AS dead CROSS JOIN blocks AS b INDEXED BY blocks_owner ON b.owner = dead.value
         LIMIT ?2);

-- name: blocks_before
SELECT json_group_array(json_array(number, subscription, first_id, hex(ids), hex(done), worker_id, due_at, claimed_at))
  FROM (SELECT number, subscription, first_id, ids, done, worker_id, due_at, claimed_at
          FROM blocks WHERE number < ? ORDER BY number LIMIT ?);

-- name: any_overdue
SELECT 1 FROM blocks INDEXED BY blocks_due WHERE due_at <= ? LIMIT 1;

-- name: lease_owners
SELECT DISTINCT owner FROM blocks INDEXED BY blocks_owner;

-- name: named_owners
SELECT DISTINCT owner FROM blocks INDEXED BY blocks_owner
 UNION SELECT owner FROM handlers
 UNION SELECT holder FROM checkpoints WHERE holder IS NOT NULL;

-- name: extend
UPDATE blocks SET due_at = ? WHERE number = ?;

-- name: set_done
UPDATE blocks SET done = ? WHERE number = ?;

-- name: drop_blocks
DELETE FROM blocks WHERE number IN (SELECT value FROM json_each(?));

-- name: stories
-- What a delivery without a row is about, and nothing that may be large.
SELECT json_group_array(json_array(e.id, e.type, e.tags, e.priority, coalesce(e.due_at, e.created_at), e.max_retries,
                                   e.created_at))
  FROM json_each(?1) AS wanted CROSS JOIN events AS e ON e.id = wanted.value;

-- name: delivery_rows
SELECT json_group_array(json_array(d.subscription, d.event_id, d.state, d.kind, d.priority, d.ready_at, d.created_at,
                                   d.updated_at, d.due_at, d.max_retries, d.attempt, d.worker_id, d.claimed_at,
                                   d.retry_count, d.alone, d.fresh, d.epoch, d.died_at, d.last_retry_at, d.errors))
  FROM json_each(?2) AS wanted CROSS JOIN deliveries AS d ON d.subscription = ?1 AND d.event_id = wanted.value;

-- name: put_delivery
INSERT OR REPLACE INTO deliveries (subscription, event_id, state, kind, priority, ready_at, created_at, updated_at,
                                   due_at, max_retries, attempt, worker_id, claimed_at, retry_count, alone, fresh,
                                   epoch, died_at, last_retry_at, errors)
VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?);

-- name: drop_delivery
DELETE FROM deliveries WHERE subscription = ? AND event_id = ?;

-- name: is_above
-- Whether a cursor has still to come to an event.
SELECT 1 FROM cursors AS c JOIN events AS e ON e.id = ?2 AND e.erased_at IS NULL
 WHERE c.subscription = ?1 AND c.position < ?2
   AND NOT EXISTS (SELECT 1 FROM skips WHERE subscription = ?1 AND event_id = ?2);

-- ── audit ────────────────────────────────────────────────────────────────────────────────────────────────────────────

-- name: log
-- The ids of two rows are 1,024 apart: the entries of an array are numbered between.
INSERT INTO event_log (id, first_id, subscription, action, created_at, status, attempt, epoch, worker_id, status_code,
                       error_type, error_message, execution_time_ms, type, tags, priority, event_created_at, ready_at,
                       claimed_at, retry_count, errors)
VALUES ((coalesce((SELECT seq FROM sqlite_sequence WHERE name = 'event_log'), 0) >> 10) + 1 << 10,
        ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?);

-- name: log_array
INSERT INTO event_log (id, first_id, last_id, entries, subscription, action, created_at, status, attempt, epoch,
                       worker_id, type, tags, claimed_at, priority, retry_count, ids, places, created, times)
VALUES ((coalesce((SELECT seq FROM sqlite_sequence WHERE name = 'event_log'), 0) >> 10) + 1 << 10,
        ?, ?, ?, ?, ?, ?, ?, 1, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?);

-- name: arrays_of
SELECT id, subscription, action, created_at, status, epoch, worker_id, ids, places, times
  FROM event_log INDEXED BY event_log_arrays
 WHERE last_id IS NOT NULL AND first_id <= ?1 AND first_id >= ?2 AND last_id >= ?1 ORDER BY id;

-- name: log_back
SELECT id, first_id, subscription, action, created_at, status, attempt, epoch, worker_id, status_code, error_type,
       error_message, execution_time_ms
  FROM event_log INDEXED BY event_log_event WHERE last_id IS NULL AND first_id = ? ORDER BY id DESC;

-- name: arrays_between
-- What may tell of events of a range: of a subscription, and with a status, if these are given.
SELECT id, subscription, action, created_at, status, worker_id, ids FROM event_log INDEXED BY event_log_arrays
 WHERE last_id IS NOT NULL AND first_id <= ?2 AND first_id > ?1 - 16384 AND last_id >= ?1
   AND (?3 IS NULL OR subscription = ?3) AND (?4 IS NULL OR status = ?4);

-- name: ends_of
-- What tells how an event last stood in each subscription that has no delivery of it any more.
SELECT json_group_array(json_array(l.id, l.first_id, l.subscription, l.action, l.status, l.attempt, l.retry_count,
                                   l.created_at, l.worker_id, l.errors))
  FROM json_each(?1) AS wanted CROSS JOIN event_log AS l INDEXED BY event_log_event
    ON l.last_id IS NULL AND l.first_id = wanted.value
 WHERE l.status IS NOT NULL OR l.action IN ('DISCARDED', 'ERASED');

-- ── followers: the audit stream ──────────────────────────────────────────────────────────────────────────────────────

-- name: head_audit
-- The last id that an entry can have: those of one row share all bits but the lowest ten.
SELECT coalesce((SELECT seq FROM sqlite_sequence WHERE name = 'event_log'), 0) | 1023;

-- name: last_audit
SELECT id + entries - 1 FROM event_log WHERE id <= ? ORDER BY id DESC LIMIT 1;

-- name: ahead_audit
-- The position may lie within a row: what of that row comes before it does not count.
SELECT coalesce(
    (SELECT last - (upto - ?3)
       FROM (SELECT last, sum(own) OVER (ORDER BY id ROWS UNBOUNDED PRECEDING) AS upto
               FROM (SELECT id, id + entries - 1 AS last, max(0, min(entries, id + entries - 1 - ?1)) AS own
                       FROM event_log WHERE id >= ?1 >> 10 << 10 AND id <= ?2 ORDER BY id LIMIT ?3 + 1))
      WHERE upto >= ?3 LIMIT 1),
    (SELECT max(?1, id + entries - 1) FROM event_log WHERE id >= ?1 >> 10 << 10 AND id <= ?2 ORDER BY id DESC LIMIT 1));

-- name: when_audit
SELECT max(id, ?1 + 1), created_at FROM event_log
 WHERE id >= ?1 >> 10 << 10 AND id + entries - 1 > ?1 ORDER BY id LIMIT 1;

-- name: activity_audit
SELECT created_at / ?3, action, status, sum(min(id + entries - 1, ?2) - max(id - 1, ?1))
  FROM event_log
 WHERE id >= ?1 >> 10 << 10 AND id + entries - 1 > ?1 AND id <= ?2 AND ?1 < ?2 GROUP BY 1, 2, 3;

-- name: since_audit
SELECT max(min(id), ?1 + 1) FROM event_log
 WHERE id >= ?1 >> 10 << 10 AND id + entries - 1 > ?1 AND id <= ?2 AND created_at >= ?3;

-- name: lag_audit
-- How many rows and entries lie behind a position, in the first so many rows, and which is the last of these.
SELECT count(*), sum(id + entries - 1 - max(id - 1, ?1)), max(id)
  FROM (SELECT id, entries FROM event_log
         WHERE id >= ?1 >> 10 << 10 AND id + entries - 1 > ?1 AND id <= ?2 ORDER BY id LIMIT ?3);

-- ── followers: what is left behind ───────────────────────────────────────────────────────────────────────────────────

-- name: standing
SELECT d.event_id, e.key, d.state FROM deliveries AS d JOIN events AS e ON e.id = d.event_id
 WHERE d.subscription = ? ORDER BY d.event_id;

-- name: unpark
UPDATE deliveries SET state = 0, due_at = ?1, ready_at = ?1, updated_at = ?1
 WHERE subscription = ?2 AND event_id IN (SELECT value FROM json_each(?3)) AND state = 3
RETURNING event_id;

-- name: erased_among
-- The log may have been pruned since, and so may the audit log.
SELECT json_group_array(json_array(asked.value)) FROM json_each(?1) AS asked
 WHERE EXISTS (SELECT 1 FROM events WHERE id = asked.value AND erased_at IS NOT NULL)
    OR EXISTS (SELECT 1 FROM event_log INDEXED BY event_log_event
                WHERE last_id IS NULL AND first_id = asked.value AND action = 'ERASED');

-- ── unfinished ───────────────────────────────────────────────────────────────────────────────────────────────────────

-- name: some_deliveries
-- Without those that are leased: their row goes with their place in a block.
SELECT json_group_array(json_array(event_id, attempt))
  FROM (SELECT event_id, attempt FROM deliveries
         WHERE subscription = ? AND event_id > ? AND state <> 1 ORDER BY event_id LIMIT ?);

-- name: many_unleased
-- Whether there are a thousand, read off the key.
SELECT 1 FROM deliveries WHERE subscription = ? AND state <> 1 LIMIT 1 OFFSET 999;

-- name: count_unleased
SELECT count(*) FROM deliveries WHERE subscription = ? AND event_id > ? AND state <> 1;

-- name: drop_deliveries_after
DELETE FROM deliveries WHERE subscription = ? AND event_id > ?;

-- name: drop_skips_after
DELETE FROM skips WHERE subscription = ? AND event_id > ?;

-- name: kinds_waiting
-- Of the events that a queue's cursor would hand out in a range, how many are of which type and tags.
SELECT type, tags, count(*) FROM events
 WHERE id > ?2 AND id <= ?3 AND erased_at IS NULL
   AND NOT EXISTS (SELECT 1 FROM skips WHERE subscription = ?1 AND event_id = events.id)
 GROUP BY type, tags;

-- ── retention ────────────────────────────────────────────────────────────────────────────────────────────────────────

-- name: dead_among
SELECT json_group_array(json_array(d.event_id, d.attempt))
  FROM json_each(?2) AS asked CROSS JOIN deliveries AS d
    ON d.subscription = ?1 AND d.event_id = asked.value AND d.state = 2;

-- name: revive
UPDATE deliveries
   SET state = 0, due_at = ?1, ready_at = ?1, updated_at = ?1, last_retry_at = ?1, attempt = 0, retry_count = 0,
       claimed_at = NULL, errors = NULL, died_at = NULL, epoch = NULL, alone = 0, fresh = 0
 WHERE subscription = ?2 AND event_id = ?3 AND state = 2;

-- name: behind
-- Followers that have not come to a position of a stream; an ordered subscription without a checkpoint is at the
-- beginning.
SELECT s.name, coalesce(c.position, 0) FROM subscriptions AS s LEFT JOIN checkpoints AS c ON c.subscription = s.name
 WHERE coalesce(c.stream, iif(s.mode = 'ordered', 'events', '')) = ?1 AND coalesce(c.position, 0) < ?2
 ORDER BY s.name;

-- name: next_ids
SELECT json_group_array(json_array(id)) FROM (SELECT id FROM events WHERE id > ? AND id <= ? ORDER BY id LIMIT ?);

-- name: next_rows
-- Rows of the audit log up to so many entries, the first whatever it holds, and one more.
SELECT json_group_array(json_array(id, first_id, entries, hex(ids)))
  FROM (SELECT id, first_id, entries, ids, row_number() OVER so_far AS place, sum(entries) OVER so_far AS upto
          FROM (SELECT id, first_id, entries, ids FROM event_log WHERE id > ?1 AND id <= ?2 ORDER BY id LIMIT ?3 + 1)
        WINDOW so_far AS (ORDER BY id ROWS UNBOUNDED PRECEDING))
 WHERE upto - entries <= ?3 OR place = 2;

-- name: prune_events
DELETE FROM events WHERE id > ? AND id <= ? AND id NOT IN (SELECT value FROM json_each(?));

-- name: prune_audit
DELETE FROM event_log WHERE id > ? AND id <= ? AND id NOT IN (SELECT value FROM json_each(?));

-- name: blank_event
UPDATE events SET payload = 'null', title = NULL, description = NULL, metadata = '{}', checksum = ?1,
                  erased_at = coalesce(erased_at, ?2)
 WHERE id = ?3 AND (erased_at IS NULL OR payload <> 'null' OR title IS NOT NULL OR description IS NOT NULL
                    OR metadata <> '{}')
RETURNING id;

-- name: blank_log
-- What failed may have quoted what it was given; what tells of a rewind, or of the end of a subscription, does not.
UPDATE event_log INDEXED BY event_log_event SET error_message = NULL, errors = NULL
 WHERE last_id IS NULL AND first_id = ? AND (error_message IS NOT NULL OR errors IS NOT NULL)
   AND action NOT IN ('REPLAYED', 'DISCARDED')
RETURNING first_id;

-- name: erasable_events
SELECT count(*) FROM json_each(?1) AS wanted CROSS JOIN events AS e ON e.id = wanted.value
 WHERE e.payload <> 'null' OR e.title IS NOT NULL OR e.description IS NOT NULL OR e.metadata <> '{}';

-- name: erasable_log
SELECT count(*) FROM json_each(?1) AS wanted CROSS JOIN event_log AS l INDEXED BY event_log_event
    ON l.last_id IS NULL AND l.first_id = wanted.value
 WHERE (l.error_message IS NOT NULL OR l.errors IS NOT NULL) AND l.action NOT IN ('REPLAYED', 'DISCARDED');

-- ── Spark ────────────────────────────────────────────────────────────────────────────────────────────────────────────

-- name: diverted_before
-- What has a delivery, or had one that was not discarded. Diverted deliveries have a history from the first, so that
-- none of their ends is in an array.
SELECT json_group_array(json_array(asked.value)) FROM json_each(?2) AS asked
 WHERE EXISTS (SELECT 1 FROM deliveries WHERE subscription = ?1 AND event_id = asked.value)
    OR coalesce((SELECT action FROM event_log INDEXED BY event_log_event
                  WHERE last_id IS NULL AND first_id = asked.value AND subscription = ?1 ORDER BY id DESC LIMIT 1),
                'DISCARDED') <> 'DISCARDED';

-- ── extract ──────────────────────────────────────────────────────────────────────────────────────────────────────────

-- name: audit_rows
SELECT id, first_id, subscription, action, created_at, status, attempt, epoch, worker_id, status_code, error_type,
       error_message, execution_time_ms, type, tags, priority, event_created_at, ready_at, claimed_at, retry_count,
       errors, entries, ids, places, created, times
  FROM event_log WHERE id >= ?1 >> 10 << 10 AND id <= ?2 ORDER BY id;

-- name: standing_rows
SELECT d.event_id, d.state, k.type, k.tags, d.priority, d.created_at, d.due_at, d.ready_at, d.updated_at, d.claimed_at,
       d.attempt, d.retry_count, d.worker_id, d.errors, d.died_at
  FROM deliveries AS d JOIN kinds AS k ON k.id = d.kind
 WHERE d.subscription = ? AND d.event_id > ? AND d.event_id <= ? ORDER BY d.event_id;

-- name: standing_above
SELECT e.id, e.type, e.tags, e.priority, e.created_at, coalesce(e.due_at, e.created_at)
  FROM cursors AS c CROSS JOIN events AS e ON e.id > max(c.position, ?2) AND e.id <= ?3
 WHERE c.subscription = ?1 AND e.erased_at IS NULL
   AND NOT EXISTS (SELECT 1 FROM skips AS s WHERE s.subscription = ?1 AND s.event_id = e.id)
 ORDER BY e.id;

-- ── restore ──────────────────────────────────────────────────────────────────────────────────────────────────────────

-- name: begin_sequences
-- SQLite keeps a counter from the first row on; a log that was empty when it was backed up has none yet.
INSERT INTO sqlite_sequence (name, seq)
SELECT value, 0 FROM json_each('["events", "event_log"]') WHERE value NOT IN (SELECT name FROM sqlite_sequence);

-- name: jump_ids
-- The next multiple of a thousand million: above whatever was given between the backup and its restoring.
UPDATE sqlite_sequence SET seq = (seq / 1000000000 + 1) * 1000000000 WHERE name IN ('events', 'event_log');

-- name: set_back_cursors
-- A cursor beyond the log would pass over what is published next.
UPDATE cursors SET position = min(position, log.last), looked = min(looked, log.last)
  FROM (SELECT max(coalesce((SELECT max(id) FROM events), 0), CAST(value AS INTEGER)) AS last
          FROM meta WHERE key = 'pruned_through') AS log
 WHERE position > log.last OR looked > log.last
RETURNING subscription, position;

-- ── lookups ──────────────────────────────────────────────────────────────────────────────────────────────────────────

-- name: places
-- Where a subscription (none: any) still has these events: above its cursor (the only form with type and tags), in a row
-- (of which ?5 tells whether its errors are wanted, which may be large), or in a block that may hold some (the only form
-- with a number). One statement: its snapshot sees each event in just one place, or in a block and its held row.
SELECT json_group_array(json_array(subscription, event_id, type, tags, number, ids, done, attempt, has_row, state, due_at,
                                   retry_count, updated_at, worker_id, errors))
  FROM (SELECT c.subscription, e.id AS event_id, e.type, e.tags, NULL AS number, NULL AS ids, NULL AS done, 0 AS attempt,
               0 AS has_row, 0 AS state, coalesce(e.due_at, e.created_at) AS due_at, 0 AS retry_count,
               e.created_at AS updated_at, NULL AS worker_id, NULL AS errors
          FROM cursors AS c CROSS JOIN json_each(?1) AS wanted CROSS JOIN events AS e ON e.id = wanted.value
         WHERE wanted.value > c.position AND e.erased_at IS NULL AND (?4 IS NULL OR c.subscription = ?4)
           AND NOT EXISTS (SELECT 1 FROM skips AS s WHERE s.subscription = c.subscription AND s.event_id = e.id)
        UNION ALL
        SELECT d.subscription, d.event_id, NULL, NULL, NULL, NULL, NULL, d.attempt, 1, d.state, d.due_at,
               d.retry_count, d.updated_at, d.worker_id, iif(?5, d.errors, NULL)
          FROM subscriptions AS s CROSS JOIN json_each(?1) AS wanted CROSS JOIN deliveries AS d
            ON d.subscription = s.number AND d.event_id = wanted.value
         WHERE ?4 IS NULL OR s.number = ?4
        UNION ALL
        SELECT b.subscription, b.first_id, NULL, NULL, b.number, hex(b.ids), hex(b.done), 1, 0, 1, b.due_at, 0,
               b.claimed_at, b.worker_id, NULL
          FROM subscriptions AS s CROSS JOIN blocks AS b INDEXED BY blocks_ids ON b.subscription = s.number
         WHERE b.first_id <= ?3 AND b.first_id > ?2 - 16384 AND b.last_id >= ?2 AND (?4 IS NULL OR s.number = ?4));

-- name: above_below
SELECT json_group_array(json_array(id, type, tags))
  FROM (SELECT id, type, tags FROM events
         WHERE id > (SELECT position FROM cursors WHERE subscription = ?1) AND id < ?2 AND erased_at IS NULL
           AND NOT EXISTS (SELECT 1 FROM skips WHERE subscription = ?1 AND event_id = events.id)
         ORDER BY id DESC LIMIT ?3);

-- name: some_pending
-- Off the smallest index, which has them in order of due time.
SELECT json_group_array(json_array(event_id))
  FROM (SELECT event_id FROM deliveries INDEXED BY deliveries_any
         WHERE state = 0 AND subscription = ? AND event_id < ? LIMIT ?);

-- name: count_waiting
-- Pending rows off the smallest index; only ordered subscriptions have parked ones, and few rows.
SELECT count(*)
  FROM (SELECT 1 FROM deliveries INDEXED BY deliveries_any WHERE state = 0 AND subscription = ?1
        UNION ALL
        SELECT 1 FROM deliveries
         WHERE state = 3 AND subscription = ?1
           AND EXISTS (SELECT 1 FROM subscriptions WHERE number = ?1 AND mode = 'ordered')
         LIMIT ?2);

-- name: waiting_below
SELECT event_id FROM deliveries WHERE subscription = ? AND event_id < ? AND state IN (0, 3) ORDER BY event_id DESC;

-- name: blocks_below
SELECT number, subscription, first_id, hex(ids), hex(done), worker_id, due_at, claimed_at
  FROM blocks INDEXED BY blocks_ids WHERE subscription = ? AND first_id < ? ORDER BY first_id DESC;

-- name: dead_below
-- Newest event first, straight off the index; the keyset is (created_at, event_id).
SELECT event_id, subscription, created_at, kind, died_at FROM deliveries INDEXED BY deliveries_dead
 WHERE state = 2 AND subscription = ? AND (created_at, event_id) < (?, ?)
 ORDER BY created_at DESC, event_id DESC;

-- name: completed_top
SELECT max(first_id) FROM event_log INDEXED BY event_log_completed
 WHERE subscription = ? AND status = ? AND status IN ('COMPLETED', 'COMPLETED_WITH_ERRORS') AND first_id < ?;

-- name: completed_between
-- The last entry of each event of a window, unless a later one tells of another end. An array's row stands for the first
-- of its events here, which is right.
SELECT json_group_array(json_array(event_id, entry))
  FROM (SELECT c.first_id AS event_id, max(c.id) AS entry FROM event_log AS c INDEXED BY event_log_completed
         WHERE c.subscription = ?1 AND c.status = ?2 AND c.status IN ('COMPLETED', 'COMPLETED_WITH_ERRORS')
           AND c.first_id >= ?3 AND c.first_id < ?4
           AND NOT EXISTS (SELECT 1 FROM event_log AS l INDEXED BY event_log_event
                            WHERE l.last_id IS NULL AND l.first_id = c.first_id AND l.id > c.id AND l.subscription = ?1
                              AND (l.status IS NOT NULL OR l.action IN ('DISCARDED', 'ERASED')))
         GROUP BY c.first_id);

-- name: array_spans
-- Between which events the arrays of completed ones reach.
SELECT json_group_array(json_array(id, first_id, last_id)) FROM event_log INDEXED BY event_log_arrays
 WHERE last_id IS NOT NULL AND first_id <= ?3 AND first_id > ?2 - 16384 AND last_id >= ?2
   AND subscription = ?1 AND status = 'COMPLETED';

-- name: later_ends
-- The last entry after ?3 that tells of an end of its own, by event.
SELECT json_group_array(json_array(event_id, entry))
  FROM (SELECT wanted.value AS event_id, max(l.id) AS entry
          FROM json_each(?2) AS wanted CROSS JOIN event_log AS l INDEXED BY event_log_event
            ON l.last_id IS NULL AND l.first_id = wanted.value AND l.id > ?3
         WHERE l.subscription = ?1 AND (l.status IS NOT NULL OR l.action IN ('DISCARDED', 'ERASED'))
         GROUP BY wanted.value);

-- name: first_events
-- Where the first events end, and how many they are.
SELECT max(id), count(*) FROM (SELECT id FROM events ORDER BY id LIMIT ?);

-- name: dead_one
SELECT event_id, subscription, created_at, kind, died_at, priority, attempt, errors, last_retry_at
  FROM deliveries WHERE subscription = ? AND event_id = ? AND state = 2;

-- name: last_error
-- Without its traceback: those of many letters may be large.
SELECT subscription, event_id, CASE WHEN json_array_length(errors) > 0
                                    THEN json_array(json_remove(json_extract(errors, '$[#-1]'), '$.traceback')) END
  FROM deliveries WHERE subscription = ? AND event_id = ? AND state = 2;

-- name: count_dead
SELECT count(*) FROM (SELECT 1 FROM deliveries INDEXED BY deliveries_dead WHERE state = 2 AND subscription = ? LIMIT ?);

-- name: any_event
SELECT 1 FROM events WHERE id > ? LIMIT 1;

-- name: retried_kinds
-- Hops from one kind to the next.
WITH RECURSIVE present (kind) AS (
    SELECT (SELECT min(kind) FROM deliveries INDEXED BY deliveries_tried
             WHERE state = 0 AND fresh = 0 AND subscription = ?1)
    UNION ALL
    SELECT (SELECT min(d.kind) FROM deliveries AS d INDEXED BY deliveries_tried
             WHERE d.state = 0 AND d.fresh = 0 AND d.subscription = ?1 AND d.kind > present.kind)
      FROM present WHERE present.kind IS NOT NULL)
SELECT kind FROM present WHERE kind IS NOT NULL;

-- name: backlog
-- The next events above a cursor by type and tags: how many wait, how many of them until later, since when the first is
-- due; how many these are with those dealt with early, and the last one.
SELECT type, tags, sum(waits), sum(waits AND due > ?4), min(CASE WHEN waits AND due <= ?4 THEN due END), count(*), max(id)
  FROM (SELECT id, type, tags, coalesce(due_at, created_at) AS due,
               erased_at IS NULL
               AND NOT EXISTS (SELECT 1 FROM skips WHERE subscription = ?1 AND event_id = events.id) AS waits
          FROM events WHERE id > ?2 ORDER BY id LIMIT ?3)
 GROUP BY type, tags;

-- name: depth
-- Pending rows by kind: how many, how many of them later, since when the first is due. In order of the index: nothing is
-- sorted.
SELECT subscription, kind, count(*), sum(due_at > ?1), min(CASE WHEN due_at <= ?1 THEN due_at END)
  FROM deliveries INDEXED BY deliveries_due WHERE state = 0 GROUP BY subscription, alone, kind;

-- name: dead_depth
SELECT subscription, count(*) FROM deliveries INDEXED BY deliveries_dead WHERE state = 2 GROUP BY subscription;

-- name: parked_depth
-- Only ordered subscriptions have such rows, and few others.
SELECT d.subscription, count(*) FROM subscriptions AS s CROSS JOIN deliveries AS d ON d.subscription = s.number
 WHERE s.mode = 'ordered' AND d.state = 3 GROUP BY d.subscription;

-- name: count_completed
-- Rows off the index, and of arrays what a row stands for beside itself.
SELECT subscription, status, sum(n)
  FROM (SELECT subscription, status, count(*) AS n FROM event_log INDEXED BY event_log_completed
         WHERE status IN ('COMPLETED', 'COMPLETED_WITH_ERRORS') GROUP BY subscription, status
        UNION ALL
        SELECT subscription, status, sum(entries - 1) FROM event_log INDEXED BY event_log_arrays
         WHERE last_id IS NOT NULL AND status = 'COMPLETED' GROUP BY subscription)
 GROUP BY subscription, status;

-- name: recent_actions
-- Goes back from the newest row to the first that is too old: a rate must not read the whole log.
SELECT action, sum(entries) FROM event_log
 WHERE id > coalesce((SELECT id FROM event_log WHERE created_at <= ? ORDER BY id DESC LIMIT 1), 0) GROUP BY 1;

-- ── the rest ─────────────────────────────────────────────────────────────────────────────────────────────────────────

-- name: data_version
-- Changes when another connection has written; a look at shared memory, not at the disk.
PRAGMA data_version;

-- name: bump_catalog
UPDATE meta SET value = value + 1 WHERE key = 'catalog';

-- name: set_interests
UPDATE subscriptions SET patterns = ?, tags = ? WHERE name = ?;

-- name: set_paused
UPDATE subscriptions SET paused = ? WHERE name = ?;

-- name: find_uid
SELECT event_id, digest FROM dedup WHERE uid = ?;

-- name: add_uid
INSERT INTO dedup (uid, event_id, digest, created_at) VALUES (?, ?, ?, ?);

-- name: drop_old_uids
DELETE FROM dedup WHERE uid IN (SELECT uid FROM dedup WHERE created_at < ? ORDER BY created_at LIMIT ?);

-- name: event
SELECT id, uid, type, tags, key, title, description, payload, metadata, created_at, priority, max_retries, checksum
  FROM events WHERE id = ?;

-- name: events_by_id
-- The first of these events that fit into ?2 bytes together, and one more; with each, the bytes of all up to it.
SELECT json_group_array(json_array(e.id, e.uid, e.type, e.tags, e.key, e.title, e.description, e.payload, e.metadata,
                                   e.created_at, e.priority, e.max_retries, e.checksum, s.upto))
  FROM (SELECT id, own, sum(own) OVER (ORDER BY place ROWS UNBOUNDED PRECEDING) AS upto
          FROM (SELECT wanted.key AS place, v.id, octet_length(v.payload) + octet_length(v.metadata)
                       + coalesce(octet_length(v.title), 0) + coalesce(octet_length(v.description), 0) AS own
                  FROM json_each(?1) AS wanted CROSS JOIN events AS v ON v.id = wanted.value)) AS s
 CROSS JOIN events AS e ON e.id = s.id
 WHERE s.upto - s.own < ?2;

-- name: events_below
SELECT id FROM events WHERE id < ? ORDER BY id DESC;

-- name: see_handler
INSERT INTO handlers (id, name, subscription, pattern, tags, worker_id, owner, seen_at) VALUES (?, ?, ?, ?, ?, ?, ?, ?)
ON CONFLICT (id) DO UPDATE SET seen_at = excluded.seen_at;

-- name: forget_handler
DELETE FROM handlers WHERE owner = ? AND id = ?;

-- name: forget_owner
DELETE FROM handlers WHERE owner = ?;

-- name: handlers
SELECT id, name, subscription, pattern, tags, worker_id, owner, seen_at FROM handlers ORDER BY subscription, pattern, id;

-- name: breaker
SELECT failures, opened_at, probe_until FROM breakers WHERE name = ?;

-- name: add_breaker
INSERT INTO breakers (name, failures) VALUES (?, 0) ON CONFLICT (name) DO NOTHING;

-- name: breaker_held
SELECT failures, opened_at, probe_until FROM breakers WHERE name = ?;

-- name: set_breaker
UPDATE breakers SET failures = ?, opened_at = ?, probe_until = ? WHERE name = ?;

-- name: recent_events
SELECT count(*) FROM events
 WHERE id > coalesce((SELECT id FROM events WHERE created_at <= ? ORDER BY id DESC LIMIT 1), 0);

-- name: store_bytes
SELECT page_count * page_size FROM pragma_page_count, pragma_page_size;

-- name: names
-- SQLite takes Events for events; tables, indexes and views share their names.
SELECT lower(name) FROM sqlite_schema;

-- name: free_pages
PRAGMA freelist_count;

-- name: give_back_pages
PRAGMA incremental_vacuum(1000);

-- name: known_uids
SELECT d.uid FROM json_each(?1) AS asked CROSS JOIN dedup AS d ON d.uid = asked.value;

-- name: set_log_id
UPDATE meta SET value = ? WHERE key = 'log_id';

-- name: meta
SELECT value FROM meta WHERE key = ?;

-- name: head_events
-- One writer at a time: ids commit in order, and nothing is held back.
SELECT coalesce((SELECT seq FROM sqlite_sequence WHERE name = 'events'), 0);

-- name: last_events
SELECT max(id) FROM events WHERE id <= ?;

-- name: ahead_events
SELECT max(id) FROM (SELECT id FROM events WHERE id > ? AND id <= ? ORDER BY id LIMIT ?);

-- name: when_events
SELECT id, created_at FROM events WHERE id > ? ORDER BY id LIMIT 1;

-- name: activity_events
SELECT created_at / ?3, NULL, NULL, count(*) FROM events WHERE id > ?1 AND id <= ?2 GROUP BY 1;

-- name: since_events
SELECT min(id) FROM events WHERE id > ? AND id <= ? AND created_at >= ?;

-- name: checkpoints
-- No lock is looked at: here all processes are on one host, where it is known of each whether it lives.
SELECT c.subscription, c.stream, c.position, c.log_id, c.moved_at, c.epoch, c.worker_id, c.held_until, c.holder, 0,
       c.stopped, c.stopped_before
  FROM checkpoints AS c JOIN subscriptions AS s ON s.name = c.subscription ORDER BY c.subscription;

-- name: add_checkpoint
INSERT INTO checkpoints (subscription, stream, position, log_id, moved_at) VALUES (?, ?, ?, ?, ?);

-- name: move_checkpoint
-- Only forwards, and only in the log it was made for.
UPDATE checkpoints SET position = ?1, moved_at = ?2 WHERE subscription = ?3 AND log_id = ?4 AND position <= ?1;

-- name: drop_checkpoint
DELETE FROM checkpoints WHERE subscription = ?;

-- name: add_part
INSERT INTO parts (query, batch, created_at) VALUES (?, ?, ?) RETURNING part;

-- name: part
SELECT part FROM parts WHERE part = ?;

-- name: parts_of
SELECT part FROM parts WHERE query = ? AND batch = ?;

-- name: stage
INSERT INTO staged (part, position, uid, chosen, type, tags, key, title, description, payload, metadata, priority,
                    max_retries, delay, at)
VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?);

-- name: publish_part
-- What to publish of a part: here it is appended row by row, there is one writer anyway.
SELECT uid, type, payload, NULL, chosen, tags, key, title, description, metadata, delay, at, priority, max_retries
  FROM staged WHERE part = ? AND position >= ? AND position < ? ORDER BY position;

-- name: add_sunk
-- Yields nothing if this batch was published before.
INSERT INTO sunk (query, batch, brought, created_at) VALUES (?, ?, ?, ?) ON CONFLICT (query, batch) DO NOTHING
RETURNING batch;

-- name: drop_staged
-- Some at a time: nobody is to wait long for a large part to go.
DELETE FROM staged WHERE part = ?1 AND position IN (SELECT position FROM staged WHERE part = ?1 LIMIT ?2);

-- name: drop_part
DELETE FROM parts WHERE part = ?;

-- name: old_parts
SELECT part FROM parts WHERE created_at < ? ORDER BY part LIMIT ?;

-- name: drop_stray
-- What a task brought after its part had been dropped: no part that is still there comes before it.
DELETE FROM staged WHERE part < (SELECT coalesce(min(part), 9223372036854775807) FROM parts);

-- name: drop_old_sunk
DELETE FROM sunk WHERE created_at < ?;

-- name: uid_since
SELECT created_at FROM dedup WHERE uid = ?;

-- name: raise_pruned
UPDATE meta SET value = max(value, ?1) WHERE key = ?2;

-- name: bearing
-- No index holds uids or keys of the log: a range of it is read.
SELECT id FROM events WHERE id > ?1 AND id <= ?2 AND (uid = ?3 OR key = ?4) ORDER BY id;

-- name: identities
SELECT e.id, e.uid, e.type, e.tags FROM json_each(?1) AS wanted CROSS JOIN events AS e ON e.id = wanted.value;

-- name: read_on
SELECT id, uid, type, tags, key, title, description, payload, metadata, created_at, priority, max_retries, checksum,
       (SELECT value FROM meta WHERE key = 'pruned_through'),
       octet_length(payload) + octet_length(metadata) + coalesce(octet_length(title), 0)
       + coalesce(octet_length(description), 0)
  FROM events WHERE id > ? ORDER BY id LIMIT ?;

-- name: lead
SELECT position, log_id, holder, locked, held_until, crashes, trying
  FROM checkpoints WHERE subscription = ? AND stream = 'events';

-- name: take_lead
UPDATE checkpoints SET epoch = ?, holder = ?, worker_id = ?, locked = ?, held_until = ?, crashes = ?, trying = NULL
 WHERE subscription = ?;

-- name: announce
UPDATE checkpoints SET trying = ? WHERE subscription = ? AND epoch = ?;

-- name: keep_lead
UPDATE checkpoints SET held_until = ? WHERE subscription = ? AND epoch = ?;

-- name: position
SELECT position FROM checkpoints WHERE subscription = ?;

-- name: reader
SELECT epoch FROM checkpoints WHERE subscription = ?;

-- name: resign
-- What an earlier reader has stopped at stands until somebody gets further; started again, it is tried again.
UPDATE checkpoints
   SET holder = NULL, locked = 0, held_until = NULL, stopped = coalesce(?1, stopped),
       crashes = CASE WHEN ?1 IS NULL THEN crashes ELSE 0 END,
       stopped_before = CASE WHEN ?1 IS NULL THEN stopped_before ELSE ?2 END
 WHERE subscription = ?3 AND epoch = ?4;

-- name: move_lead
-- The epoch is the fence: whoever was deposed moves nothing.
UPDATE checkpoints SET position = ?1, moved_at = ?2, crashes = 0, stopped = NULL, stopped_before = NULL
 WHERE subscription = ?3 AND epoch = ?4 AND position <= ?1;

-- name: rewind
UPDATE checkpoints
   SET position = ?, moved_at = ?, epoch = ?, log_id = ?, holder = NULL, locked = 0, held_until = NULL, crashes = 0,
       stopped = NULL, stopped_before = NULL
 WHERE subscription = ?;

-- name: kinds_between
SELECT type, tags, count(*) FROM events WHERE id > ? AND id <= ? GROUP BY type, tags;

-- name: add_token
INSERT INTO tokens (id, name, digest, scopes, created_at, expires_at) VALUES (?, ?, ?, ?, ?, ?);

-- name: tokens
SELECT id, name, digest, scopes, created_at, expires_at, revoked_at FROM tokens ORDER BY created_at, id;

-- name: revoke_token
UPDATE tokens SET revoked_at = coalesce(revoked_at, ?) WHERE id = ?;

-- name: blank_stopped
-- What a follower said when it stopped may quote the event before which it did.
UPDATE checkpoints SET stopped = 'erased' WHERE stopped_before = ?;
