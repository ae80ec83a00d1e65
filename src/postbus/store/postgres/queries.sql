-- Every statement of the PostgreSQL store, under the names the shared verbs use. Moments go in and out as microseconds.
-- Arrays of ids come as JSON text ("[1,2]"), which becomes an array by its brackets.

-- name: catalog
-- Whether subscriptions have changed, the oldest transaction still open (see the table `routes`), the log's head, the
-- database's time, and the routes that may be new since the last look.
SELECT (SELECT value::bigint FROM postbus.meta WHERE key = 'catalog'),
       pg_snapshot_xmin(pg_current_snapshot())::text::bigint,
       coalesce(pg_sequence_last_value('postbus.events_id_seq'), 0),
       postbus.micros(postbus.now()),
       (SELECT coalesce(json_agg(json_build_array(id, subscription, priority, type, tags, solo))::text, '[]')
          FROM postbus.routes WHERE xid >= $1);

-- name: bump_catalog
SELECT postbus.bump();

-- name: subscriptions
SELECT name, mode, patterns::text, tags::text, paused, (extract(epoch FROM lease) * 1000000)::bigint, retry::text,
       postbus.micros(created_at) FROM postbus.subscriptions ORDER BY name COLLATE "C";

-- name: add_subscription
INSERT INTO postbus.subscriptions (name, mode, patterns, tags, lease, retry, created_at)
VALUES ($1, $2, $3, $4, $5::bigint * interval '1 microsecond', $6, postbus.at($7));

-- name: set_interests
UPDATE postbus.subscriptions SET patterns = $1, tags = $2 WHERE name = $3;

-- name: set_paused
UPDATE postbus.subscriptions SET paused = $1 WHERE name = $2;

-- name: drop_subscription
DELETE FROM postbus.subscriptions WHERE name = $1;

-- name: add_route
SELECT postbus.register($1, $2, $3::integer, $4, $5, $6);

-- name: drop_unused_routes
-- Nothing is joined: with no index for it, and hash joins off, that would be each route against each delivery.
DELETE FROM postbus.routes WHERE id = ANY (ARRAY(SELECT id FROM postbus.routes EXCEPT SELECT route FROM postbus.deliveries));

-- name: count_routes
SELECT count(*) FROM postbus.routes;

-- name: append
SELECT event_id, fresh, stored_at FROM postbus.append($1, $2, $3);

-- name: append_one
SELECT event_id, true, stored_at FROM postbus.append_one($1, $2, $3, $4, $5, $6, $7, $8, $9, $10);

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

-- name: reserve
SELECT postbus.reserve($1::integer), postbus.micros(postbus.now());

-- name: sift
SELECT postbus.sift($1::text[], $2::bigint[], ARRAY(
    SELECT postbus.digest(g.type, g.payload, g.tags, g.key, g.title, g.description)
      FROM unnest($3::text[], $4::text[], $5::text[], $6::text[], $7::text[], $8::text[])
      WITH ORDINALITY AS g (type, payload, tags, key, title, description, n) ORDER BY g.n));

-- name: deliver
SELECT postbus.deliver($1::bigint[], ARRAY(SELECT postbus.at(d) FROM unnest($2::bigint[]) WITH ORDINALITY AS u (d, n)
                                            ORDER BY n), postbus.at($3));

-- name: deliver_alike
SELECT postbus.deliver_alike($1::bigint[], $2, $3, $4::integer, $5::integer, postbus.at($6));

-- name: deliver_to
-- What a new subscription wants of the log so far, some events at a time: (last id looked at, how many were taken).
WITH looked AS MATERIALIZED (
    SELECT id, type, tags, priority, max_retries, created_at FROM postbus.events WHERE id > $2 ORDER BY id LIMIT $3),
wanted AS MATERIALIZED (
    SELECT l.id, l.max_retries, l.created_at, l.type, postbus.sorted(l.tags) AS tags, l.priority,
           postbus.route_id(s.name, l.priority, l.type, postbus.sorted(l.tags), false) AS route
      FROM looked AS l JOIN postbus.subscriptions AS s
        ON s.name = $1 AND postbus.wants(s.patterns, s.tags, l.type, l.tags)),
registered AS (
    INSERT INTO postbus.routes (id, subscription, priority, type, tags, solo)
    SELECT DISTINCT w.route, $1, w.priority, w.type, w.tags, false FROM wanted AS w
     WHERE (SELECT r.id FROM postbus.routes AS r WHERE r.id = w.route LIMIT 1) IS NULL),
delivered AS (
    INSERT INTO postbus.deliveries (event_id, subscription, route, due_at, ready_at, created_at, updated_at, max_retries)
    SELECT w.id, $1, w.route, postbus.at($4), postbus.at($4), w.created_at, postbus.at($4), w.max_retries FROM wanted AS w)
SELECT max(id) FROM looked;

-- name: drop_old_uids
DELETE FROM postbus.dedup WHERE uid = ANY (ARRAY(
    SELECT uid FROM postbus.dedup WHERE created_at < postbus.at($1) ORDER BY created_at LIMIT $2));

-- name: event
SELECT id, uid, type, tags, key, title, description, payload::text, metadata::text, postbus.micros(created_at), priority,
       max_retries, NULL
  FROM postbus.events WHERE id = $1;

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

-- name: due
-- What is due on some routes, each from its mark on ($3: see `Marks`). The candidates are found before any is locked: that
-- tells how many of each route are among the first. Those are then taken route by route, passing over what another worker
-- holds, so that workers never wait for each other and each gets as many as there are.
WITH wanted AS MATERIALIZED (
    SELECT w.route, postbus.at(w.low) AS low FROM unnest($1::bigint[], $3::bigint[]) AS w (route, low)),
