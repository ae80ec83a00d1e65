-- What is true under READ COMMITTED on a primary is asked for, not taken for granted; and so is what readers went by.

-- The event that a reader is about to have handled, told beforehand once an earlier one has ended without a word: only what
-- was being tried can have been the end of whoever tried it.
ALTER TABLE postbus.checkpoints ADD COLUMN trying bigint;

-- Locks are looked up when the statement runs, whatever this says of it; but a query is put into its caller's plan, instead
-- of being planned anew at each call, only if it is not called volatile.
ALTER FUNCTION postbus.pins(text) STABLE;

-- A standby shows no pins, and a sequence that is ahead of what was committed: there, nobody can tell how far to read.
CREATE OR REPLACE FUNCTION postbus.head(stream text) RETURNS bigint
    LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    upper bigint;
    pinned bigint;
BEGIN
    IF pg_is_in_recovery() THEN
        RAISE EXCEPTION 'this is a standby, which does not show how far the log may be read' USING ERRCODE = 'PB003';
    END IF;
    upper := coalesce(pg_sequence_last_value(format('postbus.%s_id_seq', stream)::regclass), 0);
    SELECT min(p.floor) INTO pinned FROM postbus.pins(stream) AS p;
    RETURN least(upper, coalesce(pinned, upper));
END $$;

-- With one snapshot for both statements, the second would miss what was committed below the head before it was looked up.
-- `pruned` is as of the same moment as the rows: whoever has seen less than that has missed something.
DROP FUNCTION postbus.read_on(bigint, bigint);
CREATE FUNCTION postbus.read_on(seen bigint, most bigint)
    RETURNS TABLE (id bigint, uid text, type text, tags text, key text, title text, description text, payload text,
                   metadata text, created_at bigint, priority smallint, max_retries integer, pruned bigint)
    LANGUAGE plpgsql VOLATILE AS $$
DECLARE
    upper bigint := postbus.head('events');
BEGIN
    IF current_setting('transaction_isolation') IN ('repeatable read', 'serializable') THEN
        RAISE EXCEPTION 'the log is followed under READ COMMITTED only' USING ERRCODE = 'PB003';
    END IF;
    RETURN QUERY SELECT e.id, e.uid, e.type, e.tags, e.key, e.title, e.description, e.payload::text, e.metadata::text,
                        postbus.micros(e.created_at), e.priority, e.max_retries,
                        (SELECT m.value::bigint FROM postbus.meta AS m WHERE m.key = 'pruned_through')
                   FROM postbus.events AS e WHERE e.id > seen AND e.id <= upper ORDER BY e.id LIMIT most;
END $$;

-- Who publishes sees the subscriptions as they were at his snapshot. Under REPEATABLE READ and SERIALIZABLE that may be
-- older than the lock that keeps them as they are, and a subscription made meanwhile would never get the event: then the
-- transaction has to be tried again (40001), as those levels ask for anyway. The row's lock goes with the subtransaction.
CREATE FUNCTION postbus.refuse_stale() RETURNS void
    LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    PERFORM 1 FROM postbus.meta WHERE key = 'catalog' FOR SHARE;
    RAISE EXCEPTION USING ERRCODE = 'PB000';
EXCEPTION WHEN SQLSTATE 'PB000' THEN
    NULL;
END $$;

CREATE OR REPLACE FUNCTION postbus.reserve(wanted integer) RETURNS bigint[]
    LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    PERFORM postbus.pin('events');
    PERFORM pg_advisory_xact_lock_shared(postbus.namespace('subscriptions') << 48);
    IF current_setting('transaction_isolation') <> 'read committed' THEN
        PERFORM postbus.refuse_stale();
    END IF;
    RETURN ARRAY(SELECT nextval('postbus.events_id_seq') FROM generate_series(1, wanted));
END $$;

-- As it was, but for uids that grow too old in the midst of it: one that was there, and is forgotten by the next statement,
-- stands for nothing any more, and has to be brought again.
CREATE OR REPLACE FUNCTION postbus.sift(uids text[], ids bigint[], digests text[]) RETURNS bigint[]
    LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    other record;
    found_ids bigint[];
BEGIN
    LOOP
        INSERT INTO postbus.dedup (uid, event_id, digest, created_at)
        SELECT DISTINCT ON (g.uid COLLATE "C") g.uid, g.id, g.digest, postbus.now()
          FROM unnest(uids, ids, digests) AS g (uid, id, digest)
         WHERE g.uid IS NOT NULL ORDER BY g.uid COLLATE "C", g.id
            ON CONFLICT DO NOTHING;
        SELECT g.uid, d.event_id INTO other FROM unnest(uids, digests) AS g (uid, digest)
         CROSS JOIN LATERAL (SELECT k.event_id, k.digest FROM postbus.dedup AS k WHERE k.uid = g.uid OFFSET 0) AS d
         WHERE d.digest <> g.digest LIMIT 1;
        IF FOUND THEN
            RAISE EXCEPTION 'uid % already stands for event %, which has another body', quote_literal(other.uid),
                other.event_id USING ERRCODE = 'PB001';
        END IF;
        found_ids := ARRAY(SELECT CASE WHEN g.uid IS NULL THEN g.id
                                       ELSE (SELECT k.event_id FROM postbus.dedup AS k WHERE k.uid = g.uid) END
                             FROM unnest(uids, ids) WITH ORDINALITY AS g (uid, id, n) ORDER BY g.n);
        EXIT WHEN array_position(found_ids, NULL) IS NULL;
    END LOOP;
    RETURN found_ids;
END $$;

CREATE OR REPLACE FUNCTION postbus.append_one(
    identity text, kind text, labels text, place text, heading text, about text, body text, extra text, rank bigint,
    retries bigint, OUT event_id bigint, OUT stored_at bigint
) LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    moment timestamptz;
BEGIN
    PERFORM pg_advisory_xact_lock_shared(postbus.namespace('subscriptions') << 48);
    IF current_setting('transaction_isolation') <> 'read committed' THEN
        PERFORM postbus.refuse_stale();
    END IF;
    moment := postbus.now();
    INSERT INTO postbus.events (uid, type, tags, key, title, description, payload, metadata, created_at, priority,
                                max_retries)
    VALUES (identity, kind, labels, place, heading, about, body::json, extra::json, moment, rank, retries)
    RETURNING id INTO event_id;
    PERFORM postbus.deliver_alike(ARRAY[event_id], kind, labels, rank::integer, retries::integer, moment);
    stored_at := postbus.micros(moment);
END $$;
