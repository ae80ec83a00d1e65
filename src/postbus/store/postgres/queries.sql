-- Every statement of the PostgreSQL store, under the names the shared verbs use. Moments go in and out as microseconds.
-- Arrays of ids come as JSON text ("[1,2]"), which becomes an array by its brackets. What is written for many rows takes
-- them as one JSON array of arrays. Verbs lock blocks in ascending order, then rows, each read after what guards it.

-- ── catalog ──────────────────────────────────────────────────────────────────────────────────────────────────────────

-- name: catalog
-- Whether subscriptions have changed, no mark and no kinds (they are looked up one by one), the log's head, the time.
SELECT (SELECT value::bigint FROM postbus.meta WHERE key = 'catalog'), $1::bigint,
       coalesce(pg_sequence_last_value('postbus.events_id_seq'), 0), postbus.micros(postbus.now()), '[]';

-- name: subscriptions
SELECT number, name, mode, patterns::text, tags::text, paused, (extract(epoch FROM lease) * 1000000)::bigint, retry::text,
       postbus.micros(created_at) FROM postbus.subscriptions ORDER BY name COLLATE "C";

-- name: former_subscriptions
SELECT number, name FROM postbus.former_subscriptions;

-- name: add_subscription
-- Waits for whoever is making one of this name; yields nothing if there is one then.
INSERT INTO postbus.subscriptions (name, mode, patterns, tags, lease, retry, created_at)
VALUES ($1, $2, $3, $4, $5::bigint * interval '1 microsecond', $6, postbus.at($7))
    ON CONFLICT (name) DO NOTHING RETURNING number;

-- name: add_cursor
SELECT postbus.begin_cursor($1::integer, $2);

-- name: former
INSERT INTO postbus.former_subscriptions (number, name) SELECT number, name FROM postbus.subscriptions WHERE number = $1;

-- name: drop_subscription
DELETE FROM postbus.subscriptions WHERE number = $1;

-- name: drop_cursor
WITH scattered AS (DELETE FROM postbus.gaps WHERE subscription = $1)
DELETE FROM postbus.cursors WHERE subscription = $1;

-- name: kind
SELECT id, type, tags FROM postbus.kinds WHERE id = $1;

-- name: kinds_covered
SELECT id FROM postbus.kinds WHERE postbus.covers($1::jsonb, type, tags) AND NOT postbus.covers($2::jsonb, type, tags);

-- name: add_kind
SELECT postbus.add_kinds(array_agg((r ->> 0)::bigint), array_agg(r ->> 1), array_agg(r ->> 2))
  FROM jsonb_array_elements($1::jsonb) AS r;

-- name: count_kinds
SELECT count(*) FROM postbus.kinds;

-- name: lock_kinds
-- Nobody is just making rows, of kinds that are there already perhaps.
SELECT 1 WHERE pg_try_advisory_xact_lock(postbus.namespace('kinds') << 48);

-- name: drop_unused_kinds
DELETE FROM postbus.kinds WHERE id = ANY (ARRAY(SELECT id FROM postbus.kinds EXCEPT SELECT kind FROM postbus.deliveries));

-- name: bump_catalog
SELECT postbus.bump();

-- name: set_interests
UPDATE postbus.subscriptions SET patterns = $1, tags = $2 WHERE name = $3;

-- name: set_paused
UPDATE postbus.subscriptions SET paused = $1 WHERE name = $2;

-- ── append ───────────────────────────────────────────────────────────────────────────────────────────────────────────

-- name: append
SELECT event_id, fresh, stored_at FROM postbus.append($1, $2);

-- name: latest
SELECT coalesce(max(id), 0) FROM postbus.events;

-- name: end_session
-- Whether the session of a connection that was lost is gone, if it was still there; $2: how long ago it was opened. One
-- that has been given the same number since began later.
SELECT pg_terminate_backend($1::integer, 5000) FROM pg_stat_activity
 WHERE pid = $1::integer AND backend_start < clock_timestamp() - $2::bigint * interval '1 microsecond';

-- name: stored_uids
-- Which of some events are there: those above an id that was given before, and those whose uid was chosen.
SELECT uid, id, postbus.micros(created_at) FROM postbus.events WHERE id > $2 AND uid = ANY ($1::text[])
UNION ALL
SELECT uid, event_id, NULL FROM postbus.dedup WHERE uid = ANY ($3::text[]);

-- name: await_durable
-- A session that is ended waits no longer for the standby; this commit does, and what was committed before comes first.
SELECT pg_logical_emit_message(true, 'postbus', '');

-- name: drop_old_uids
DELETE FROM postbus.dedup WHERE uid = ANY (ARRAY(
    SELECT uid FROM postbus.dedup WHERE created_at < postbus.at($1) ORDER BY created_at LIMIT $2));

-- name: known_uids
SELECT uid FROM postbus.dedup WHERE uid = ANY (ARRAY(SELECT json_array_elements_text($1::json)));

-- name: uid_since
SELECT postbus.micros(created_at) FROM postbus.dedup WHERE uid = $1;

-- name: notify
SELECT pg_notify('postbus', '');

-- ── claim and finish: one call each ──────────────────────────────────────────────────────────────────────────────────

-- name: claim
-- Several claims, one after the other: in one round trip, so that no client holds a cursor while it is stopped or thinks.
SELECT c.state, c.claimed, c.policy, c.until, c.next_due, c.suspects, c.suspect, c.more, c.number, c.first_id, c.size, c.ids,
       c.tries, c.again, c.numbers, c.lone_ids, c.lone_tries, c.lone_again, c.ranks, c.reached, c.reached_id, c.events
  FROM jsonb_array_elements($1::jsonb) AS r (a)
 CROSS JOIN LATERAL postbus.claim(
    (a ->> 0)::integer, a -> 1, a -> 2, (a ->> 3)::integer, (a ->> 4)::integer, (a ->> 5)::boolean, (a ->> 6)::bigint,
    (a ->> 7)::integer, a ->> 8, a ->> 9, $2, (a ->> 10)::boolean, $3::boolean, (a ->> 11)::integer, (a ->> 12)::bigint,
    (a ->> 13)::bigint) AS c;

-- name: blocks_of_token
-- What the claim of this id was given.
SELECT number, subscription, first_id, ids, done, worker_id, until, claimed_at
  FROM postbus.leases WHERE token = $1;

-- name: finish
SELECT postbus.finish($1::bigint[], $2::bigint[], $3::integer[], $4::real[], $5);

-- name: lock_leases
-- All blocks ascending, then all rows ascending, of leases (subscription, event, epoch): of rows that are not in a block,
-- only those on which expiry has left this very epoch.
SELECT postbus.lock_leases(array_agg((r ->> 0)::integer), array_agg((r ->> 1)::bigint), array_agg((r ->> 2)::bigint))
  FROM jsonb_array_elements($1::jsonb) AS r;

-- name: some_gaps
SELECT number FROM postbus.gaps ORDER BY number LIMIT 100;

-- name: close_gap
SELECT made FROM postbus.close_gap($1);

-- ── locks of the verbs that decide what becomes of a delivery ────────────────────────────────────────────────────────

-- name: hold_deliveries
SELECT postbus.hold_deliveries($1::integer, translate($2, '[]', '{}')::bigint[]);

-- name: hold_pruned
-- How far the log was pruned stays as it is: whoever prunes waits for this transaction, and this one for who prunes.
SELECT postbus.hold_pruned();

-- name: hold_alone
SELECT postbus.hold_alone($1::integer, $2);

-- ── cursors ──────────────────────────────────────────────────────────────────────────────────────────────────────────

-- name: cursor
SELECT position, looked FROM postbus.cursors WHERE subscription = $1;

-- name: move_cursor
-- Back: what was missing behind the position comes again with the rest.
WITH cut AS (UPDATE postbus.gaps SET ids = ids * int8multirange(int8range(NULL, $1, '(]')) WHERE subscription = $3::integer)
UPDATE postbus.cursors
   SET position = $1, looked = $2, missing = missing * int8multirange(int8range(NULL, $1, '(]')) WHERE subscription = $3::integer;

-- name: add_skips
SELECT postbus.take_out($1::integer, translate($2, '[]', '{}')::bigint[]);

-- name: is_above
-- Whether a cursor has still to come to an event, or has passed it before it was there.
SELECT 1 FROM postbus.cursors AS c JOIN postbus.events AS e ON e.id = $2 AND e.erased_at IS NULL
 WHERE c.subscription = $1
   AND (c.missing @> $2::bigint
        OR EXISTS (SELECT 1 FROM postbus.gaps AS g WHERE g.subscription = $1 AND g.ids @> $2::bigint)
        OR (c.position < $2
            AND NOT EXISTS (SELECT 1 FROM postbus.skips AS k WHERE k.subscription = $1 AND k.event_id = $2)));