quota AS MATERIALIZED (
    SELECT f.route, f.low, count(*) AS n
      FROM (SELECT w.route, w.low FROM wanted AS w
             CROSS JOIN LATERAL (SELECT d.due_at, d.event_id FROM postbus.deliveries AS d
                                  WHERE d.route = w.route AND d.due_at BETWEEN w.low AND postbus.at($2)
                                  ORDER BY d.due_at, d.event_id LIMIT $4) AS c
             ORDER BY c.due_at, c.event_id LIMIT $4) AS f
     GROUP BY f.route, f.low)
SELECT postbus.micros(t.due_at), t.event_id, t.state, t.attempt, t.retry_count, t.place, q.route
  FROM quota AS q
 CROSS JOIN LATERAL (SELECT d.due_at, d.event_id, d.state, d.attempt, d.retry_count, d.ctid AS place
                       FROM postbus.deliveries AS d
                      WHERE d.route = q.route AND d.due_at BETWEEN q.low AND postbus.at($2)
                      ORDER BY d.due_at, d.event_id LIMIT q.n FOR UPDATE SKIP LOCKED) AS t
 ORDER BY t.due_at, t.event_id;

-- name: due_on
-- The same on one route.
SELECT postbus.micros(due_at), event_id, state, attempt, retry_count, ctid, route FROM postbus.deliveries
 WHERE route = $1 AND due_at BETWEEN postbus.at($3) AND postbus.at($2)
 ORDER BY due_at, event_id LIMIT $4 FOR UPDATE SKIP LOCKED;

-- name: is_due
SELECT 1 FROM postbus.deliveries WHERE route = $1 AND due_at <= postbus.at($2) LIMIT 1;

-- name: next_due
SELECT postbus.micros(due_at) FROM postbus.deliveries WHERE route = $1 AND due_at > postbus.at($2) ORDER BY due_at LIMIT 1;

-- name: routes_with_due
-- Hops from one route to the next one present in the index: the cost is the routes that hold something, not those
-- ever registered.
WITH RECURSIVE present (route) AS (
    (SELECT d.route FROM postbus.deliveries AS d WHERE d.route > $1 AND d.due_at IS NOT NULL ORDER BY d.route LIMIT 1)
    UNION ALL
    SELECT (SELECT d.route FROM postbus.deliveries AS d WHERE d.route > present.route AND d.due_at IS NOT NULL
             ORDER BY d.route LIMIT 1)
      FROM present WHERE present.route IS NOT NULL)
SELECT route FROM present
 WHERE route IS NOT NULL
   AND EXISTS (SELECT 1 FROM postbus.deliveries AS d WHERE d.route = present.route AND d.due_at <= postbus.at($2));

-- name: draw_epochs
-- The last of as many as one number stands for; of more than that, none.
SELECT CASE WHEN $1 <= 1024 THEN (nextval('postbus.epochs') << 10) + $1 - 1 END;

-- name: take
-- Lease a batch and write its audit rows in one statement, by the places at which this transaction has locked the rows.
-- Epochs rise in the order given; returns the first of them, and how many rows were taken.
WITH base AS MATERIALIZED (SELECT nextval('postbus.epochs') << 10 AS epoch),
taken AS (
    UPDATE postbus.deliveries AS d
       SET state = 1, tried = 1, due_at = postbus.at(t.until), epoch = (SELECT epoch FROM base) + t.n - 1,
           attempt = d.attempt + 1, claimed_at = postbus.at($4), updated_at = postbus.at($4), worker_id = t.worker,
           owner = t.owner
      FROM unnest($1::tid[], $3::bigint[], $5::text[], $6::text[]) WITH ORDINALITY AS t (place, until, worker, owner, n)
     WHERE d.ctid = t.place
    RETURNING d.event_id, d.attempt, d.epoch, d.worker_id),
logged AS (
    INSERT INTO postbus.event_log (event_id, subscription, action, created_at, status, attempt, epoch, worker_id)
    SELECT t.event_id, $2, 'PICKED', postbus.at($4), 'PROCESSING', t.attempt, t.epoch, t.worker_id FROM taken AS t)
SELECT epoch, (SELECT count(*) FROM taken) FROM base;

-- name: claim_at_once
-- Lease all that some claims ask for ($6: how many; $7, $8, $9: for each who gets it, and for how long), or nothing: nothing
-- if subscriptions have changed ($1), if the subscription ($11) has a route that the caller does not know ($12; $2: see
-- `catalog`), if a suspect waits ($10), if there is less than that, or if a lease that ran out is among it. The candidates
-- are found before any is locked, by rank of their route ($5) and from its mark on ($4); some more than needed, for another
-- worker may hold the first. One that has changed since this statement began lies in another place, where this statement
-- cannot change it: it is passed over as if it were held, or nothing is taken. Payloads come along up to $13 bytes.
WITH moment AS MATERIALIZED (
    SELECT k.now FROM (SELECT postbus.now() AS now
                        WHERE (SELECT value::bigint FROM postbus.meta WHERE key = 'catalog') = $1
                          AND NOT EXISTS (SELECT 1 FROM postbus.routes AS r
                                           WHERE r.xid >= $2 AND r.subscription = $11
                                             AND r.id <> ALL ($12::bigint[])) OFFSET 0) AS k
     WHERE NOT EXISTS (SELECT 1 FROM unnest($10::bigint[]) AS s (route)
                        CROSS JOIN LATERAL (SELECT 1 FROM postbus.deliveries AS d
                                             WHERE d.route = s.route AND d.due_at <= k.now LIMIT 1) AS suspect)),
