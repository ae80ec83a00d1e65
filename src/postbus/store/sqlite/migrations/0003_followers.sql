-- Who reads an ordered subscription: the process (`holder`, a nonce; `worker_id`, for people) that drew the row's epoch
-- last, until when it does so unless it says otherwise, and whether it holds the lock of that name as well, so that the
-- lock's being free tells that it is gone. `crashes`: how many readers ended without a word since the position moved.
-- `stopped`: why the last reader stopped for good, if it did and nobody has got further since; `stopped_before`: at which
-- event, if it was one.
ALTER TABLE checkpoints ADD COLUMN holder TEXT;
ALTER TABLE checkpoints ADD COLUMN worker_id TEXT;
ALTER TABLE checkpoints ADD COLUMN locked INTEGER NOT NULL DEFAULT 0;
ALTER TABLE checkpoints ADD COLUMN held_until INTEGER;
ALTER TABLE checkpoints ADD COLUMN crashes INTEGER NOT NULL DEFAULT 0;
ALTER TABLE checkpoints ADD COLUMN stopped TEXT;
ALTER TABLE checkpoints ADD COLUMN stopped_before INTEGER;
