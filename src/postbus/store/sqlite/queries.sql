-- Every statement of the SQLite store. Parameters are positional.

-- name: catalog
-- Whether subscriptions have changed, how far the routes go, the log's head, no time (the process's clock decides), and
-- the routes added since the last look.
SELECT (SELECT value FROM meta WHERE key = 'catalog'),
       coalesce((SELECT seq FROM sqlite_sequence WHERE name = 'routes'), 0),
       coalesce((SELECT seq FROM sqlite_sequence WHERE name = 'events'), 0),
       NULL,
       (SELECT json_group_array(json_array(id, subscription, priority, type, tags, solo))
          FROM (SELECT id, subscription, priority, type, tags, solo FROM routes WHERE position > ?1 ORDER BY position));

-- name: data_version
-- Changes when another connection has written; a look at shared memory, not at the disk.
PRAGMA data_version;

-- name: bump_catalog
UPDATE meta SET value = value + 1 WHERE key = 'catalog';

-- name: subscriptions
SELECT name, mode, patterns, tags, paused, lease, retry, created_at FROM subscriptions ORDER BY name;

-- name: add_subscription
INSERT INTO subscriptions (name, mode, patterns, tags, lease, retry, created_at) VALUES (?, ?, ?, ?, ?, ?, ?);

-- name: set_interests
UPDATE subscriptions SET patterns = ?, tags = ? WHERE name = ?;

-- name: set_paused
UPDATE subscriptions SET paused = ? WHERE name = ?;

-- name: drop_subscription
DELETE FROM subscriptions WHERE name = ?;

-- name: add_route
-- Another process may have registered it since this one last looked.
INSERT INTO routes (id, subscription, priority, type, tags, solo) VALUES (?, ?, ?, ?, ?, ?) ON CONFLICT (id) DO NOTHING;

-- name: drop_unused_routes
-- Publishers notice by meta.catalog, bumped in the same transaction, and register again what they need.
DELETE FROM routes WHERE NOT EXISTS (SELECT 1 FROM deliveries WHERE deliveries.route = routes.id);

-- name: count_routes
SELECT count(*) FROM routes;

-- name: add_event
INSERT INTO events (id, uid, type, tags, key, title, description, payload, metadata, created_at, priority, max_retries,
                    checksum)
VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?);

-- name: add_deliveries
-- Events that go the same way, straight from the log: half the cost of binding a row for each.
INSERT INTO deliveries (event_id, subscription, route, due_at, ready_at, created_at, updated_at, max_retries)
SELECT e.id, ?1, ?2, ?3, ?3, e.created_at, ?4, e.max_retries
  FROM json_each(?5) AS added CROSS JOIN events AS e ON e.id = added.value;

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

-- name: events_after
SELECT id, type, tags, priority FROM events WHERE id > ? ORDER BY id LIMIT ?;

-- name: due
-- One exact range of deliveries_due, whatever the backlog, and whatever is scheduled for later. A JSON array, because
-- each row fetched singly gives up and takes back Python's lock: with busy handlers that costs more than the query.
SELECT json_group_array(json_array(due_at, event_id, state, attempt, retry_count))
  FROM (SELECT due_at, event_id, state, attempt, retry_count
          FROM deliveries INDEXED BY deliveries_due
         WHERE route = ?1 AND due_at <= ?2 AND (due_at, event_id) > (?3, ?4)
         ORDER BY due_at, event_id LIMIT ?5);

-- name: due_one
-- The same for a single row, for which making an array would take as long as the look itself.
SELECT due_at, event_id, state, attempt, retry_count
  FROM deliveries INDEXED BY deliveries_due
 WHERE route = ?1 AND due_at <= ?2 AND (due_at, event_id) > (?3, ?4)
 ORDER BY due_at, event_id LIMIT ?5;

-- name: is_due
SELECT 1 FROM deliveries INDEXED BY deliveries_due WHERE route = ? AND due_at <= ? LIMIT 1;

-- name: next_due
SELECT due_at FROM deliveries INDEXED BY deliveries_due WHERE route = ? AND due_at > ? ORDER BY due_at LIMIT 1;