found AS MATERIALIZED (
    SELECT l.place, l.due_at, l.route, l.now, row_number() OVER () AS n, count(*) OVER () AS there,
           bool_and(l.ready) OVER () AS ready
      FROM (SELECT d.ctid AS place, d.due_at, c.route, c.now, d.state = 0 AND d.ctid = c.place AS ready
              FROM (SELECT w.route, w.rank, m.now, f.place, f.due_at, f.event_id
                      FROM moment AS m
                     CROSS JOIN unnest($3::bigint[], $4::bigint[], $5::bigint[]) AS w (route, low, rank)
                     CROSS JOIN LATERAL (SELECT v.ctid AS place, v.due_at, v.event_id FROM postbus.deliveries AS v
                                          WHERE v.route = w.route AND v.due_at BETWEEN postbus.at(w.low) AND m.now
                                          ORDER BY v.due_at, v.event_id LIMIT $6 + 8) AS f
                     ORDER BY w.rank, f.due_at, f.event_id LIMIT $6 + 8) AS c
              JOIN postbus.deliveries AS d ON d.ctid = c.place
             ORDER BY c.rank, c.due_at, c.event_id LIMIT $6 FOR UPDATE OF d SKIP LOCKED) AS l),
base AS MATERIALIZED (SELECT nextval('postbus.epochs') << 10 AS epoch),
taken AS (
    UPDATE postbus.deliveries AS d
       SET state = 1, tried = 1, due_at = f.now + ($9::bigint[])[f.n] * interval '1 microsecond',
           epoch = (SELECT epoch FROM base) + f.n - 1, attempt = d.attempt + 1, claimed_at = f.now, updated_at = f.now,
           worker_id = ($7::text[])[f.n], owner = ($8::text[])[f.n]
      FROM found AS f
     WHERE d.ctid = f.place AND f.there = $6 AND f.ready
    RETURNING f.n, f.due_at, f.route, f.now, d.event_id, d.subscription, d.attempt, d.retry_count, d.epoch, d.worker_id),
logged AS (
    INSERT INTO postbus.event_log (event_id, subscription, action, created_at, status, attempt, epoch, worker_id)
    SELECT t.event_id, t.subscription, 'PICKED', t.now, 'PROCESSING', t.attempt, t.epoch, t.worker_id FROM taken AS t)
SELECT postbus.micros(s.due_at), s.route, postbus.micros(s.now), s.event_id, s.attempt, s.retry_count, s.epoch,
       CASE WHEN s.below < $13 THEN s.id END, s.uid, s.type, s.tags, s.key, s.title, s.description,
       CASE WHEN s.below < $13 THEN s.payload END, s.metadata, postbus.micros(s.created_at), s.priority, s.max_retries, NULL
  FROM (SELECT t.*, e.*, sum(octet_length(e.payload)) OVER (ORDER BY t.n ROWS UNBOUNDED PRECEDING)
                         - octet_length(e.payload) AS below
          FROM taken AS t
          LEFT JOIN LATERAL (SELECT v.id, v.uid, v.type, v.tags, v.key, v.title, v.description, v.payload::text AS payload,
                                    v.metadata::text AS metadata, v.created_at, v.priority, v.max_retries
                               FROM postbus.events AS v WHERE v.id = t.event_id OFFSET 0) AS e ON true) AS s
 ORDER BY s.n;

-- name: log
INSERT INTO postbus.event_log (event_id, subscription, action, created_at, status, attempt, epoch, worker_id, status_code,
                               error_type, error_message, execution_time_ms)
VALUES ($1, $2, $3, postbus.at($4), $5, $6, $7, $8, $9, $10, $11, $12);

-- name: log_end
INSERT INTO postbus.event_log (event_id, subscription, action, created_at, status, attempt, epoch, worker_id, status_code,
                               error_type, error_message, execution_time_ms, type, tags, priority, event_created_at,
                               ready_at, claimed_at, retry_count, errors)
VALUES ($1, $2, $3, postbus.at($4), $5, $6, $7, $8, $9, $10, $11, $12, $13, $14, $15, postbus.at($16), postbus.at($17),
        postbus.at($18), $19, $20);

-- name: finish
-- The epoch is the fence: a late worker removes no row.
DELETE FROM postbus.deliveries WHERE event_id = $1 AND subscription = $2 AND epoch = $3;

-- name: finish_all
-- Finish everything that simply worked; return which (by their place among what is given), and the catalog's version. The
-- epoch is the fence, and is in the DELETE itself: a row that another transaction has changed since is looked at again as
-- it stands now; one filed under another route meanwhile, which this statement may not see, is passed over. Rows are found
-- one by one through the primary key and removed by their place, because any plan that joins the two tables might be made
-- while the queue is short and kept when it is long. $7: the moment, if it is not now.
WITH moment AS MATERIALIZED (SELECT coalesce(postbus.at($7), postbus.now()) AS now),
gone AS (
    DELETE FROM postbus.deliveries AS d
     USING (SELECT l.place, l.route, g.n, g.epoch, g.worker, g.code, g.ms, m.now
              FROM moment AS m
             CROSS JOIN unnest($1::bigint[], $2::text[], $3::bigint[], $4::text[], $5::integer[], $6::float8[])
                        WITH ORDINALITY AS g (id, name, epoch, worker, code, ms, n)
             CROSS JOIN LATERAL (SELECT v.ctid AS place, v.route FROM postbus.deliveries AS v
                                  WHERE v.event_id = g.id AND v.subscription = g.name AND v.epoch = g.epoch OFFSET 0) AS l
            OFFSET 0) AS t
     WHERE d.ctid = t.place AND d.epoch = t.epoch AND d.route = t.route AND d.epoch > 0 AND d.state IN (0, 1)
    RETURNING t.n, d.event_id, d.subscription, d.route, d.attempt, d.epoch, d.created_at, d.ready_at, d.claimed_at,
              d.retry_count, d.max_retries, d.errors, t.worker, t.code, t.ms, t.now),