-- ── due rows: what is left to do ─────────────────────────────────────────────────────────────────────────────────────

-- name: priorities
-- Hops from one priority that pending rows have to the next lower one.
WITH RECURSIVE present (priority) AS (
    (SELECT d.priority::integer FROM postbus.deliveries AS d
      WHERE d.state = 0 AND d.subscription = $1 AND d.alone = ($2 = 1) ORDER BY d.priority DESC LIMIT 1)
    UNION ALL
    SELECT (SELECT d.priority::integer FROM postbus.deliveries AS d
             WHERE d.state = 0 AND d.subscription = $1 AND d.alone = ($2 = 1) AND d.priority < present.priority
             ORDER BY d.priority DESC LIMIT 1)
      FROM present WHERE present.priority IS NOT NULL)
SELECT priority FROM present WHERE priority IS NOT NULL;

-- name: due_any
SELECT postbus.micros(due_at) FROM postbus.deliveries
 WHERE state = 0 AND subscription = $1 AND alone = ($2 = 1) AND priority = $3 AND due_at <= postbus.at($4)
   AND (due_at, event_id) > (postbus.at(greatest($5, 0)), $6)
 ORDER BY due_at, event_id LIMIT $7;

-- name: due_kind
SELECT postbus.micros(due_at) FROM postbus.deliveries
 WHERE state = 0 AND subscription = $1 AND alone = ($2 = 1) AND priority = $3 AND due_at <= postbus.at($4)
   AND (due_at, event_id) > (postbus.at(greatest($5, 0)), $6) AND kind = $8
 ORDER BY due_at, event_id LIMIT $7;

-- name: kinds_with_due
-- Hops from one kind to the next one present in the index.
WITH RECURSIVE present (kind) AS (
    (SELECT d.kind FROM postbus.deliveries AS d
      WHERE d.state = 0 AND d.subscription = $1 AND d.alone = ($2 = 1) AND d.kind > $5 ORDER BY d.kind LIMIT 1)
    UNION ALL
    SELECT (SELECT d.kind FROM postbus.deliveries AS d
             WHERE d.state = 0 AND d.subscription = $1 AND d.alone = ($2 = 1) AND d.kind > present.kind
             ORDER BY d.kind LIMIT 1)
      FROM present WHERE present.kind IS NOT NULL)
SELECT kind FROM present
 WHERE kind IS NOT NULL
   AND EXISTS (SELECT 1 FROM postbus.deliveries AS d
                WHERE d.state = 0 AND d.subscription = $1 AND d.alone = ($2 = 1) AND d.kind = present.kind
                  AND d.priority = $3 AND d.due_at <= postbus.at($4));

-- name: retried_kinds
WITH RECURSIVE present (kind) AS (
    (SELECT d.kind FROM postbus.deliveries AS d
      WHERE d.state = 0 AND NOT d.fresh AND d.subscription = $1 ORDER BY d.kind LIMIT 1)
    UNION ALL
    SELECT (SELECT d.kind FROM postbus.deliveries AS d
             WHERE d.state = 0 AND NOT d.fresh AND d.subscription = $1 AND d.kind > present.kind ORDER BY d.kind LIMIT 1)
      FROM present WHERE present.kind IS NOT NULL)
SELECT kind FROM present WHERE kind IS NOT NULL;

-- name: draw_numbers
SELECT max(nextval('postbus.numbers')) FROM generate_series(1, $1);

-- ── leases ───────────────────────────────────────────────────────────────────────────────────────────────────────────

-- name: blocks_by_number
SELECT number, subscription, first_id, ids, done, worker_id, until, claimed_at
  FROM postbus.leases WHERE number = ANY (translate($1, '[]', '{}')::bigint[]) ORDER BY number;

-- name: blocks_around
SELECT number, subscription, first_id, ids, done, worker_id, until, claimed_at
  FROM postbus.leases WHERE subscription = $1 AND first_id <= $3 AND first_id >= $2 - 16384 AND last_id >= $2;

-- name: overdue_blocks
SELECT number, subscription, first_id, ids, done, worker_id, until, claimed_at
  FROM postbus.leases WHERE due_at <= postbus.at($1) ORDER BY due_at LIMIT $2 FOR UPDATE SKIP LOCKED;

-- name: blocks_of
SELECT number, subscription, first_id, ids, done, worker_id, until, claimed_at
  FROM postbus.leases WHERE owner = ANY (ARRAY(SELECT json_array_elements_text($1::json))) ORDER BY number LIMIT $2
   FOR UPDATE SKIP LOCKED;

-- name: blocks_before
SELECT number, subscription, first_id, ids, done, worker_id, until, claimed_at
  FROM postbus.leases WHERE number < $1 ORDER BY number LIMIT $2 FOR UPDATE;

-- name: blocks_below
SELECT number, subscription, first_id, ids, done, worker_id, until, claimed_at
  FROM postbus.leases WHERE subscription = $1 AND first_id < $2 ORDER BY first_id DESC;

-- name: any_overdue
-- Or whether ids are kept apart, to be looked for again.
SELECT 1 WHERE EXISTS (SELECT 1 FROM postbus.blocks WHERE due_at <= postbus.at($1)) OR EXISTS (SELECT 1 FROM postbus.gaps);

-- name: lease_owners
SELECT DISTINCT owner FROM postbus.blocks;

-- name: named_owners
SELECT DISTINCT owner FROM postbus.blocks
 UNION SELECT owner FROM postbus.handlers
 UNION SELECT holder FROM postbus.checkpoints WHERE holder IS NOT NULL;

-- name: extend
-- A block that is just being settled is left for the next time: nobody waits for a heartbeat, nor it for anybody.
UPDATE postbus.blocks AS b SET due_at = postbus.at(l.due)
  FROM (SELECT v.number, (r ->> 0)::bigint AS due
          FROM jsonb_array_elements($1::jsonb) AS r JOIN postbus.blocks AS v ON v.number = (r ->> 1)::bigint
           FOR UPDATE OF v SKIP LOCKED) AS l
 WHERE b.number = l.number;

-- name: set_done
UPDATE postbus.blocks SET done = $1 WHERE number = $2;

-- name: drop_blocks
DELETE FROM postbus.blocks WHERE number = ANY (translate($1, '[]', '{}')::bigint[]);

-- name: stories
-- What a delivery without a row is about, and nothing that may be large.
SELECT e.id, e.type, e.tags, e.priority, postbus.micros(coalesce(e.due_at, e.created_at)), e.max_retries,
       postbus.micros(e.created_at)
  FROM unnest(translate($1, '[]', '{}')::bigint[]) AS wanted (id)
 CROSS JOIN LATERAL (SELECT v.id, v.type, v.tags, v.priority, v.due_at, v.max_retries, v.created_at
                       FROM postbus.events AS v WHERE v.id = wanted.id OFFSET 0) AS e;

-- name: delivery_rows
SELECT subscription, event_id, state, kind, priority, postbus.micros(ready_at), postbus.micros(created_at),
       postbus.micros(updated_at), postbus.micros(due_at), max_retries, attempt, worker_id, postbus.micros(claimed_at),
       retry_count, alone::integer, fresh::integer, epoch, postbus.micros(died_at), postbus.micros(last_retry_at), errors
  FROM postbus.deliveries
 WHERE subscription = $1 AND event_id = ANY (translate($2, '[]', '{}')::bigint[]) ORDER BY event_id;

-- name: put_delivery
INSERT INTO postbus.deliveries (subscription, event_id, state, kind, priority, ready_at, created_at, updated_at, due_at,
                                max_retries, attempt, worker_id, claimed_at, retry_count, alone, fresh, epoch, died_at,
                                last_retry_at, errors)
SELECT (r ->> 0)::integer, (r ->> 1)::bigint, (r ->> 2)::smallint, (r ->> 3)::bigint, (r ->> 4)::smallint,
       postbus.at((r ->> 5)::bigint), postbus.at((r ->> 6)::bigint), postbus.at((r ->> 7)::bigint),
       postbus.at((r ->> 8)::bigint), (r ->> 9)::integer, (r ->> 10)::integer, r ->> 11, postbus.at((r ->> 12)::bigint),
       (r ->> 13)::integer, r ->> 14 = '1', r ->> 15 = '1', (r ->> 16)::bigint, postbus.at((r ->> 17)::bigint),
       postbus.at((r ->> 18)::bigint), r ->> 19
  FROM jsonb_array_elements($1::jsonb) AS r ORDER BY 1, 2
    ON CONFLICT (subscription, event_id) DO UPDATE
   SET state = excluded.state, due_at = excluded.due_at, ready_at = excluded.ready_at, alone = excluded.alone,
       attempt = excluded.attempt, retry_count = excluded.retry_count, epoch = excluded.epoch,
       worker_id = excluded.worker_id, claimed_at = excluded.claimed_at, updated_at = excluded.updated_at,
       died_at = excluded.died_at, last_retry_at = excluded.last_retry_at, errors = excluded.errors, fresh = excluded.fresh;

