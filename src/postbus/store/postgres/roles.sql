-- Three group roles with what each needs and nothing else. Run by the owner of the schema, after every migration; doing
-- it again changes nothing. Roles belong to the whole server: give them to login roles of your own, as in
--     CREATE ROLE shop_web LOGIN IN ROLE postbus_publisher;

DO $$
DECLARE
    name text;
BEGIN
    FOREACH name IN ARRAY ARRAY['postbus_reader', 'postbus_publisher', 'postbus_worker'] LOOP
        IF NOT EXISTS (SELECT 1 FROM pg_roles WHERE rolname = name) THEN
            EXECUTE format('CREATE ROLE %I NOLOGIN', name);
        END IF;
    END LOOP;
    -- A worker looks and publishes as well.
    FOREACH name IN ARRAY ARRAY['postbus_reader', 'postbus_publisher'] LOOP
        IF NOT pg_has_role('postbus_worker', name, 'MEMBER') THEN
            EXECUTE format('GRANT %I TO postbus_worker', name);
        END IF;
    END LOOP;
END $$;

-- Begin with nothing, so that what an older version granted does not stay. Others see only the end of this transaction.
REVOKE ALL ON SCHEMA postbus FROM PUBLIC, postbus_reader, postbus_publisher, postbus_worker;
REVOKE ALL ON ALL TABLES IN SCHEMA postbus FROM PUBLIC, postbus_reader, postbus_publisher, postbus_worker;
REVOKE ALL ON ALL SEQUENCES IN SCHEMA postbus FROM PUBLIC, postbus_reader, postbus_publisher, postbus_worker;
REVOKE ALL ON ALL ROUTINES IN SCHEMA postbus FROM PUBLIC, postbus_reader, postbus_publisher, postbus_worker;

-- ── reader: looks at everything, changes nothing ────────────────────────────────────────────────────────────────
GRANT USAGE ON SCHEMA postbus TO postbus_reader;
GRANT SELECT ON ALL TABLES IN SCHEMA postbus TO postbus_reader;
REVOKE SELECT ON postbus.tokens FROM postbus_reader; -- who looks at events need not know who may use the API
GRANT SELECT ON SEQUENCE postbus.events_id_seq, postbus.event_log_id_seq TO postbus_reader;
GRANT EXECUTE ON FUNCTION postbus.now, postbus.at, postbus.micros, postbus.namespace, postbus.pins, postbus.head,
    postbus.require_read_committed, postbus.read_on, postbus.matches, postbus.wants, postbus.covers, postbus.sorted,
    postbus.kind, postbus.entry, postbus.ids_of, postbus.event_at, postbus.size_of, postbus.is_done TO postbus_reader;

-- ── publisher: appends; reads what opening the bus and answering for a uid used before need ─────────────────────
-- The functions run with their owner's rights.
GRANT USAGE ON SCHEMA postbus TO postbus_publisher;
GRANT SELECT ON postbus.meta, postbus.subscriptions, postbus.former_subscriptions, postbus.events, postbus.cursors, postbus.gaps, postbus.blocks, postbus.leases,
    postbus.deliveries, postbus.skips, postbus.event_log, postbus.dedup TO postbus_publisher;
GRANT SELECT ON SEQUENCE postbus.events_id_seq TO postbus_publisher;
GRANT EXECUTE ON FUNCTION postbus.now, postbus.at, postbus.micros, postbus.namespace, postbus.pin, postbus.head,
    postbus.sorted, postbus.digest, postbus.sift, postbus.append, postbus.publish, postbus.ids_of TO postbus_publisher;

-- ── worker: moves deliveries, and writes what happened; the log itself it can only add to ───────────────────────
GRANT INSERT, UPDATE, DELETE ON postbus.cursors, postbus.gaps, postbus.blocks, postbus.deliveries, postbus.skips,
    postbus.kinds, postbus.handlers, postbus.breakers TO postbus_worker;
GRANT UPDATE ON postbus.leases TO postbus_worker; -- it locks blocks
GRANT INSERT ON postbus.event_log TO postbus_worker;
GRANT INSERT, UPDATE ON postbus.subscriptions, postbus.checkpoints TO postbus_worker; -- @bus.on makes and widens them; deleting is the owner's
GRANT DELETE ON postbus.dedup TO postbus_worker; -- uids past their window
GRANT INSERT, DELETE ON postbus.parts, postbus.staged, postbus.sunk TO postbus_worker; -- a Spark job publishes
GRANT USAGE ON SEQUENCE postbus.numbers, postbus.event_log_id_seq TO postbus_worker;
-- No function does more than this role may, but two: bump moves the counter that has others read the subscriptions anew,
-- and hold_pruned locks a row of meta against being changed.
GRANT EXECUTE ON ALL ROUTINES IN SCHEMA postbus TO postbus_worker;