logged AS (
    INSERT INTO postbus.event_log (event_id, subscription, action, created_at, status, attempt, epoch, worker_id,
                                   status_code, execution_time_ms, type, tags, priority, event_created_at, ready_at,
                                   claimed_at, retry_count, errors)
    SELECT g.event_id, g.subscription, 'COMPLETED', g.now, 'COMPLETED', g.attempt, g.epoch, g.worker, g.code, g.ms, w.type,
           w.tags, w.priority, g.created_at, g.ready_at, g.claimed_at, g.retry_count, g.errors
      FROM gone AS g
      LEFT JOIN LATERAL (SELECT r.type, r.tags, r.priority FROM postbus.routes AS r
                          WHERE r.id = g.route LIMIT 1) AS w ON true)
SELECT g.n, g.attempt, g.retry_count, g.max_retries, postbus.micros(g.now),
       (SELECT value::bigint FROM postbus.meta WHERE key = 'catalog')
  FROM gone AS g;

-- name: held_all
-- What the fence lets through, for the outcomes that keep the row; locked in the order of ids.
SELECT h.event_id, h.subscription, h.route, h.state, postbus.micros(h.due_at), h.attempt, h.retry_count, h.max_retries, h.epoch,
       h.worker_id, h.errors, postbus.micros(h.created_at), postbus.micros(h.ready_at), postbus.micros(h.claimed_at)
  FROM (SELECT t.id, t.name, t.epoch FROM unnest($1::bigint[], $2::text[], $3::bigint[]) AS t (id, name, epoch)
         ORDER BY t.id, t.name) AS t
 CROSS JOIN LATERAL (SELECT d.event_id, d.subscription, d.route, d.state, d.due_at, d.attempt, d.retry_count, d.max_retries,
                            d.epoch, d.worker_id, d.errors, d.created_at, d.ready_at, d.claimed_at
                       FROM postbus.deliveries AS d
                      WHERE d.event_id = t.id AND d.subscription = t.name AND d.epoch = t.epoch AND d.epoch > 0
                        AND d.state IN (0, 1) FOR UPDATE) AS h;

-- name: delivery
SELECT event_id, subscription, route, state, postbus.micros(due_at), attempt, retry_count, max_retries, epoch, worker_id,
       errors, postbus.micros(created_at), postbus.micros(ready_at), postbus.micros(claimed_at)
  FROM postbus.deliveries WHERE event_id = $1 AND subscription = $2 FOR UPDATE;

-- name: end_attempt
-- A failed or expired attempt that will be followed by another.
UPDATE postbus.deliveries
   SET state = 0, tried = 0, route = $1, due_at = postbus.at($2), ready_at = postbus.at($3), updated_at = postbus.at($4),
       epoch = $5, retry_count = $6, errors = $7
 WHERE event_id = $8 AND subscription = $9 AND epoch = $10;

-- name: bury
UPDATE postbus.deliveries
   SET state = 2, tried = 2, route = $1, due_at = NULL, updated_at = postbus.at($2), epoch = $3, retry_count = $4,
       errors = $5, died_at = postbus.at($6)
 WHERE event_id = $7 AND subscription = $8 AND epoch = $9;

-- name: recorded
-- Whether this very epoch has recorded an outcome before, and which.
SELECT action, status FROM postbus.event_log
 WHERE event_id = $1 AND subscription = $2 AND epoch = $3 AND action IN ('COMPLETED', 'COMPLETED_WITH_ERRORS', 'FAILED');

-- name: extend
-- By their places, as `finish_all` does, and fenced in the UPDATE itself.
UPDATE postbus.deliveries AS d SET due_at = t.until, updated_at = postbus.at($5)
  FROM (SELECT l.place, postbus.at(g.until) AS until, g.epoch
          FROM unnest($1::bigint[], $2::text[], $3::bigint[], $4::bigint[]) AS g (id, name, epoch, until)
         CROSS JOIN LATERAL (SELECT v.ctid AS place FROM postbus.deliveries AS v
                              WHERE v.event_id = g.id AND v.subscription = g.name AND v.epoch = g.epoch OFFSET 0) AS l
        OFFSET 0) AS t
 WHERE d.ctid = t.place AND d.epoch = t.epoch AND d.state = 1
RETURNING d.event_id, d.subscription, d.epoch;

-- name: release
UPDATE postbus.deliveries
   SET state = 0, tried = 0, due_at = postbus.at($1), ready_at = postbus.at($2), updated_at = postbus.at($3), epoch = $4,
       attempt = attempt - 1
 WHERE event_id = $5 AND subscription = $6 AND epoch = $7 AND state = 1
RETURNING event_id, subscription, attempt;