-- name: drop_delivery
DELETE FROM postbus.deliveries AS d USING (
    SELECT (r ->> 0)::integer AS subscription, (r ->> 1)::bigint AS id FROM jsonb_array_elements($1::jsonb) AS r OFFSET 0) AS g
 WHERE d.subscription = g.subscription AND d.event_id = g.id;

-- ── audit ────────────────────────────────────────────────────────────────────────────────────────────────────────────

-- name: log
INSERT INTO postbus.event_log (first_id, subscription, action, created_at, status, attempt, epoch, worker_id, status_code,
                               error_type, error_message, execution_time_ms, type, tags, priority, event_created_at,
                               ready_at, claimed_at, retry_count, errors)
SELECT (r ->> 0)::bigint, (r ->> 1)::integer, r ->> 2, postbus.at((r ->> 3)::bigint), r ->> 4, (r ->> 5)::integer,
       (r ->> 6)::bigint, r ->> 7, (r ->> 8)::integer, r ->> 9, r ->> 10, (r ->> 11)::float8, r ->> 12, r ->> 13,
       (r ->> 14)::smallint, postbus.at((r ->> 15)::bigint), postbus.at((r ->> 16)::bigint),
       postbus.at((r ->> 17)::bigint), (r ->> 18)::integer, r ->> 19
  FROM jsonb_array_elements($1::jsonb) AS r;

-- name: arrays_of
SELECT id, subscription, action, postbus.micros(created_at), status, epoch >> 10 << 10, worker_id,
       postbus.ids_of(first_id, last_id, ids),
       coalesce(places::integer[], ARRAY(SELECT generate_series((epoch & 1023)::integer, (epoch & 1023)::integer + entries - 1))),
       times
  FROM postbus.event_log WHERE last_id IS NOT NULL AND first_id <= $1 AND first_id >= $2 AND last_id >= $1 ORDER BY id;

-- name: log_back
SELECT id, first_id, subscription, action, postbus.micros(created_at), status, attempt, epoch, worker_id, status_code,
       error_type, error_message, execution_time_ms
  FROM postbus.event_log WHERE last_id IS NULL AND first_id = $1 ORDER BY id DESC;

-- name: arrays_between
-- What may tell of events of a range: of a subscription, and with a status, if these are given.
SELECT id, subscription, action, postbus.micros(created_at), status, worker_id, postbus.ids_of(first_id, last_id, ids)
  FROM postbus.event_log
 WHERE last_id IS NOT NULL AND first_id <= $2 AND first_id > $1 - 16384 AND last_id >= $1
   AND ($3::integer IS NULL OR subscription = $3) AND ($4::text IS NULL OR status = $4);

-- name: ends_of
-- What tells how an event last stood in each subscription that has no delivery of it any more.
SELECT l.id, l.first_id, l.subscription, l.action, l.status, l.attempt, l.retry_count, postbus.micros(l.created_at),
       l.worker_id, l.errors
  FROM unnest(translate($1, '[]', '{}')::bigint[]) AS wanted (id)
 CROSS JOIN LATERAL (SELECT v.id, v.first_id, v.subscription, v.action, v.status, v.attempt, v.retry_count, v.created_at,
                            v.worker_id, v.errors FROM postbus.event_log AS v
                      WHERE v.last_id IS NULL AND v.first_id = wanted.id
                        AND (v.status IS NOT NULL OR v.action IN ('DISCARDED', 'ERASED')) OFFSET 0) AS l;

-- name: head_audit
SELECT postbus.head('event_log');

-- name: last_audit
SELECT id + coalesce(entries, 1) - 1 FROM postbus.event_log WHERE id <= $1 ORDER BY id DESC LIMIT 1;

-- name: ahead_audit
-- The position may lie within a row: what of that row comes before it does not count.
SELECT coalesce(
    (SELECT s.last - (s.upto - $3)
       FROM (SELECT r.last, sum(r.own) OVER (ORDER BY r.id ROWS UNBOUNDED PRECEDING)::bigint AS upto
               FROM (SELECT id, id + coalesce(entries, 1) - 1 AS last,
                            greatest(0, least(coalesce(entries, 1), id + coalesce(entries, 1) - 1 - $1)) AS own
                       FROM postbus.event_log WHERE id >= $1 >> 10 << 10 AND id <= $2 ORDER BY id LIMIT $3 + 1) AS r) AS s
      WHERE s.upto >= $3 ORDER BY s.last LIMIT 1),
    (SELECT greatest($1, id + coalesce(entries, 1) - 1) FROM postbus.event_log
      WHERE id >= $1 >> 10 << 10 AND id <= $2 ORDER BY id DESC LIMIT 1));

-- name: when_audit
SELECT greatest(id, $1 + 1), postbus.micros(created_at) FROM postbus.event_log
 WHERE id >= $1 >> 10 << 10 AND id + coalesce(entries, 1) - 1 > $1 ORDER BY id LIMIT 1;

-- name: activity_audit
SELECT postbus.micros(created_at) / $3::bigint, action, status,
       sum(least(id + coalesce(entries, 1) - 1, $2) - greatest(id - 1, $1))::bigint
  FROM postbus.event_log
 WHERE id >= $1 >> 10 << 10 AND id + coalesce(entries, 1) - 1 > $1 AND id <= $2 AND $1 < $2 GROUP BY 1, 2, 3;

-- name: since_audit
SELECT greatest(min(id), $1 + 1) FROM postbus.event_log
 WHERE id >= $1 >> 10 << 10 AND id + coalesce(entries, 1) - 1 > $1 AND id <= $2 AND created_at >= postbus.at($3)
HAVING count(*) > 0;

-- name: lag_audit
-- How many rows and entries lie behind a position, in the first so many rows, and which is the last of these.
SELECT count(*), sum(id + coalesce(entries, 1) - 1 - greatest(id - 1, $1))::bigint, max(id)
  FROM (SELECT id, entries FROM postbus.event_log
         WHERE id >= $1 >> 10 << 10 AND id + coalesce(entries, 1) - 1 > $1 AND id <= $2 ORDER BY id LIMIT $3) AS r;

-- ── followers: what is left behind ───────────────────────────────────────────────────────────────────────────────────

-- name: standing
SELECT d.event_id, e.key, d.state FROM postbus.deliveries AS d
 CROSS JOIN LATERAL (SELECT v.key FROM postbus.events AS v WHERE v.id = d.event_id OFFSET 0) AS e
 WHERE d.subscription = $1 ORDER BY d.event_id;

-- name: unpark
UPDATE postbus.deliveries SET state = 0, due_at = postbus.at($1), ready_at = postbus.at($1), updated_at = postbus.at($1), fresh = false
 WHERE subscription = $2::integer AND event_id = ANY (translate($3, '[]', '{}')::bigint[]) AND state = 3
RETURNING event_id;

-- name: erased_among
-- The log may have been pruned since, and so may the audit log.
SELECT asked.id FROM unnest(translate($1, '[]', '{}')::bigint[]) AS asked (id)
 WHERE EXISTS (SELECT 1 FROM postbus.events AS e WHERE e.id = asked.id AND e.erased_at IS NOT NULL)
    OR EXISTS (SELECT 1 FROM postbus.event_log AS l
                WHERE l.last_id IS NULL AND l.first_id = asked.id AND l.action = 'ERASED');

-- ── unfinished ───────────────────────────────────────────────────────────────────────────────────────────────────────

-- name: some_deliveries
-- Without those that are leased: their row goes with their place in a block.
SELECT event_id, attempt FROM postbus.deliveries
 WHERE subscription = $1 AND event_id > $2 AND state <> 1 ORDER BY event_id LIMIT $3 FOR UPDATE;

-- name: many_unleased
-- Whether there are a thousand, read off the key.
SELECT 1 FROM postbus.deliveries WHERE subscription = $1 AND state <> 1 OFFSET 999 LIMIT 1;

-- name: count_unleased
SELECT count(*) FROM postbus.deliveries WHERE subscription = $1 AND event_id > $2 AND state <> 1;

-- name: drop_deliveries_after
DELETE FROM postbus.deliveries WHERE subscription = $1 AND event_id > $2;

-- name: drop_skips_after
DELETE FROM postbus.skips WHERE subscription = $1 AND event_id > $2;