-- name: routes_with_due
-- Hops from one route to the next one present in the index: the cost is the routes that hold something, not those
-- ever registered, and the caller stops as soon as it has enough.
WITH RECURSIVE present (route) AS (
    SELECT (SELECT min(route) FROM deliveries INDEXED BY deliveries_due WHERE route > ?1 AND due_at IS NOT NULL)
    UNION ALL
    SELECT (SELECT min(d.route) FROM deliveries AS d INDEXED BY deliveries_due
             WHERE d.route > present.route AND d.due_at IS NOT NULL)
      FROM present WHERE present.route IS NOT NULL)
SELECT route FROM present
 WHERE route IS NOT NULL
   AND EXISTS (SELECT 1 FROM deliveries AS d INDEXED BY deliveries_due WHERE d.route = present.route AND d.due_at <= ?2);

-- name: draw_epochs
UPDATE meta SET value = value + ? WHERE key = 'epoch' RETURNING value;

-- name: lease
-- The whole batch in one step; epochs rise in the order of the array.
UPDATE deliveries SET state = 1, tried = 1, due_at = ?3, epoch = ?4 + taken.key, attempt = attempt + 1, claimed_at = ?5,
       updated_at = ?5, worker_id = ?6, owner = ?7
  FROM json_each(?1) AS taken
 WHERE deliveries.event_id = taken.value AND deliveries.subscription = ?2;

-- name: lease_one
UPDATE deliveries SET state = 1, tried = 1, due_at = ?1, epoch = ?2, attempt = attempt + 1, claimed_at = ?3,
       updated_at = ?3, worker_id = ?4, owner = ?5
 WHERE event_id = ?6 AND subscription = ?7;

-- name: log_picked
INSERT INTO event_log (event_id, subscription, action, created_at, status, attempt, epoch, worker_id)
SELECT d.event_id, d.subscription, 'PICKED', d.claimed_at, 'PROCESSING', d.attempt, d.epoch, d.worker_id
  FROM json_each(?1) AS taken CROSS JOIN deliveries AS d ON d.event_id = taken.value AND d.subscription = ?2;

-- name: log
INSERT INTO event_log (event_id, subscription, action, created_at, status, attempt, epoch, worker_id, status_code,
                       error_type, error_message, execution_time_ms)
VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?);

-- name: log_end
INSERT INTO event_log (event_id, subscription, action, created_at, status, attempt, epoch, worker_id, status_code,
                       error_type, error_message, execution_time_ms, type, tags, priority, event_created_at, ready_at,
                       claimed_at, retry_count, errors)
VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?);

-- name: finish
-- The epoch is the fence: a late worker removes no row.
DELETE FROM deliveries WHERE event_id = ? AND subscription = ? AND epoch = ?;

-- name: epochs
-- The fence for a whole batch: the epochs that stand now, to be compared with those the settlements bring.
SELECT json_group_array(json_array(d.event_id, d.epoch))
  FROM json_each(?1) AS asked CROSS JOIN deliveries AS d ON d.event_id = asked.value AND d.subscription = ?2
 WHERE d.epoch > 0 AND d.state IN (0, 1);

-- name: log_completed
-- Each told is "event_id milliseconds": reading a flat text is twice as fast as digging into nested JSON.
INSERT INTO event_log (event_id, subscription, action, created_at, status, attempt, epoch, worker_id,
                       execution_time_ms, type, tags, priority, event_created_at, ready_at, claimed_at, retry_count,
                       errors)
SELECT d.event_id, d.subscription, 'COMPLETED', ?4, 'COMPLETED', d.attempt, d.epoch, ?3,
       CAST(substr(told.value, instr(told.value, ' ') + 1) AS REAL), r.type, r.tags, r.priority, d.created_at,
       d.ready_at, d.claimed_at, d.retry_count, d.errors
  FROM json_each(?1) AS told
 CROSS JOIN deliveries AS d ON d.event_id = CAST(told.value AS INTEGER) AND d.subscription = ?2
 CROSS JOIN routes AS r ON r.id = d.route;

-- name: finish_all
-- Only what `epochs` let through in this very transaction.
DELETE FROM deliveries WHERE event_id IN (SELECT value FROM json_each(?1)) AND subscription = ?2;

-- name: held
-- What the fence lets through, for the outcomes that keep the row.
SELECT event_id, subscription, route, state, due_at, attempt, retry_count, max_retries, epoch, worker_id, errors,
       created_at, ready_at, claimed_at
  FROM deliveries WHERE event_id = ? AND subscription = ? AND epoch = ? AND epoch > 0 AND state IN (0, 1);