-- name: make_due
UPDATE postbus.deliveries
   SET state = 0, tried = tried * 0, due_at = postbus.at($1), ready_at = postbus.at($2), updated_at = postbus.at($3), epoch = $4
 WHERE event_id = $5 AND subscription = $6 AND epoch = $7;

-- name: any_expired
SELECT 1 FROM postbus.deliveries WHERE tried = 1 AND due_at <= postbus.at($1) LIMIT 1;

-- name: expired_leases
SELECT event_id, subscription, route, state, postbus.micros(due_at), attempt, retry_count, max_retries, epoch, worker_id,
       errors, postbus.micros(created_at), postbus.micros(ready_at), postbus.micros(claimed_at)
  FROM postbus.deliveries WHERE tried = 1 AND due_at <= postbus.at($1) LIMIT $2 FOR UPDATE SKIP LOCKED;

-- name: leases_of
SELECT event_id, subscription, route, state, postbus.micros(due_at), attempt, retry_count, max_retries, epoch, worker_id,
       errors, postbus.micros(created_at), postbus.micros(ready_at), postbus.micros(claimed_at)
  FROM postbus.deliveries WHERE tried = 1 AND owner = $1 LIMIT $2 FOR UPDATE SKIP LOCKED;

-- name: lease_owners
SELECT DISTINCT owner FROM postbus.deliveries WHERE tried = 1;

-- name: named_owners
SELECT DISTINCT owner FROM postbus.deliveries WHERE tried = 1
 UNION SELECT owner FROM postbus.handlers
 UNION SELECT holder FROM postbus.checkpoints WHERE holder IS NOT NULL;

-- name: tried_routes
-- Routes with a delivery that is leased (1), or waiting for a retry (0).
SELECT DISTINCT tried, route FROM postbus.deliveries WHERE tried IN (0, 1) AND subscription = $1;

-- name: unfinished
SELECT 1 FROM postbus.deliveries WHERE event_id = $1 AND subscription = $2 AND state IN (0, 1);

-- name: deliveries_of
SELECT subscription, state, postbus.micros(due_at), attempt, retry_count, postbus.micros(updated_at), worker_id, errors
  FROM postbus.deliveries WHERE event_id = $1 ORDER BY subscription COLLATE "C";

-- name: log_of
SELECT id, event_id, subscription, action, postbus.micros(created_at), status, attempt, epoch, worker_id, status_code,
       error_type, error_message, execution_time_ms
  FROM postbus.event_log WHERE event_id = $1 ORDER BY id;

-- name: log_back
SELECT id, event_id, subscription, action, postbus.micros(created_at), status, attempt, epoch, worker_id, status_code,
       error_type, error_message, execution_time_ms
  FROM postbus.event_log WHERE event_id = $1 ORDER BY id DESC;

-- name: ends_of
-- How an event last stood in each subscription that has no delivery of it any more.
SELECT subscription, action, status, attempt, retry_count, postbus.micros(created_at), worker_id, errors
  FROM postbus.event_log WHERE event_id = $1 AND (status IS NOT NULL OR action = 'DISCARDED') ORDER BY id;

-- name: events_below
SELECT id FROM postbus.events WHERE id < $1 ORDER BY id DESC;

-- name: pending_below
SELECT event_id FROM postbus.deliveries WHERE event_id < $1 AND subscription = $2 AND state IN (0, 3) ORDER BY event_id DESC;

-- name: completed_below
-- A subscription deleted and made anew has its own deliveries: what the old one completed may be pending in the new.
SELECT DISTINCT event_id FROM postbus.event_log AS l
 WHERE subscription = $2 AND status = $3 AND status IN ('COMPLETED', 'COMPLETED_WITH_ERRORS') AND event_id < $1
   AND (SELECT 1 FROM postbus.deliveries AS d WHERE d.event_id = l.event_id AND d.subscription = $2) IS NULL
 ORDER BY event_id DESC;

-- name: tried
-- Leased (1) or dead (2), newest event first, straight off the index; the keyset is (created_at, event_id).
SELECT event_id, subscription, postbus.micros(created_at), route, postbus.micros(died_at) FROM postbus.deliveries
 WHERE tried = $4 AND subscription = $1 AND (created_at, event_id) < (postbus.at(least($2, 253402300799000000)), $3)
 ORDER BY created_at DESC, event_id DESC;

-- name: dead_newest
-- The last error alone, and without its traceback: those of a thousand letters may be a gigabyte.
SELECT d.event_id, d.route, postbus.micros(d.died_at),
       CASE WHEN e.error IS NOT NULL
            THEN json_build_array(json_build_object('type', e.error -> 'type', 'message', e.error -> 'message', 'attempt',
                                                    e.error -> 'attempt', 'worker_id', e.error -> 'worker_id', 'at',
                                                    e.error -> 'at', 'handler', e.error -> 'handler'))::text END
  FROM postbus.deliveries AS d CROSS JOIN LATERAL (SELECT d.errors::json -> -1 AS error OFFSET 0) AS e
 WHERE d.tried = 2 AND d.subscription = $1 ORDER BY d.created_at DESC, d.event_id DESC LIMIT $2;

-- name: count_dead
SELECT count(*) FROM (SELECT 1 FROM postbus.deliveries WHERE tried = 2 AND subscription = $1 LIMIT $2) AS counted;

-- name: dead_one
SELECT event_id, subscription, route, attempt, errors, postbus.micros(died_at), postbus.micros(last_retry_at),
       postbus.micros(created_at), epoch
  FROM postbus.deliveries WHERE event_id = $1 AND subscription = $2 AND state = 2;