-- name: kinds_waiting
-- Of the events that a queue's cursor would hand out in a range, how many are of which type and tags.
SELECT type, tags, count(*) FROM postbus.events AS e
 WHERE e.id > $2 AND e.id <= $3 AND e.erased_at IS NULL
   AND (SELECT 1 FROM postbus.skips AS k WHERE k.subscription = $1 AND k.event_id = e.id) IS NULL
 GROUP BY type, tags;

-- name: kinds_between
SELECT type, tags, count(*) FROM postbus.events WHERE id > $1 AND id <= $2 GROUP BY type, tags;

-- ── retention ────────────────────────────────────────────────────────────────────────────────────────────────────────

-- name: dead_among
SELECT event_id, attempt FROM postbus.deliveries
 WHERE subscription = $1 AND event_id = ANY (translate($2, '[]', '{}')::bigint[]) AND state = 2 ORDER BY event_id FOR UPDATE;

-- name: revive
UPDATE postbus.deliveries AS d
   SET state = 0, due_at = g.now, ready_at = g.now, updated_at = g.now, last_retry_at = g.now, attempt = 0,
       retry_count = 0, claimed_at = NULL, errors = NULL, died_at = NULL, epoch = NULL, alone = false, fresh = false
  FROM (SELECT postbus.at((r ->> 0)::bigint) AS now, (r ->> 1)::integer AS subscription, (r ->> 2)::bigint AS id
          FROM jsonb_array_elements($1::jsonb) AS r OFFSET 0) AS g
 WHERE d.subscription = g.subscription AND d.event_id = g.id AND d.state = 2;

-- name: behind
-- Followers that have not come to a position of a stream; an ordered subscription without a checkpoint is at the beginning.
SELECT s.name, coalesce(c.position, 0)
  FROM postbus.subscriptions AS s LEFT JOIN postbus.checkpoints AS c ON c.subscription = s.name
 WHERE coalesce(c.stream, CASE s.mode WHEN 'ordered' THEN 'events' END) = $1 AND coalesce(c.position, 0) < $2
 ORDER BY s.name COLLATE "C";

-- name: hold_beside
-- One who prunes or erases at a time; and whoever begins to read from a position has committed it, or waits.
WITH alone AS MATERIALIZED (SELECT pg_advisory_xact_lock(postbus.namespace('subscriptions') << 48 | 1))
SELECT 1 FROM alone CROSS JOIN postbus.meta AS m WHERE m.key IN ('pruned_through', 'audit_pruned_through') FOR UPDATE OF m;

-- name: next_ids
SELECT id FROM postbus.events WHERE id > $1 AND id <= $2 ORDER BY id LIMIT $3;

-- name: next_rows
-- Rows of the audit log up to so many entries, the first whatever it holds, and one more.
SELECT r.id, r.first_id, r.entries, CASE WHEN r.last_id IS NOT NULL THEN postbus.ids_of(r.first_id, r.last_id, r.ids) END
  FROM (SELECT id, first_id, last_id, entries, ids, row_number() OVER so_far AS place, sum(entries) OVER so_far AS upto
          FROM (SELECT id, first_id, last_id, coalesce(entries, 1) AS entries, ids FROM postbus.event_log
                 WHERE id > $1 AND id <= $2 ORDER BY id LIMIT $3 + 1) AS l
        WINDOW so_far AS (ORDER BY id ROWS UNBOUNDED PRECEDING)) AS r
 WHERE r.upto - r.entries <= $3 OR r.place = 2 ORDER BY r.id;

-- name: prune_events
-- One statement looks at all places, whatever was found before ($3): its snapshot sees each event in exactly one, where two
-- would lose it while its block explodes, or a late one is passed. `pruned_through` was raised before.
WITH kept AS MATERIALIZED (
    SELECT d.event_id AS id FROM postbus.subscriptions AS s
     CROSS JOIN LATERAL (SELECT v.event_id FROM postbus.deliveries AS v
                          WHERE v.subscription = s.number AND v.event_id > $1::bigint AND v.event_id <= $2::bigint OFFSET 0) AS d
     UNION ALL
    SELECT postbus.event_at(b.first_id, b.last_id, b.ids, p.place) FROM postbus.subscriptions AS s
     CROSS JOIN LATERAL (SELECT v.* FROM postbus.blocks AS v
                          WHERE v.subscription = s.number AND v.first_id > $1::bigint - 16384 AND v.first_id <= $2::bigint OFFSET 0) AS b
     CROSS JOIN LATERAL generate_series(0, postbus.size_of(b.first_id, b.last_id, b.ids) - 1) AS p (place)
     WHERE NOT postbus.is_done(b.done, p.place)
     UNION ALL
    SELECT e.id
      FROM (SELECT unnest(c.missing) FROM postbus.cursors AS c UNION ALL SELECT unnest(g.ids) FROM postbus.gaps AS g) AS r (ids)
     CROSS JOIN LATERAL (SELECT v.id FROM postbus.events AS v
                          WHERE v.id >= greatest(lower(r.ids), $1::bigint + 1) AND v.id < least(upper(r.ids), $2::bigint + 1)
                         OFFSET 0) AS e
     UNION ALL
    SELECT e.id FROM postbus.subscriptions AS s
     CROSS JOIN LATERAL (SELECT v.position FROM postbus.cursors AS v WHERE v.subscription = s.number OFFSET 0) AS c
     CROSS JOIN LATERAL (SELECT v.id FROM postbus.events AS v
                          WHERE v.id > greatest(c.position, $1::bigint) AND v.id <= $2::bigint AND v.erased_at IS NULL
                            AND postbus.wants(s.patterns, s.tags, v.type, v.tags)
                            AND NOT EXISTS (SELECT 1 FROM postbus.skips AS k
                                             WHERE k.subscription = s.number AND k.event_id = v.id)
                         OFFSET 0) AS e)
DELETE FROM postbus.events AS e
 WHERE e.id = ANY (ARRAY(SELECT v.id FROM postbus.events AS v WHERE v.id > $1::bigint AND v.id <= $2::bigint
                         EXCEPT SELECT k.id FROM kept AS k))
   AND $3::text IS NOT NULL;

-- name: prune_audit
DELETE FROM postbus.event_log WHERE id > $1 AND id <= $2 AND id <> ALL (translate($3, '[]', '{}')::bigint[]);

-- name: raise_pruned
UPDATE postbus.meta SET value = greatest(value::bigint, $1::bigint)::text WHERE key = $2;

-- name: blank_event
-- The checksum is for SQLite, which keeps none of its own.
UPDATE postbus.events AS e
   SET payload = 'null', title = NULL, description = NULL, metadata = '{}', erased_at = coalesce(e.erased_at, g.now)
  FROM (SELECT postbus.at((r ->> 1)::bigint) AS now, (r ->> 2)::bigint AS id FROM jsonb_array_elements($1::jsonb) AS r
        OFFSET 0) AS g
 WHERE e.id = g.id AND (e.erased_at IS NULL OR e.payload::text <> 'null' OR e.title IS NOT NULL
                        OR e.description IS NOT NULL OR e.metadata::text <> '{}')
RETURNING e.id;

-- name: blank_log
-- What failed may have quoted what it was given; what tells of a rewind, or of the end of a subscription, does not.
UPDATE postbus.event_log AS l SET error_message = NULL, errors = NULL
  FROM (SELECT (r ->> 0)::bigint AS id FROM jsonb_array_elements($1::jsonb) AS r OFFSET 0) AS g
 WHERE l.last_id IS NULL AND l.first_id = g.id AND (l.error_message IS NOT NULL OR l.errors IS NOT NULL)
   AND l.action NOT IN ('REPLAYED', 'DISCARDED')
RETURNING l.first_id;

-- name: blank_stopped
-- What a follower said when it stopped may quote the event before which it did.
UPDATE postbus.checkpoints SET stopped = 'erased'
 WHERE stopped_before = ANY (ARRAY(SELECT (r ->> 0)::bigint FROM jsonb_array_elements($1::jsonb) AS r));

-- name: erasable_events
SELECT count(*) FROM unnest(translate($1, '[]', '{}')::bigint[]) AS wanted (id)
 CROSS JOIN LATERAL (SELECT 1 FROM postbus.events AS v
                      WHERE v.id = wanted.id AND (v.payload::text <> 'null' OR v.title IS NOT NULL
                            OR v.description IS NOT NULL OR v.metadata::text <> '{}') OFFSET 0) AS e;