-- name: delivery
SELECT event_id, subscription, route, state, due_at, attempt, retry_count, max_retries, epoch, worker_id, errors,
       created_at, ready_at, claimed_at
  FROM deliveries WHERE event_id = ? AND subscription = ?;

-- name: end_attempt
-- A failed or expired attempt that will be followed by another.
UPDATE deliveries SET state = 0, tried = 0, route = ?, due_at = ?, ready_at = ?, updated_at = ?, epoch = ?,
       retry_count = ?,
       errors = ?
 WHERE event_id = ? AND subscription = ? AND epoch = ?;

-- name: bury
UPDATE deliveries SET state = 2, tried = 2, route = ?, due_at = NULL, updated_at = ?, epoch = ?, retry_count = ?, errors = ?,
       died_at = ?
 WHERE event_id = ? AND subscription = ? AND epoch = ?;

-- name: recorded
-- Whether this very epoch has recorded an outcome before, and which.
SELECT action, status FROM event_log
 WHERE event_id = ? AND subscription = ? AND epoch = ? AND action IN ('COMPLETED', 'COMPLETED_WITH_ERRORS', 'FAILED');

-- name: extend
UPDATE deliveries SET due_at = ?, updated_at = ? WHERE event_id = ? AND subscription = ? AND epoch = ? AND state = 1
RETURNING event_id, subscription, epoch;

-- name: release
UPDATE deliveries SET state = 0, tried = 0, due_at = ?, ready_at = ?, updated_at = ?, epoch = ?, attempt = attempt - 1
 WHERE event_id = ? AND subscription = ? AND epoch = ? AND state = 1
RETURNING event_id, subscription, attempt;

-- name: make_due
UPDATE deliveries SET state = 0, tried = tried * 0, due_at = ?, ready_at = ?, updated_at = ?, epoch = ?
 WHERE event_id = ? AND subscription = ? AND epoch = ?;

-- name: expired_leases
SELECT event_id, subscription, route, state, due_at, attempt, retry_count, max_retries, epoch, worker_id, errors,
       created_at, ready_at, claimed_at
  FROM deliveries INDEXED BY deliveries_tried WHERE tried = 1 AND due_at <= ? LIMIT ?;

-- name: any_expired
SELECT 1 FROM deliveries INDEXED BY deliveries_tried WHERE tried = 1 AND due_at <= ? LIMIT 1;

-- name: leases_of
SELECT event_id, subscription, route, state, due_at, attempt, retry_count, max_retries, epoch, worker_id, errors,
       created_at, ready_at, claimed_at
  FROM deliveries INDEXED BY deliveries_tried WHERE tried = 1 AND owner = ? LIMIT ?;

-- name: lease_owners
SELECT DISTINCT owner FROM deliveries INDEXED BY deliveries_tried WHERE tried = 1;

-- name: named_owners
SELECT DISTINCT owner FROM deliveries INDEXED BY deliveries_tried WHERE tried = 1
 UNION SELECT owner FROM handlers
 UNION SELECT holder FROM checkpoints WHERE holder IS NOT NULL;

-- name: tried_routes
-- Routes with a delivery that is leased (1), or waiting for a retry (0).
SELECT DISTINCT tried, route FROM deliveries INDEXED BY deliveries_tried
 WHERE tried IN (0, 1) AND subscription = ?;

-- name: unfinished
SELECT 1 FROM deliveries WHERE event_id = ? AND subscription = ? AND state IN (0, 1);

-- name: deliveries_of
SELECT subscription, state, due_at, attempt, retry_count, updated_at, worker_id, errors
  FROM deliveries WHERE event_id = ? ORDER BY subscription;

-- name: log_of
SELECT id, event_id, subscription, action, created_at, status, attempt, epoch, worker_id, status_code, error_type,
       error_message, execution_time_ms
  FROM event_log WHERE event_id = ? ORDER BY id;

-- name: log_back
SELECT id, event_id, subscription, action, created_at, status, attempt, epoch, worker_id, status_code, error_type,
       error_message, execution_time_ms
  FROM event_log WHERE event_id = ? ORDER BY id DESC;

-- name: ends_of
-- How an event last stood in each subscription that has no delivery of it any more.
SELECT subscription, action, status, attempt, retry_count, created_at, worker_id, errors FROM event_log
 WHERE event_id = ? AND (status IS NOT NULL OR action = 'DISCARDED') ORDER BY id;