-- name: dead_held
SELECT event_id, subscription, route, attempt, errors, postbus.micros(died_at), postbus.micros(last_retry_at),
       postbus.micros(created_at), epoch
  FROM postbus.deliveries WHERE event_id = $1 AND subscription = $2 AND state = 2 FOR UPDATE;

-- name: revive
UPDATE postbus.deliveries
   SET state = 0, tried = NULL, route = $1, due_at = postbus.at($2), ready_at = postbus.at($3), updated_at = postbus.at($4),
       epoch = $5, attempt = 0, retry_count = 0, claimed_at = NULL, errors = NULL, died_at = NULL,
       last_retry_at = postbus.at($6)
 WHERE event_id = $7 AND subscription = $8 AND state = 2;

-- name: drop_delivery
DELETE FROM postbus.deliveries WHERE event_id = $1 AND subscription = $2;

-- name: some_deliveries
SELECT event_id, attempt, epoch, worker_id FROM postbus.deliveries
 WHERE subscription = $1 AND event_id > $2 ORDER BY event_id LIMIT $3 FOR UPDATE;

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

-- name: count_events
SELECT count(*) FROM postbus.events;

-- name: depth
SELECT subscription, state, coalesce(due_at <= postbus.at($1), false)::integer AS now, count(*), postbus.micros(min(due_at))
  FROM postbus.deliveries GROUP BY 1, 2, 3;

-- name: depth_by_route
SELECT route, count(*) FROM postbus.deliveries WHERE state = 0 GROUP BY route;

-- name: count_completed
SELECT subscription, status, count(*) FROM postbus.event_log
 WHERE status IN ('COMPLETED', 'COMPLETED_WITH_ERRORS') GROUP BY 1, 2;

-- name: recent_actions
-- Goes back from the newest row to the first that is too old: a rate must not read the whole log.
SELECT action, count(*) FROM postbus.event_log
 WHERE id > coalesce((SELECT id FROM postbus.event_log WHERE created_at <= postbus.at($1) ORDER BY id DESC LIMIT 1), 0)
 GROUP BY 1;

-- name: recent_events
SELECT count(*) FROM postbus.events
 WHERE id > coalesce((SELECT id FROM postbus.events WHERE created_at <= postbus.at($1) ORDER BY id DESC LIMIT 1), 0);

-- name: store_bytes
SELECT sum(pg_total_relation_size(c.oid))::bigint FROM pg_class AS c
 WHERE c.relnamespace = 'postbus'::regnamespace AND c.relkind IN ('r', 'p');

-- name: now
SELECT postbus.micros(postbus.now());

-- name: try_shut_out
-- Tried, never waited for: a waiting exclusive lock would have every publisher queue up behind it.
SELECT pg_try_advisory_xact_lock(postbus.namespace('subscriptions') << 48);

-- name: notify
SELECT pg_notify('postbus', '');

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

-- name: lost_routes
SELECT count(*) FROM postbus.deliveries AS d WHERE NOT EXISTS (SELECT 1 FROM postbus.routes AS r WHERE r.id = d.route);

-- name: known_uids
SELECT uid FROM postbus.dedup WHERE uid = ANY (ARRAY(SELECT json_array_elements_text($1::json)));

-- name: set_log_id
UPDATE postbus.meta SET value = $1 WHERE key = 'log_id';

-- name: jump
-- Ids go on from the next multiple of a thousand million, epochs 2^32 on: above whatever was given between the backup and
-- its restoring. Routes lose the transaction that wrote them: in another cluster that number means nothing.
WITH settled AS (UPDATE postbus.routes SET xid = 0 WHERE xid > 0)
SELECT setval('postbus.epochs', coalesce(pg_sequence_last_value('postbus.epochs'), 0) + (1::bigint << 22)) << 10,
       setval('postbus.events_id_seq', ((greatest(coalesce(pg_sequence_last_value('postbus.events_id_seq'), 0),
           (SELECT max(id) FROM postbus.events)) / 1000000000) + 1) * 1000000000),
       setval('postbus.event_log_id_seq', ((greatest(coalesce(pg_sequence_last_value('postbus.event_log_id_seq'), 0),
           (SELECT max(id) FROM postbus.event_log)) / 1000000000) + 1) * 1000000000);

-- name: leased_before
SELECT event_id, subscription FROM postbus.deliveries WHERE tried = 1 AND epoch < $1 ORDER BY event_id LIMIT $2 FOR UPDATE;

-- name: meta
SELECT value FROM postbus.meta WHERE key = $1;

-- name: head_events
SELECT postbus.head('events');

-- name: head_audit
SELECT postbus.head('event_log');

-- name: last_events
SELECT max(id) FROM postbus.events WHERE id <= $1;

-- name: last_audit
SELECT max(id) FROM postbus.event_log WHERE id <= $1;

-- name: ahead_events
SELECT max(id) FROM (SELECT id FROM postbus.events WHERE id > $1 AND id <= $2 ORDER BY id LIMIT $3) AS step;

-- name: ahead_audit
SELECT max(id) FROM (SELECT id FROM postbus.event_log WHERE id > $1 AND id <= $2 ORDER BY id LIMIT $3) AS step;

-- name: when_events
SELECT id, postbus.micros(created_at) FROM postbus.events WHERE id > $1 ORDER BY id LIMIT 1;

-- name: when_audit
SELECT id, postbus.micros(created_at) FROM postbus.event_log WHERE id > $1 ORDER BY id LIMIT 1;

