-- The event that a reader is about to have handled, told beforehand once an earlier one has ended without a word: only what
-- was being tried can have been the end of whoever tried it.
ALTER TABLE checkpoints ADD COLUMN trying INTEGER;