-- name: events_below
SELECT id FROM events WHERE id < ? ORDER BY id DESC;

-- name: pending_below
SELECT event_id FROM deliveries WHERE event_id < ? AND subscription = ? AND state IN (0, 3) ORDER BY event_id DESC;

-- name: completed_below
-- A subscription deleted and made anew has its own deliveries: what the old one completed may be pending in the new.
SELECT DISTINCT event_id FROM event_log INDEXED BY event_log_completed
 WHERE subscription = ?2 AND status = ?3 AND status IN ('COMPLETED', 'COMPLETED_WITH_ERRORS') AND event_id < ?1
   AND NOT EXISTS (SELECT 1 FROM deliveries AS d WHERE d.event_id = event_log.event_id AND d.subscription = ?2)
 ORDER BY event_id DESC;

-- name: tried
-- Leased (1) or dead (2), newest event first, straight off the index; the keyset is (created_at, event_id).
SELECT event_id, subscription, created_at, route, died_at FROM deliveries INDEXED BY deliveries_tried
 WHERE tried = ?4 AND subscription = ?1
   AND (created_at, event_id) < (?2, ?3)
 ORDER BY created_at DESC, event_id DESC;

-- name: dead_newest
-- The last error alone, and without its traceback: those of a thousand letters may be a gigabyte.
SELECT event_id, route, died_at, CASE WHEN json_array_length(errors) > 0
                                      THEN json_array(json_remove(json_extract(errors, '$[#-1]'), '$.traceback')) END
  FROM deliveries INDEXED BY deliveries_tried
 WHERE tried = 2 AND subscription = ?1 ORDER BY created_at DESC, event_id DESC LIMIT ?2;

-- name: count_dead
SELECT count(*) FROM (SELECT 1 FROM deliveries INDEXED BY deliveries_tried
 WHERE tried = 2 AND subscription = ?1 LIMIT ?2);

-- name: dead_one
SELECT event_id, subscription, route, attempt, errors, died_at, last_retry_at, created_at, epoch
  FROM deliveries WHERE event_id = ? AND subscription = ? AND state = 2;

-- name: dead_held
SELECT event_id, subscription, route, attempt, errors, died_at, last_retry_at, created_at, epoch
  FROM deliveries WHERE event_id = ? AND subscription = ? AND state = 2;

-- name: revive
UPDATE deliveries SET state = 0, tried = NULL, route = ?, due_at = ?, ready_at = ?, updated_at = ?, epoch = ?, attempt = 0,
       retry_count = 0, claimed_at = NULL, errors = NULL, died_at = NULL, last_retry_at = ?
 WHERE event_id = ? AND subscription = ? AND state = 2;

-- name: drop_delivery
DELETE FROM deliveries WHERE event_id = ? AND subscription = ?;

-- name: some_deliveries
SELECT event_id, attempt, epoch, worker_id FROM deliveries
 WHERE subscription = ? AND event_id > ? ORDER BY event_id LIMIT ?;

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

-- name: count_events
SELECT count(*) FROM events;

-- name: depth
SELECT subscription, state, coalesce(due_at <= ?, 0) AS now, count(*), min(due_at)
  FROM deliveries GROUP BY 1, 2, 3;

-- name: depth_by_route
SELECT route, count(*) FROM deliveries WHERE state = 0 GROUP BY route;

-- name: count_completed
SELECT subscription, status, count(*) FROM event_log INDEXED BY event_log_completed
 WHERE status IN ('COMPLETED', 'COMPLETED_WITH_ERRORS') GROUP BY 1, 2;

-- name: recent_actions
-- Goes back from the newest row to the first that is too old: a rate must not read the whole log.
SELECT action, count(*) FROM event_log
 WHERE id > coalesce((SELECT id FROM event_log WHERE created_at <= ? ORDER BY id DESC LIMIT 1), 0) GROUP BY 1;

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

-- name: begin_sequences
-- SQLite keeps a counter from the first row on; a log that was empty when it was backed up has none yet.
INSERT INTO sqlite_sequence (name, seq)
SELECT value, 0 FROM json_each('["events", "event_log"]') WHERE value NOT IN (SELECT name FROM sqlite_sequence);

-- name: jump_ids
-- The next multiple of a thousand million: above whatever was given between the backup and its restoring.
UPDATE sqlite_sequence SET seq = (seq / 1000000000 + 1) * 1000000000 WHERE name IN ('events', 'event_log');