-- name: activity_events
SELECT postbus.micros(created_at) / $3::bigint, NULL, NULL, count(*) FROM postbus.events WHERE id > $1 AND id <= $2 GROUP BY 1;

-- name: activity_audit
SELECT postbus.micros(created_at) / $3::bigint, action, status, count(*) FROM postbus.event_log
 WHERE id > $1 AND id <= $2 GROUP BY 1, 2, 3;

-- name: since_events
SELECT min(id) FROM postbus.events WHERE id > $1 AND id <= $2 AND created_at >= postbus.at($3);

-- name: since_audit
SELECT min(id) FROM postbus.event_log WHERE id > $1 AND id <= $2 AND created_at >= postbus.at($3);

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

-- name: add_part
INSERT INTO postbus.parts (query, batch, created_at) VALUES ($1, $2, postbus.at($3)) RETURNING part;

-- name: part
SELECT part FROM postbus.parts WHERE part = $1;

-- name: parts_of
SELECT part FROM postbus.parts WHERE query = $1 AND batch = $2;

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

-- name: divert
-- A delivery that is being worked on, for an event that has neither one nor an end in this subscription since it was made.
INSERT INTO postbus.deliveries (event_id, subscription, route, state, tried, due_at, ready_at, created_at, updated_at,
                                epoch, attempt, max_retries, claimed_at, worker_id)
SELECT $1, $2, $3, 1, 1, postbus.at($4), postbus.at($4), postbus.at($5), postbus.at($4), $6, 1, $7::integer, postbus.at($4),
       $8
 WHERE coalesce((SELECT l.action FROM postbus.event_log AS l
                  WHERE l.event_id = $1 AND l.subscription = $2 AND l.created_at >= postbus.at($9)
                  ORDER BY l.id DESC LIMIT 1), 'DISCARDED') = 'DISCARDED'
ON CONFLICT (event_id, subscription) DO NOTHING
RETURNING event_id, epoch;

-- name: uid_since
SELECT postbus.micros(created_at) FROM postbus.dedup WHERE uid = $1;

-- name: behind
-- Followers that have not come to a position of a stream; an ordered subscription without a checkpoint is at the beginning.
SELECT s.name, coalesce(c.position, 0)
  FROM postbus.subscriptions AS s LEFT JOIN postbus.checkpoints AS c ON c.subscription = s.name
 WHERE coalesce(c.stream, CASE s.mode WHEN 'ordered' THEN 'events' END) = $1 AND coalesce(c.position, 0) < $2
 ORDER BY s.name COLLATE "C";

-- name: hold_beside
-- One who prunes or erases at a time; whoever makes a subscription waits for the end of that one transaction, and finds what
-- is left, or is found by the next one's look at who is behind.
SELECT pg_advisory_xact_lock(postbus.namespace('subscriptions') << 48 | 1);

-- name: keep_subscriptions
SELECT pg_advisory_xact_lock_shared(postbus.namespace('subscriptions') << 48);

-- name: await_beside
SELECT pg_advisory_xact_lock_shared(postbus.namespace('subscriptions') << 48 | 1);

-- name: chunk_events
-- Where the next rows of a range end, and how many they are: off the primary key.
SELECT max(id), count(*) FROM (SELECT id FROM postbus.events WHERE id > $1 AND id <= $2 ORDER BY id LIMIT $3) AS step;

-- name: chunk_audit
SELECT max(id), count(*) FROM (SELECT id FROM postbus.event_log WHERE id > $1 AND id <= $2 ORDER BY id LIMIT $3) AS step;

-- name: raise_pruned
UPDATE postbus.meta SET value = greatest(value::bigint, $1::bigint)::text WHERE key = $2;

-- name: prune_events
-- What is unfinished or dead anywhere keeps its event. A subquery of one value is not made into a join: it stays a look-up
-- in the key of deliveries, however few or many of them the plan was made for.
DELETE FROM postbus.events AS e
 WHERE e.id > $1 AND e.id <= $2
   AND (SELECT 1 FROM postbus.deliveries AS d WHERE d.event_id = e.id LIMIT 1) IS NULL;

-- name: prune_audit
DELETE FROM postbus.event_log AS l
 WHERE l.id > $1 AND l.id <= $2
   AND (SELECT 1 FROM postbus.deliveries AS d WHERE d.event_id = l.event_id LIMIT 1) IS NULL;

-- name: prunable_events
SELECT count(*) FROM postbus.events AS e
 WHERE e.id <= $1 AND (SELECT 1 FROM postbus.deliveries AS d WHERE d.event_id = e.id LIMIT 1) IS NULL;

-- name: prunable_audit
SELECT count(*) FROM postbus.event_log AS l
 WHERE l.id <= $1 AND (SELECT 1 FROM postbus.deliveries AS d WHERE d.event_id = l.event_id LIMIT 1) IS NULL;

-- name: bearing
-- No index holds uids or keys of the log: a range of it is read.
SELECT id FROM postbus.events WHERE id > $1 AND id <= $2 AND (uid = $3::text OR key = $4::text) ORDER BY id;

-- name: deliveries_of_all
SELECT d.event_id, d.subscription, d.attempt, d.epoch
  FROM (SELECT w.id FROM unnest(translate($1, '[]', '{}')::bigint[]) AS w (id) ORDER BY w.id) AS wanted
 CROSS JOIN LATERAL (SELECT v.event_id, v.subscription, v.attempt, v.epoch FROM postbus.deliveries AS v
                      WHERE v.event_id = wanted.id ORDER BY v.subscription FOR UPDATE) AS d;