-- name: erasable_log
SELECT count(*) FROM unnest(translate($1, '[]', '{}')::bigint[]) AS wanted (id)
 CROSS JOIN LATERAL (SELECT 1 FROM postbus.event_log AS v
                      WHERE v.last_id IS NULL AND v.first_id = wanted.id AND (v.error_message IS NOT NULL OR v.errors IS NOT NULL)
                        AND v.action NOT IN ('REPLAYED', 'DISCARDED') OFFSET 0) AS l;

-- name: bearing
-- No index holds uids or keys of the log: a range of it is read.
SELECT id FROM postbus.events WHERE id > $1 AND id <= $2 AND (uid = $3::text OR key = $4::text) ORDER BY id;

-- name: identities
SELECT e.id, e.uid, e.type, e.tags
  FROM unnest(translate($1, '[]', '{}')::bigint[]) AS wanted (id)
 CROSS JOIN LATERAL (SELECT v.id, v.uid, v.type, v.tags FROM postbus.events AS v WHERE v.id = wanted.id OFFSET 0) AS e;

-- ── Spark ────────────────────────────────────────────────────────────────────────────────────────────────────────────

-- name: diverted_before
-- What has a delivery, or had one that was not discarded. Diverted deliveries have a history from the first, so that none
-- of their ends is in an array.
SELECT asked.id FROM unnest(translate($2, '[]', '{}')::bigint[]) AS asked (id)
 WHERE EXISTS (SELECT 1 FROM postbus.deliveries AS d WHERE d.subscription = $1::integer AND d.event_id = asked.id)
    OR coalesce((SELECT l.action FROM postbus.event_log AS l
                  WHERE l.last_id IS NULL AND l.first_id = asked.id AND l.subscription = $1::integer ORDER BY l.id DESC LIMIT 1),
                'DISCARDED') <> 'DISCARDED';

-- name: add_part
INSERT INTO postbus.parts (query, batch, created_at) VALUES ($1, $2, postbus.at($3)) RETURNING part;

-- name: part
SELECT part FROM postbus.parts WHERE part = $1;

-- name: parts_of
SELECT part FROM postbus.parts WHERE query = $1 AND batch = $2;

-- name: stage
INSERT INTO postbus.staged (part, position, uid, chosen, type, tags, key, title, description, payload, metadata, priority,
                            max_retries, delay, at)
SELECT (r ->> 0)::bigint, (r ->> 1)::bigint, r ->> 2, (r ->> 3)::boolean, r ->> 4, r ->> 5, r ->> 6, r ->> 7, r ->> 8,
       (r ->> 9)::json, (r ->> 10)::json, (r ->> 11)::smallint, (r ->> 12)::integer, (r ->> 13)::bigint, (r ->> 14)::bigint
  FROM jsonb_array_elements($1::jsonb) AS r;

-- name: publish_part
SELECT brought, fresh FROM postbus.publish_part($1, $2, $3);

-- name: add_sunk
-- Yields nothing if this batch was published before; waits for whoever is publishing it.
INSERT INTO postbus.sunk (query, batch, brought, created_at) VALUES ($1, $2, $3, postbus.at($4))
ON CONFLICT (query, batch) DO NOTHING
RETURNING batch;

-- name: drop_staged
-- Some at a time: nobody is to wait long for a large part to go.
DELETE FROM postbus.staged WHERE ctid = ANY (ARRAY(SELECT ctid FROM postbus.staged WHERE part = $1 LIMIT $2));

-- name: drop_part
DELETE FROM postbus.parts WHERE part = $1;

-- name: old_parts
SELECT part FROM postbus.parts WHERE created_at < postbus.at($1) ORDER BY part LIMIT $2;

-- name: drop_stray
-- What a task brought after its part had been dropped: no part that is still there comes before it.
DELETE FROM postbus.staged WHERE part < (SELECT coalesce(min(part), 9223372036854775807) FROM postbus.parts);

-- name: drop_old_sunk
DELETE FROM postbus.sunk WHERE created_at < postbus.at($1);

-- ── extract: read by COPY, as far as columns are asked for ───────────────────────────────────────────────────────────

-- name: extract_events
SELECT id, uid, type, tags, key, title, description, payload, metadata, created_at, priority::integer AS priority, max_retries
  FROM postbus.events WHERE id > $1 AND id <= $2 ORDER BY id;

-- name: extract_audit
-- Either end of the range may lie within a row.
SELECT e.id, e.event_id, coalesce(s.name, f.name, '') AS subscription, e.action, e.created_at, e.status, e.attempt, e.epoch,
       e.worker_id, e.status_code, e.error_type, e.error_message, e.execution_time_ms, e.type, e.tags,
       e.priority::integer AS priority, e.event_created_at, e.ready_at, e.claimed_at, e.retry_count, e.errors
  FROM (SELECT l AS line, l.id, coalesce(l.entries, 1) AS entries FROM postbus.event_log AS l
         WHERE l.id >= $1 >> 10 << 10 AND l.id <= $2 ORDER BY l.id) AS r
 CROSS JOIN LATERAL generate_series(greatest(0, $1 + 1 - r.id)::integer,
                                    least(r.entries - 1, $2 - r.id)::integer) AS k (n)
 CROSS JOIN LATERAL postbus.entry(r.line, k.n) AS e
  LEFT JOIN postbus.subscriptions AS s ON s.number = e.subscription
  LEFT JOIN postbus.former_subscriptions AS f ON f.number = e.subscription
 ORDER BY e.id;

-- name: extract_deliveries
-- What is unfinished, wherever it is: in a row, in a block without a row, or where a cursor has still to come to.
WITH leased AS MATERIALIZED (
    SELECT b.subscription, postbus.event_at(b.first_id, b.last_id, b.ids, p.place) AS event_id, b.due_at, b.claimed_at,
           b.worker_id
      FROM postbus.blocks AS b
     CROSS JOIN LATERAL generate_series(0, postbus.size_of(b.first_id, b.last_id, b.ids) - 1) AS p (place)
     WHERE NOT postbus.is_done(b.done, p.place)),
standing AS (
    SELECT d.subscription, d.event_id,
           CASE d.state WHEN 1 THEN 'PROCESSING' WHEN 2 THEN 'FAILED' ELSE 'PENDING' END AS status,
           coalesce(l.due_at, d.due_at) AS due_at, d.ready_at, d.updated_at, d.claimed_at, d.attempt, d.retry_count,
           d.worker_id, d.errors, d.died_at
      FROM postbus.deliveries AS d
      LEFT JOIN leased AS l ON l.subscription = d.subscription AND l.event_id = d.event_id
     WHERE d.event_id > $1 AND d.event_id <= $2
     UNION ALL
    SELECT l.subscription, l.event_id, 'PROCESSING', l.due_at, NULL, l.claimed_at, l.claimed_at, 1, 0, l.worker_id,
           NULL, NULL
      FROM leased AS l
     WHERE l.event_id > $1 AND l.event_id <= $2
       AND NOT EXISTS (SELECT 1 FROM postbus.deliveries AS d
                        WHERE d.subscription = l.subscription AND d.event_id = l.event_id)
     UNION ALL
    SELECT c.subscription, e.id, 'PENDING', coalesce(e.due_at, e.created_at), NULL, e.created_at, NULL, 0, 0, NULL,
           NULL, NULL
      FROM postbus.cursors AS c
      JOIN postbus.subscriptions AS s ON s.number = c.subscription
      JOIN postbus.events AS e ON e.id > $1 AND e.id <= $2 AND e.erased_at IS NULL
           AND postbus.wants(s.patterns, s.tags, e.type, e.tags)
     WHERE CASE WHEN e.id > c.position
                THEN NOT EXISTS (SELECT 1 FROM postbus.skips AS k
                                  WHERE k.subscription = c.subscription AND k.event_id = e.id)
                ELSE c.missing @> e.id
                     OR EXISTS (SELECT 1 FROM postbus.gaps AS g
                                 WHERE g.subscription = c.subscription AND g.ids @> e.id) END)
SELECT t.event_id, s.name AS subscription, t.status, e.type, postbus.sorted(e.tags) AS tags, e.priority::integer AS priority,
       e.created_at, t.due_at, coalesce(t.ready_at, e.due_at, e.created_at) AS ready_at, t.updated_at, t.claimed_at,
       t.attempt, t.retry_count, t.worker_id, t.errors, t.died_at
  FROM standing AS t JOIN postbus.subscriptions AS s ON s.number = t.subscription
  LEFT JOIN postbus.events AS e ON e.id = t.event_id
 ORDER BY t.event_id, s.name COLLATE "C";

-- ── restore ──────────────────────────────────────────────────────────────────────────────────────────────────────────