-- name: leased_before
SELECT event_id, subscription FROM deliveries INDEXED BY deliveries_tried WHERE tried = 1 AND epoch < ? LIMIT ?;

-- name: meta
SELECT value FROM meta WHERE key = ?;

-- name: head_events
-- One writer at a time: ids commit in order, and nothing is held back.
SELECT coalesce((SELECT seq FROM sqlite_sequence WHERE name = 'events'), 0);

-- name: head_audit
SELECT coalesce((SELECT seq FROM sqlite_sequence WHERE name = 'event_log'), 0);

-- name: last_events
SELECT max(id) FROM events WHERE id <= ?;

-- name: last_audit
SELECT max(id) FROM event_log WHERE id <= ?;

-- name: ahead_events
SELECT max(id) FROM (SELECT id FROM events WHERE id > ? AND id <= ? ORDER BY id LIMIT ?);

-- name: ahead_audit
SELECT max(id) FROM (SELECT id FROM event_log WHERE id > ? AND id <= ? ORDER BY id LIMIT ?);

-- name: when_events
SELECT id, created_at FROM events WHERE id > ? ORDER BY id LIMIT 1;

-- name: when_audit
SELECT id, created_at FROM event_log WHERE id > ? ORDER BY id LIMIT 1;

-- name: activity_events
SELECT created_at / ?3, NULL, NULL, count(*) FROM events WHERE id > ?1 AND id <= ?2 GROUP BY 1;

-- name: activity_audit
SELECT created_at / ?3, action, status, count(*) FROM event_log WHERE id > ?1 AND id <= ?2 GROUP BY 1, 2, 3;

-- name: since_events
SELECT min(id) FROM events WHERE id > ? AND id <= ? AND created_at >= ?;

-- name: since_audit
SELECT min(id) FROM event_log WHERE id > ? AND id <= ? AND created_at >= ?;

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

-- name: divert
-- A delivery that is being worked on, for an event that has neither one nor an end in this subscription since it was made.
INSERT INTO deliveries (event_id, subscription, route, state, tried, due_at, ready_at, created_at, updated_at, epoch,
                        attempt, max_retries, claimed_at, worker_id)
SELECT ?1, ?2, ?3, 1, 1, ?4, ?4, ?5, ?4, ?6, 1, ?7, ?4, ?8
 WHERE coalesce((SELECT action FROM event_log WHERE event_id = ?1 AND subscription = ?2 AND created_at >= ?9
                  ORDER BY id DESC LIMIT 1), 'DISCARDED') = 'DISCARDED'
ON CONFLICT (event_id, subscription) DO NOTHING
RETURNING event_id, epoch;

-- name: uid_since
SELECT created_at FROM dedup WHERE uid = ?;

-- name: behind
-- Followers that have not come to a position of a stream; an ordered subscription without a checkpoint is at the beginning.
SELECT s.name, coalesce(c.position, 0) FROM subscriptions AS s LEFT JOIN checkpoints AS c ON c.subscription = s.name
 WHERE coalesce(c.stream, iif(s.mode = 'ordered', 'events', '')) = ?1 AND coalesce(c.position, 0) < ?2
 ORDER BY s.name;

-- name: chunk_events
-- Where the next rows of a range end, and how many they are: off the table's own tree.
SELECT max(id), count(*) FROM (SELECT id FROM events WHERE id > ? AND id <= ? ORDER BY id LIMIT ?);

-- name: chunk_audit
SELECT max(id), count(*) FROM (SELECT id FROM event_log WHERE id > ? AND id <= ? ORDER BY id LIMIT ?);

-- name: raise_pruned
UPDATE meta SET value = max(value, ?1) WHERE key = ?2;

-- name: prune_events
-- What is unfinished or dead anywhere keeps its event; deliveries are found by the first column of their key.
DELETE FROM events
 WHERE id > ? AND id <= ? AND NOT EXISTS (SELECT 1 FROM deliveries AS d WHERE d.event_id = events.id);

-- name: prune_audit
DELETE FROM event_log
 WHERE id > ? AND id <= ? AND NOT EXISTS (SELECT 1 FROM deliveries AS d WHERE d.event_id = event_log.event_id);

-- name: prunable_events
SELECT count(*) FROM events WHERE id <= ? AND NOT EXISTS (SELECT 1 FROM deliveries AS d WHERE d.event_id = events.id);