-- name: identities
SELECT e.id, e.uid, e.type, e.tags
  FROM unnest(translate($1, '[]', '{}')::bigint[]) AS wanted (id)
 CROSS JOIN LATERAL (SELECT v.id, v.uid, v.type, v.tags FROM postbus.events AS v WHERE v.id = wanted.id OFFSET 0) AS e;

-- name: erased_before
SELECT DISTINCT l.event_id
  FROM unnest(translate($1, '[]', '{}')::bigint[]) AS wanted (id)
 CROSS JOIN LATERAL (SELECT v.event_id FROM postbus.event_log AS v
                      WHERE v.event_id = wanted.id AND v.action = 'ERASED' OFFSET 0) AS l;

-- name: blank_event
-- The checksum is for SQLite, which keeps none of its own.
UPDATE postbus.events SET payload = 'null', title = NULL, description = NULL, metadata = '{}'
 WHERE id = $2 AND $1::bigint IS NOT NULL
   AND (payload::text <> 'null' OR title IS NOT NULL OR description IS NOT NULL OR metadata::text <> '{}')
RETURNING id;

-- name: blank_log
-- What failed may have quoted what it was given.
UPDATE postbus.event_log SET error_message = NULL, errors = NULL
 WHERE event_id = $1 AND (error_message IS NOT NULL OR errors IS NOT NULL)
RETURNING event_id;

-- name: erasable_events
SELECT count(*)
  FROM unnest(translate($1, '[]', '{}')::bigint[]) AS wanted (id)
 CROSS JOIN LATERAL (SELECT 1 FROM postbus.events AS v
                      WHERE v.id = wanted.id AND (v.payload::text <> 'null' OR v.title IS NOT NULL
                            OR v.description IS NOT NULL OR v.metadata::text <> '{}') OFFSET 0) AS e;

-- name: erasable_log
SELECT count(*)
  FROM unnest(translate($1, '[]', '{}')::bigint[]) AS wanted (id)
 CROSS JOIN LATERAL (SELECT 1 FROM postbus.event_log AS v
                      WHERE v.event_id = wanted.id AND (v.error_message IS NOT NULL OR v.errors IS NOT NULL) OFFSET 0) AS l;

-- name: ways_of
-- What decides an event's way, and nothing that may be large.
SELECT id, type, tags, priority, max_retries, postbus.micros(created_at) FROM postbus.events WHERE id = $1;

-- name: redeliver
-- As if it were new; not for one that is on its way there, or dead.
INSERT INTO postbus.deliveries (event_id, subscription, route, due_at, ready_at, created_at, updated_at, max_retries)
VALUES ($1, $2, $3, postbus.at($4), postbus.at($4), postbus.at($5), postbus.at($4), $6::integer)
    ON CONFLICT DO NOTHING RETURNING event_id;

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

-- name: bury_followed
INSERT INTO postbus.deliveries (event_id, subscription, route, state, tried, due_at, ready_at, created_at, updated_at,
                                epoch, attempt, retry_count, max_retries, claimed_at, worker_id, errors, died_at)
VALUES ($1, $2, $3, 2, 2, NULL, postbus.at($4), postbus.at($4), postbus.at($5), $6, $7, $7 - 1, $8, postbus.at($5), $9,
        $10, postbus.at($5))
ON CONFLICT (event_id, subscription) DO NOTHING;

-- name: park
INSERT INTO postbus.deliveries (event_id, subscription, route, state, tried, due_at, ready_at, created_at, updated_at,
                                max_retries)
VALUES ($1, $2, $3, 3, 3, NULL, postbus.at($4), postbus.at($4), postbus.at($5), $6)
ON CONFLICT (event_id, subscription) DO NOTHING;

-- name: unpark
UPDATE postbus.deliveries
   SET state = 0, tried = 0, due_at = postbus.at($1), ready_at = postbus.at($1), updated_at = postbus.at($1), epoch = $2
 WHERE event_id = $3 AND subscription = $4 AND state = 3
RETURNING event_id;

-- name: standing
-- What of an ordered subscription is not done: dead and parked by their state, the rest by the routes they are filed under.
SELECT d.event_id, e.key, d.state
  FROM (SELECT event_id, state FROM postbus.deliveries WHERE tried IN (2, 3) AND subscription = $1
        UNION ALL
        SELECT v.event_id, v.state FROM postbus.deliveries AS v
         WHERE v.due_at IS NOT NULL AND v.route IN (SELECT id FROM postbus.routes WHERE subscription = $1)) AS d
  JOIN postbus.events AS e ON e.id = d.event_id
 ORDER BY d.event_id;

-- name: kinds_between
SELECT type, tags, count(*) FROM postbus.events WHERE id > $1 AND id <= $2 GROUP BY type, tags;

-- name: add_token
INSERT INTO postbus.tokens (id, name, digest, scopes, created_at, expires_at)
VALUES ($1, $2, $3, $4, postbus.at($5), postbus.at($6));

-- name: tokens
SELECT id, name, digest, scopes, postbus.micros(created_at), postbus.micros(expires_at), postbus.micros(revoked_at)
  FROM postbus.tokens ORDER BY created_at, id;

-- name: revoke_token
UPDATE postbus.tokens SET revoked_at = coalesce(revoked_at, postbus.at($1)) WHERE id = $2;

-- name: blank_stopped
-- What a follower said when it stopped may quote the event before which it did.
UPDATE postbus.checkpoints SET stopped = 'erased' WHERE stopped_before = $1;