-- name: jump
-- Ids go on from the next multiple of a thousand million, blocks 2^30 on: above whatever was given between the backup and
-- its restoring.
SELECT setval('postbus.numbers', coalesce(pg_sequence_last_value('postbus.numbers'), 0) + (1::bigint << 30)),
       setval('postbus.events_id_seq', ((greatest(coalesce(pg_sequence_last_value('postbus.events_id_seq'), 0),
           (SELECT max(id) FROM postbus.events)) / 1000000000) + 1) * 1000000000),
       setval('postbus.event_log_id_seq', ((greatest(coalesce(pg_sequence_last_value('postbus.event_log_id_seq'), 0),
           (SELECT max(id) >> 10 FROM postbus.event_log)) / 1000000000) + 1) * 1000000000);

-- name: set_back_cursors
-- A cursor beyond the log would pass over what is published next.
UPDATE postbus.cursors AS c
   SET position = least(c.position, l.last), looked = least(c.looked, l.last),
       missing = c.missing * int8multirange(int8range(NULL, l.last, '(]'))
  FROM (SELECT greatest(coalesce((SELECT max(id) FROM postbus.events), 0), value::bigint) AS last
          FROM postbus.meta WHERE key = 'pruned_through') AS l
 WHERE c.position > l.last OR c.looked > l.last
RETURNING c.subscription, c.position;

-- name: set_log_id
UPDATE postbus.meta SET value = $1 WHERE key = 'log_id';

-- ── lookups ──────────────────────────────────────────────────────────────────────────────────────────────────────────

-- name: places
-- Where a subscription (none: any) still has these events: where its cursor has still to come to (the only form with type
-- and tags; most lie below the cursor, and are not looked up), in a row (of which $5 tells whether its errors are wanted, which may be large), or in a block that may hold
-- some (the only form with a number). One statement: its snapshot sees each event in just one place, or in a block and its
-- held row.
SELECT c.subscription, e.id, e.type, e.tags, NULL::bigint, NULL::bigint[], NULL::bytea, 0, false, 0,
       postbus.micros(coalesce(e.due_at, e.created_at)), 0, postbus.micros(e.created_at), NULL, NULL
  FROM postbus.cursors AS c
 CROSS JOIN unnest(translate($1, '[]', '{}')::bigint[]) AS wanted (id)
 CROSS JOIN LATERAL (SELECT v.id, v.type, v.tags, v.due_at, v.created_at FROM postbus.events AS v
                      WHERE v.id = wanted.id AND v.erased_at IS NULL
                        AND (wanted.id > c.position OR c.missing @> wanted.id
                             OR EXISTS (SELECT 1 FROM postbus.gaps AS g
                                         WHERE g.subscription = c.subscription AND g.ids @> wanted.id))
                     OFFSET 0) AS e
 WHERE ($4::integer IS NULL OR c.subscription = $4)
   AND (e.id <= c.position
        OR (SELECT 1 FROM postbus.skips AS k WHERE k.subscription = c.subscription AND k.event_id = e.id) IS NULL)
UNION ALL
SELECT d.subscription, d.event_id, NULL, NULL, NULL, NULL, NULL, d.attempt, true, d.state, postbus.micros(d.due_at),
       d.retry_count, postbus.micros(d.updated_at), d.worker_id, CASE WHEN $5::boolean THEN d.errors END
  FROM postbus.subscriptions AS s
 CROSS JOIN unnest(translate($1, '[]', '{}')::bigint[]) AS wanted (id)
 CROSS JOIN LATERAL (SELECT v.subscription, v.event_id, v.attempt, v.state, v.due_at, v.retry_count, v.updated_at,
                            v.worker_id, v.errors FROM postbus.deliveries AS v
                      WHERE v.subscription = s.number AND v.event_id = wanted.id OFFSET 0) AS d
 WHERE $4::integer IS NULL OR s.number = $4
UNION ALL
SELECT b.subscription, b.first_id, NULL, NULL, b.number, b.ids, b.done, 1, false, 1, b.until, 0, b.claimed_at, b.worker_id, NULL
  FROM postbus.subscriptions AS s
 CROSS JOIN LATERAL (SELECT v.subscription, v.first_id, v.number, v.ids, v.done, v.until, v.claimed_at, v.worker_id
                       FROM postbus.leases AS v
                      WHERE v.subscription = s.number AND v.first_id <= $3 AND v.first_id > $2 - 16384 AND v.last_id >= $2
                     OFFSET 0) AS b
 WHERE $4::integer IS NULL OR s.number = $4;

-- name: above_below
-- What a cursor has still to come to, newest first: above it, and of what is missing what is there.
SELECT w.id, w.type, w.tags
  FROM ((SELECT e.id, e.type, e.tags FROM postbus.events AS e
          WHERE e.id > (SELECT position FROM postbus.cursors WHERE subscription = $1) AND e.id < $2 AND e.erased_at IS NULL
            AND (SELECT 1 FROM postbus.skips AS k WHERE k.subscription = $1 AND k.event_id = e.id) IS NULL
          ORDER BY e.id DESC LIMIT $3)
        UNION ALL
        (SELECT e.id, e.type, e.tags
           FROM (SELECT unnest(c.missing) AS ids FROM postbus.cursors AS c WHERE c.subscription = $1
                 UNION ALL SELECT unnest(g.ids) FROM postbus.gaps AS g WHERE g.subscription = $1) AS r
          CROSS JOIN LATERAL (SELECT v.id, v.type, v.tags FROM postbus.events AS v
                               WHERE v.id >= lower(r.ids) AND v.id < least(upper(r.ids), $2) AND v.erased_at IS NULL
                               ORDER BY v.id DESC LIMIT $3) AS e
          ORDER BY e.id DESC LIMIT $3)) AS w
 ORDER BY w.id DESC LIMIT $3;

-- name: some_pending
-- Off an index that has them in order of due time.
SELECT event_id FROM postbus.deliveries WHERE state = 0 AND subscription = $1 AND event_id < $2 LIMIT $3;

-- name: count_waiting
-- Pending rows; only ordered subscriptions have parked ones, and few rows.
SELECT count(*)
  FROM ((SELECT 1 FROM postbus.deliveries WHERE state = 0 AND subscription = $1 LIMIT $2)
        UNION ALL
        (SELECT 1 FROM postbus.deliveries WHERE state = 3 AND subscription = $1 LIMIT $2)) AS counted;

-- name: waiting_below
SELECT event_id FROM postbus.deliveries WHERE subscription = $1 AND event_id < $2 AND state IN (0, 3) ORDER BY event_id DESC;

-- name: dead_below
-- Newest event first, straight off the index; the keyset is (created_at, event_id).
SELECT event_id, subscription, postbus.micros(created_at), kind, postbus.micros(died_at) FROM postbus.deliveries
 WHERE state = 2 AND state >= 2 AND subscription = $1
   AND (created_at, event_id) < (postbus.at(least($2, 253402300799000000)), $3)
 ORDER BY created_at DESC, event_id DESC;

-- name: completed_top
SELECT max(first_id) FROM postbus.event_log
 WHERE subscription = $1 AND status = $2 AND status IN ('COMPLETED', 'COMPLETED_WITH_ERRORS') AND first_id < $3;

-- name: completed_between
-- The last entry of each event of a window, unless a later one tells of another end. An array's row stands for the first
-- of its events here, which is right.
SELECT c.first_id, max(c.id) FROM postbus.event_log AS c
 WHERE c.subscription = $1::integer AND c.status = $2 AND c.status IN ('COMPLETED', 'COMPLETED_WITH_ERRORS')
   AND c.first_id >= $3 AND c.first_id < $4
   AND (SELECT 1 FROM postbus.event_log AS l
         WHERE l.last_id IS NULL AND l.first_id = c.first_id AND l.id > c.id AND l.subscription = $1::integer
           AND (l.status IS NOT NULL OR l.action IN ('DISCARDED', 'ERASED')) LIMIT 1) IS NULL
 GROUP BY c.first_id;

-- name: array_spans
-- Between which events the arrays of completed ones reach.
SELECT id, first_id, last_id FROM postbus.event_log
 WHERE last_id IS NOT NULL AND first_id <= $3 AND first_id > $2 - 16384 AND last_id >= $2
   AND subscription = $1 AND status = 'COMPLETED';

-- name: later_ends
-- The last entry after $3 that tells of an end of its own, by event.
SELECT wanted.id, max(l.id)
  FROM unnest(translate($2, '[]', '{}')::bigint[]) AS wanted (id)
 CROSS JOIN LATERAL (SELECT v.id FROM postbus.event_log AS v
                      WHERE v.last_id IS NULL AND v.first_id = wanted.id AND v.id > $3 AND v.subscription = $1::integer
                        AND (v.status IS NOT NULL OR v.action IN ('DISCARDED', 'ERASED')) OFFSET 0) AS l
 GROUP BY wanted.id;