-- name: prunable_audit
SELECT count(*) FROM event_log
 WHERE id <= ? AND NOT EXISTS (SELECT 1 FROM deliveries AS d WHERE d.event_id = event_log.event_id);

-- name: bearing
-- No index holds uids or keys of the log: a range of it is read.
SELECT id FROM events WHERE id > ?1 AND id <= ?2 AND (uid = ?3 OR key = ?4) ORDER BY id;

-- name: deliveries_of_all
SELECT d.event_id, d.subscription, d.attempt, d.epoch
  FROM json_each(?1) AS wanted CROSS JOIN deliveries AS d ON d.event_id = wanted.value ORDER BY d.event_id, d.subscription;

-- name: identities
SELECT e.id, e.uid, e.type, e.tags FROM json_each(?1) AS wanted CROSS JOIN events AS e ON e.id = wanted.value;

-- name: erased_before
SELECT DISTINCT l.event_id
  FROM json_each(?1) AS wanted CROSS JOIN event_log AS l ON l.event_id = wanted.value WHERE l.action = 'ERASED';

-- name: blank_event
UPDATE events SET payload = 'null', title = NULL, description = NULL, metadata = '{}', checksum = ?1
 WHERE id = ?2 AND (payload <> 'null' OR title IS NOT NULL OR description IS NOT NULL OR metadata <> '{}')
RETURNING id;

-- name: blank_log
-- What failed may have quoted what it was given.
UPDATE event_log SET error_message = NULL, errors = NULL
 WHERE event_id = ? AND (error_message IS NOT NULL OR errors IS NOT NULL)
RETURNING event_id;

-- name: erasable_events
SELECT count(*) FROM json_each(?1) AS wanted CROSS JOIN events AS e ON e.id = wanted.value
 WHERE e.payload <> 'null' OR e.title IS NOT NULL OR e.description IS NOT NULL OR e.metadata <> '{}';

-- name: erasable_log
SELECT count(*) FROM json_each(?1) AS wanted CROSS JOIN event_log AS l ON l.event_id = wanted.value
 WHERE l.error_message IS NOT NULL OR l.errors IS NOT NULL;

-- name: ways_of
-- What decides an event's way, and nothing that may be large.
SELECT id, type, tags, priority, max_retries, created_at FROM events WHERE id = ?;

-- name: redeliver
-- As if it were new; not for one that is on its way there, or dead.
INSERT INTO deliveries (event_id, subscription, route, due_at, ready_at, created_at, updated_at, max_retries)
VALUES (?1, ?2, ?3, ?4, ?4, ?5, ?4, ?6) ON CONFLICT DO NOTHING RETURNING event_id;

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

-- name: bury_followed
INSERT INTO deliveries (event_id, subscription, route, state, tried, due_at, ready_at, created_at, updated_at, epoch,
                        attempt, retry_count, max_retries, claimed_at, worker_id, errors, died_at)
VALUES (?1, ?2, ?3, 2, 2, NULL, ?4, ?4, ?5, ?6, ?7, ?7 - 1, ?8, ?5, ?9, ?10, ?5)
ON CONFLICT (event_id, subscription) DO NOTHING;

-- name: park
INSERT INTO deliveries (event_id, subscription, route, state, tried, due_at, ready_at, created_at, updated_at,
                        max_retries)
VALUES (?1, ?2, ?3, 3, 3, NULL, ?4, ?4, ?5, ?6)
ON CONFLICT (event_id, subscription) DO NOTHING;

-- name: unpark
UPDATE deliveries SET state = 0, tried = 0, due_at = ?1, ready_at = ?1, updated_at = ?1, epoch = ?2
 WHERE event_id = ?3 AND subscription = ?4 AND state = 3
RETURNING event_id;

-- name: standing
-- What of an ordered subscription is not done: dead and parked by their state, the rest by the routes they are filed under.
SELECT d.event_id, e.key, d.state
  FROM (SELECT event_id, state FROM deliveries WHERE tried IN (2, 3) AND subscription = ?1
        UNION ALL
        SELECT v.event_id, v.state FROM deliveries AS v
         WHERE v.due_at IS NOT NULL AND v.route IN (SELECT id FROM routes WHERE subscription = ?1)) AS d
  JOIN events AS e ON e.id = d.event_id
 ORDER BY d.event_id;

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
