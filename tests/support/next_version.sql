-- The step to the next version of the schema, whose CREATE TABLE has the column: it is filled from the rows that are there.
ALTER TABLE invocation_counts ADD COLUMN IF NOT EXISTS total_tokens bigint NOT NULL DEFAULT 0;
UPDATE invocation_counts SET total_tokens = input_tokens + output_tokens;
