-- What is done for one event at a time, in one round trip and with as little around it as can be.

-- The events after one that was seen, as far as readers may go: the head is looked up first, by a statement of its own, so
-- that the second sees whatever was committed below it (see postbus.head).
CREATE FUNCTION postbus.read_on(seen bigint, most bigint)
    RETURNS TABLE (id bigint, uid text, type text, tags text, key text, title text, description text, payload text,
                   metadata text, created_at bigint, priority smallint, max_retries integer)
    LANGUAGE plpgsql VOLATILE AS $$
DECLARE
    upper bigint := postbus.head('events');
BEGIN
    RETURN QUERY SELECT e.id, e.uid, e.type, e.tags, e.key, e.title, e.description, e.payload::text, e.metadata::text,
                        postbus.micros(e.created_at), e.priority, e.max_retries
                   FROM postbus.events AS e WHERE e.id > seen AND e.id <= upper ORDER BY e.id LIMIT most;
END $$;

-- Append one validated event whose uid needs no look and that is due now. The trigger of `events` pins before the id is drawn.
CREATE FUNCTION postbus.append_one(
    identity text, kind text, labels text, place text, heading text, about text, body text, extra text, rank bigint,
    retries bigint, OUT event_id bigint, OUT stored_at bigint
) LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    moment timestamptz;
BEGIN
    PERFORM pg_advisory_xact_lock_shared(postbus.namespace('subscriptions') << 48);
    moment := postbus.now();
    INSERT INTO postbus.events (uid, type, tags, key, title, description, payload, metadata, created_at, priority,
                                max_retries)
    VALUES (identity, kind, labels, place, heading, about, body::json, extra::json, moment, rank, retries)
    RETURNING id INTO event_id;
    PERFORM postbus.deliver_alike(ARRAY[event_id], kind, labels, rank::integer, retries::integer, moment);
    stored_at := postbus.micros(moment);
END $$;