-- name: first_events
-- Where the first events end, and how many they are.
SELECT max(id), count(*) FROM (SELECT id FROM postbus.events ORDER BY id LIMIT $1) AS first;

-- name: dead_one
SELECT event_id, subscription, postbus.micros(created_at), kind, postbus.micros(died_at), priority, attempt, errors,
       postbus.micros(last_retry_at)
  FROM postbus.deliveries WHERE subscription = $1 AND event_id = $2 AND state = 2;

-- name: last_error
-- Without its traceback: those of many letters may be large.
SELECT d.subscription, d.event_id,
       CASE WHEN d.error IS NOT NULL
            THEN json_build_array(json_build_object('type', d.error -> 'type', 'message', d.error -> 'message', 'attempt',
                                                    d.error -> 'attempt', 'worker_id', d.error -> 'worker_id', 'at',
                                                    d.error -> 'at', 'handler', d.error -> 'handler'))::text END
  FROM jsonb_array_elements($1::jsonb) AS r
 CROSS JOIN LATERAL (SELECT v.subscription, v.event_id, v.errors::json -> -1 AS error FROM postbus.deliveries AS v
                      WHERE v.subscription = (r ->> 0)::integer AND v.event_id = (r ->> 1)::bigint AND v.state = 2
                     OFFSET 0) AS d;

-- name: count_dead
SELECT count(*) FROM (SELECT 1 FROM postbus.deliveries WHERE state = 2 AND state >= 2 AND subscription = $1 LIMIT $2) AS counted;

-- name: backlog
-- The next events above a cursor by type and tags, and with the first of them those that are missing below it: how many
-- wait, how many of them until later, since when the first is due; how many these are with those dealt with early, and the
-- last one.
SELECT w.type, w.tags, count(*) FILTER (WHERE w.waits), count(*) FILTER (WHERE w.waits AND w.due > postbus.at($4)),
       postbus.micros(min(w.due) FILTER (WHERE w.waits AND w.due <= postbus.at($4))), count(*), greatest(max(w.id), $2)
  FROM ((SELECT e.id, e.type, e.tags, coalesce(e.due_at, e.created_at) AS due,
                e.erased_at IS NULL
                AND (SELECT 1 FROM postbus.skips AS k WHERE k.subscription = $1 AND k.event_id = e.id) IS NULL AS waits
           FROM postbus.events AS e WHERE e.id > $2 ORDER BY e.id LIMIT $3)
        UNION ALL
        (SELECT e.id, e.type, e.tags, coalesce(e.due_at, e.created_at), e.erased_at IS NULL
           FROM (SELECT unnest(c.missing) AS ids FROM postbus.cursors AS c WHERE c.subscription = $1 AND c.position = $2
                 UNION ALL SELECT unnest(g.ids) FROM postbus.gaps AS g JOIN postbus.cursors AS c
                     ON c.subscription = g.subscription AND c.position = $2 WHERE g.subscription = $1) AS r
          CROSS JOIN LATERAL (SELECT v.id, v.type, v.tags, v.due_at, v.created_at, v.erased_at FROM postbus.events AS v
                               WHERE v.id >= lower(r.ids) AND v.id < upper(r.ids) LIMIT $3 - 1) AS e
          LIMIT $3 - 1)) AS w
 GROUP BY w.type, w.tags;

-- name: depth
-- Pending rows by kind: how many, how many of them later, since when the first is due.
SELECT subscription, kind, count(*), count(*) FILTER (WHERE due_at > postbus.at($1)),
       postbus.micros(min(due_at) FILTER (WHERE due_at <= postbus.at($1)))
  FROM postbus.deliveries WHERE state = 0 GROUP BY subscription, kind;

-- name: dead_depth
SELECT subscription, count(*) FROM postbus.deliveries WHERE state = 2 AND state >= 2 GROUP BY subscription;

-- name: parked_depth
SELECT subscription, count(*) FROM postbus.deliveries WHERE state = 3 AND state >= 2 GROUP BY subscription;

-- name: count_completed
-- Rows off the index, and of arrays what a row stands for beside itself.
SELECT subscription, status, sum(n)::bigint
  FROM (SELECT subscription, status, count(*) AS n FROM postbus.event_log
         WHERE status IN ('COMPLETED', 'COMPLETED_WITH_ERRORS') GROUP BY subscription, status
        UNION ALL
        SELECT subscription, status, sum(entries - 1) FROM postbus.event_log
         WHERE last_id IS NOT NULL AND status = 'COMPLETED' GROUP BY subscription, status) AS counted
 GROUP BY subscription, status;

-- name: recent_actions
-- Goes back from the newest row to the first that is too old: a rate must not read the whole log.
SELECT action, sum(coalesce(entries, 1))::bigint FROM postbus.event_log
 WHERE id > coalesce((SELECT id FROM postbus.event_log WHERE created_at <= postbus.at($1) ORDER BY id DESC LIMIT 1), 0)
 GROUP BY 1;

-- name: recent_events
SELECT count(*) FROM postbus.events
 WHERE id > coalesce((SELECT id FROM postbus.events WHERE created_at <= postbus.at($1) ORDER BY id DESC LIMIT 1), 0);

-- name: store_bytes
SELECT sum(pg_total_relation_size(c.oid))::bigint FROM pg_class AS c
 WHERE c.relnamespace = 'postbus'::regnamespace AND c.relkind IN ('r', 'p');

-- name: event
SELECT id, uid, type, tags, key, title, description, payload::text, metadata::text, postbus.micros(created_at), priority,
       max_retries, NULL
  FROM postbus.events WHERE id = $1;

-- name: events_below
SELECT id FROM postbus.events WHERE id < $1 ORDER BY id DESC;

-- ── the rest ─────────────────────────────────────────────────────────────────────────────────────────────────────────

-- name: events_by_id
-- The first of these events that fit into $2 bytes together, and one more; with each, the bytes of all up to it.
SELECT s.id, s.uid, s.type, s.tags, s.key, s.title, s.description, s.payload, s.metadata, postbus.micros(s.created_at),
       s.priority, s.max_retries, NULL, s.upto
  FROM (SELECT e.*, wanted.place, sum(e.own) OVER (ORDER BY wanted.place ROWS UNBOUNDED PRECEDING) AS upto
          FROM unnest(translate($1, '[]', '{}')::bigint[]) WITH ORDINALITY AS wanted (id, place)
         CROSS JOIN LATERAL (SELECT v.*, octet_length(v.payload) + octet_length(v.metadata)
                                    + coalesce(octet_length(v.title), 0) + coalesce(octet_length(v.description), 0) AS own
                               FROM (SELECT o.id, o.uid, o.type, o.tags, o.key, o.title, o.description,
                                            o.payload::text AS payload, o.metadata::text AS metadata, o.created_at,
                                            o.priority, o.max_retries
                                       FROM postbus.events AS o WHERE o.id = wanted.id OFFSET 0) AS v OFFSET 0) AS e) AS s
 WHERE s.upto - s.own < $2 ORDER BY s.place;

-- name: see_handler
INSERT INTO postbus.handlers (id, name, subscription, pattern, tags, worker_id, owner, seen_at)
VALUES ($1, $2, $3, $4, $5, $6, $7, postbus.at($8))
ON CONFLICT (id) DO UPDATE SET seen_at = excluded.seen_at;

-- name: forget_handler
DELETE FROM postbus.handlers WHERE owner = $1 AND id = $2;

-- name: forget_owner
DELETE FROM postbus.handlers WHERE owner = $1;

-- name: handlers
SELECT id, name, subscription, pattern, tags, worker_id, owner, postbus.micros(seen_at)
  FROM postbus.handlers ORDER BY subscription COLLATE "C", pattern COLLATE "C", id COLLATE "C";

-- name: breaker
SELECT failures, postbus.micros(opened_at), postbus.micros(probe_until) FROM postbus.breakers WHERE name = $1;

-- name: breaker_held
SELECT failures, postbus.micros(opened_at), postbus.micros(probe_until) FROM postbus.breakers WHERE name = $1 FOR UPDATE;

-- name: add_breaker
INSERT INTO postbus.breakers (name, failures) VALUES ($1, 0) ON CONFLICT (name) DO NOTHING;

-- name: set_breaker
UPDATE postbus.breakers SET failures = $1, opened_at = postbus.at($2), probe_until = postbus.at($3) WHERE name = $4;

-- name: now
SELECT postbus.micros(postbus.now());

