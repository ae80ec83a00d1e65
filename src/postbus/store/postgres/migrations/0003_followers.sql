-- Who reads an ordered subscription: the process (`holder`, a nonce; `worker_id`, for people) that drew the row's epoch
-- last, until when it does so unless it says otherwise, and whether it holds the lock of that name as well, so that the
-- lock's being free tells that it is gone. `crashes`: how many readers ended without a word since the position moved.
-- `stopped`: why the last reader stopped for good, if it did and nobody has got further since; `stopped_before`: at which
-- event, if it was one.
ALTER TABLE postbus.checkpoints
    ADD COLUMN holder text,
    ADD COLUMN worker_id text,
    ADD COLUMN locked boolean NOT NULL DEFAULT false,
    ADD COLUMN held_until timestamptz,
    ADD COLUMN crashes integer NOT NULL DEFAULT 0,
    ADD COLUMN stopped text,
    ADD COLUMN stopped_before bigint;

-- Move a checkpoint if its reader's epoch still stands; return whether it does. The server may crash before this is on
-- disk: then events are handled again that were handled, which a checkpoint on its own cannot rule out anyway. Whatever
-- rests on it, such as a prune, commits synchronously, and takes it along.
CREATE FUNCTION postbus.move_lightly(name text, reader bigint, place bigint) RETURNS boolean
    LANGUAGE plpgsql VOLATILE AS $$
BEGIN
    PERFORM set_config('synchronous_commit', 'off', true);
    UPDATE postbus.checkpoints
       SET position = place, moved_at = postbus.now(), crashes = 0, stopped = NULL, stopped_before = NULL
     WHERE subscription = name AND epoch = reader AND position <= place;
    RETURN FOUND;
END $$;