-- name: holders
-- Who has published and not ended yet: followers wait at its floor meanwhile. A prepared transaction has no pid.
SELECT p.floor, p.pid, x.gid, coalesce(a.application_name, ''), coalesce(a.state, 'prepared'),
       extract(epoch FROM clock_timestamp() - coalesce(a.xact_start, x.prepared, clock_timestamp()))::float8,
       left(coalesce(a.query, ''), 120)
  FROM postbus.pins('events') AS p
  LEFT JOIN pg_stat_activity AS a ON a.pid = p.pid
  LEFT JOIN pg_locks AS t ON p.pid IS NULL AND t.pid IS NULL AND t.virtualtransaction = p.holder
        AND t.locktype = 'transactionid' AND t.mode = 'ExclusiveLock'
  LEFT JOIN pg_prepared_xacts AS x ON x.transaction = t.transactionid
 WHERE p.pid IS NOT NULL OR x.gid IS NOT NULL
 ORDER BY p.floor;

-- name: horizon
-- The oldest snapshot in this database: what it can see, vacuum must keep.
SELECT a.pid, a.application_name, a.state, extract(epoch FROM clock_timestamp() - a.xact_start)::float8
  FROM pg_stat_activity AS a
 WHERE a.datname = current_database() AND a.backend_xmin IS NOT NULL AND a.pid <> pg_backend_pid()
 ORDER BY a.xact_start LIMIT 1;

-- name: server
SELECT current_setting('server_version'), current_setting('server_version_num')::integer / 10000, pg_is_in_recovery(),
       current_setting('fsync'), current_setting('full_page_writes'), current_setting('autovacuum');

-- name: meta
SELECT value FROM postbus.meta WHERE key = $1;

-- name: head_events
SELECT postbus.head('events');

-- name: last_events
SELECT max(id) FROM postbus.events WHERE id <= $1;

-- name: ahead_events
SELECT max(id) FROM (SELECT id FROM postbus.events WHERE id > $1 AND id <= $2 ORDER BY id LIMIT $3) AS step;

-- name: when_events
SELECT id, postbus.micros(created_at) FROM postbus.events WHERE id > $1 ORDER BY id LIMIT 1;

-- name: activity_events
SELECT postbus.micros(created_at) / $3::bigint, NULL, NULL, count(*) FROM postbus.events WHERE id > $1 AND id <= $2 GROUP BY 1;

-- name: since_events
SELECT min(id) FROM postbus.events WHERE id > $1 AND id <= $2 AND created_at >= postbus.at($3);

-- name: checkpoints
-- Whoever reads by the lock that followers hold, and holds it no more, is gone: also from another host.
SELECT c.subscription, c.stream, c.position, c.log_id, postbus.micros(c.moved_at), c.epoch, c.worker_id,
       postbus.micros(c.held_until), c.holder,
       c.locked AND NOT EXISTS (
           SELECT 1 FROM pg_locks AS l
            WHERE l.locktype = 'advisory' AND l.objsubid = 1 AND l.granted
              AND l.database = (SELECT oid FROM pg_database WHERE datname = current_database())
              AND (l.classid::bigint << 32 | l.objid::bigint)
                  = hashtextextended('postbus' || ' holds follower ' || c.subscription, 11)),
       c.stopped, c.stopped_before
  FROM postbus.checkpoints AS c JOIN postbus.subscriptions AS s ON s.name = c.subscription
 ORDER BY c.subscription COLLATE "C";

-- name: add_checkpoint
INSERT INTO postbus.checkpoints (subscription, stream, position, log_id, moved_at)
VALUES ($1, $2, $3, $4, postbus.at($5));

-- name: move_checkpoint
-- Only forwards, and only in the log it was made for.
UPDATE postbus.checkpoints SET position = $1, moved_at = postbus.at($2)
 WHERE subscription = $3 AND log_id = $4 AND position <= $1;

-- name: drop_checkpoint
DELETE FROM postbus.checkpoints WHERE subscription = $1;

-- name: read_on
-- Looked up every time: after a crash of the server, ids below a head of before may be given out anew.
-- The next $2 events that fit into $3 bytes together, and one more.
SELECT id, uid, type, tags, key, title, description, payload, metadata, created_at, priority, max_retries, NULL, pruned, own
  FROM (SELECT *, sum(own) OVER (ORDER BY id ROWS UNBOUNDED PRECEDING) AS upto
          FROM (SELECT *, octet_length(payload) + octet_length(metadata)
                       + coalesce(octet_length(title), 0) + coalesce(octet_length(description), 0) AS own
                  FROM postbus.read_on($1, $2) OFFSET 0) AS page) AS sized
 WHERE upto - own < $3 ORDER BY id;

-- name: read_right_on
-- Where an id follows the other, none can come in between any more: the pins, which cost more than the rows, need no look.
SELECT id, uid, type, tags, key, title, description, payload, metadata, postbus.micros(created_at), priority, max_retries,
       NULL, 0, own
  FROM (SELECT *, sum(own) OVER (ORDER BY id ROWS UNBOUNDED PRECEDING) AS upto
          FROM (SELECT *, octet_length(payload) + octet_length(metadata)
                       + coalesce(octet_length(title), 0) + coalesce(octet_length(description), 0) AS own
                  FROM (SELECT id, uid, type, tags, key, title, description, payload::text AS payload,
                               metadata::text AS metadata, created_at, priority, max_retries
                          FROM postbus.events WHERE id > $1 ORDER BY id LIMIT $2) AS page OFFSET 0) AS page) AS sized
 WHERE upto - own < $3 ORDER BY id;

-- name: lead
SELECT position, log_id, holder, locked, postbus.micros(held_until), crashes, trying
  FROM postbus.checkpoints WHERE subscription = $1 AND stream = 'events' FOR UPDATE;

-- name: take_lead
UPDATE postbus.checkpoints
   SET epoch = $1, holder = $2, worker_id = $3, locked = $4, held_until = postbus.at($5), crashes = $6, trying = NULL
 WHERE subscription = $7;

-- name: announce
UPDATE postbus.checkpoints SET trying = $1 WHERE subscription = $2 AND epoch = $3;

-- name: keep_lead
UPDATE postbus.checkpoints SET held_until = postbus.at($1) WHERE subscription = $2 AND epoch = $3;

-- name: position
SELECT position FROM postbus.checkpoints WHERE subscription = $1;

-- name: reader
SELECT epoch FROM postbus.checkpoints WHERE subscription = $1;

-- name: resign
-- What an earlier reader has stopped at stands until somebody gets further; started again, it is tried again.
UPDATE postbus.checkpoints
   SET holder = NULL, locked = false, held_until = NULL, stopped = coalesce($1::text, stopped),
       crashes = CASE WHEN $1::text IS NULL THEN crashes ELSE 0 END,
       stopped_before = CASE WHEN $1::text IS NULL THEN stopped_before ELSE $2::bigint END
 WHERE subscription = $3 AND epoch = $4;

-- name: move_lead
-- The epoch is the fence: whoever was deposed moves nothing.
UPDATE postbus.checkpoints
   SET position = $1, moved_at = postbus.at($2), crashes = 0, stopped = NULL, stopped_before = NULL
 WHERE subscription = $3 AND epoch = $4 AND position <= $1;

-- name: move_firmly
UPDATE postbus.checkpoints
   SET position = $1, moved_at = postbus.now(), crashes = 0, stopped = NULL, stopped_before = NULL
 WHERE subscription = $2 AND epoch = $3 AND position <= $1;

-- name: move_lightly
SELECT postbus.move_lightly($1, $2, $3);

-- name: rewind
UPDATE postbus.checkpoints
   SET position = $1, moved_at = postbus.at($2), epoch = $3, log_id = $4, holder = NULL, locked = false,
       held_until = NULL, crashes = 0, stopped = NULL, stopped_before = NULL
 WHERE subscription = $5;

-- name: add_token
INSERT INTO postbus.tokens (id, name, digest, scopes, created_at, expires_at)
VALUES ($1, $2, $3, $4, postbus.at($5), postbus.at($6));

-- name: tokens
SELECT id, name, digest, scopes, postbus.micros(created_at), postbus.micros(expires_at), postbus.micros(revoked_at)
  FROM postbus.tokens ORDER BY created_at, id;

-- name: revoke_token
UPDATE postbus.tokens SET revoked_at = coalesce(revoked_at, postbus.at($1)) WHERE id = $2;

-- name: lost_kinds
SELECT count(*) FROM postbus.deliveries AS d WHERE (SELECT 1 FROM postbus.kinds AS k WHERE k.id = d.kind) IS NULL;

-- name: old_gaps
-- Ids that were drawn, and that a queue has not seen yet: how many rows of them have been kept apart for a minute.
SELECT count(*) FROM postbus.gaps WHERE kept_at < clock_timestamp() - interval '1 min';
