-- The whole schema of trader (PostgreSQL 15 or later). Applying it again changes nothing. A change to an existing table
-- needs a new version and a migration step in trader/database/schema.py.
-- Amounts are in the run's quote currency, quantities in base units, times in UTC.
-- Invariants that one row or one index can express are constraints here; `trader audit` checks the sums.

-- `backup` is the backup file that the upgrade to this version made beforehand.
CREATE TABLE IF NOT EXISTS schema_version (
    only_row   boolean PRIMARY KEY DEFAULT true CHECK (only_row),
    version    integer NOT NULL,
    applied_at timestamptz NOT NULL DEFAULT now(),
    backup     text
);
INSERT INTO schema_version (version) VALUES (1) ON CONFLICT DO NOTHING;

-- The variants of the program, in the order of their definitions; every start of the service adds missing ones.
CREATE TABLE IF NOT EXISTS variants (
    id    text PRIMARY KEY,
    place smallint NOT NULL CHECK (place >= 1)
);

-- An exact number: NaN and Infinity would pass every CHECK (x > 0).
DO $$ BEGIN
    CREATE DOMAIN amount AS numeric CHECK (VALUE NOT IN ('NaN', 'Infinity', '-Infinity'));
EXCEPTION WHEN duplicate_object THEN NULL; END $$;

-- Whose books this database holds: a database never mixes rows of two markets, trading modes, venues or venue accounts
-- (the last two are null on paper). Every account has processed every tick up to processed_until. Ticks are numbered in the
-- order in which the leaders applied them, since clocks may go back: processed_tick is the number of that tick. applied_spans
-- has the starts and ends of the spans of dates under which ticks were applied, and origin_at the date of the clock's origin
-- (of the machine's boot) by the clock of that tick: another date of the same origin tells how far the clock was set since.
-- processed_at is the date of that tick by this server's clock, which tells the same of a leader on another machine.
-- One of several processes leads; each new leader begins a term, and records here which of its schedulers are running, and
-- the names of the AI providers that it has keys or an address for.
CREATE TABLE IF NOT EXISTS service_state (
    only_row        boolean PRIMARY KEY DEFAULT true CHECK (only_row),
    market_identity text NOT NULL,
    trading_mode    text NOT NULL CHECK (trading_mode IN ('simulated', 'live')),
    processed_tick  bigint NOT NULL DEFAULT 0,
    processed_until timestamptz,
    applied_spans   timestamptz[] NOT NULL DEFAULT '{}',
    origin          text,
    origin_at       timestamptz,
    processed_at    timestamptz,
    lived_until     timestamptz,
    term            bigint NOT NULL DEFAULT 0,
    schedulers      jsonb,
    key_names       text[],
    heartbeat_at    timestamptz,
    venue_url           text,
    venue_account_index text CHECK (venue_account_index ~ '^([0-9]{1,15}|0x[0-9a-f]{40})$'),
    CONSTRAINT live_has_a_venue CHECK ((trading_mode = 'live') = (venue_url IS NOT NULL)),
    CONSTRAINT live_has_an_account CHECK ((trading_mode = 'live') = (venue_account_index IS NOT NULL))
);

-- The seed that the service drew for this database; a simulated market draws everything unknown from it. Without a row,
-- SIM_SEED gives the seed, which is public.
CREATE TABLE IF NOT EXISTS market_seed (
    only_row boolean PRIMARY KEY DEFAULT true CHECK (only_row),
    seed     text NOT NULL CHECK (seed ~ '^[0-9]{1,39}$'),
    drawn_at timestamptz NOT NULL DEFAULT now()
);

-- The last mark price of each market, used to value accounts until the source sends the next one.
CREATE TABLE IF NOT EXISTS last_marks (
    symbol    text PRIMARY KEY,
    mark      amount  NOT NULL CHECK (mark > 0),
    marked_at timestamptz NOT NULL
);

-- What the leader saw and published, one record a second in a ring of 128, for its followers: prices, and the steps of its
-- models. `number` continues across leaders; `written_at` is real time. `record` is JSON.
CREATE TABLE IF NOT EXISTS relay (
    slot       integer PRIMARY KEY CHECK (slot BETWEEN 0 AND 127),
    number     bigint NOT NULL CHECK (number % 128 = slot),
    written_at timestamptz NOT NULL,
    record     text NOT NULL
) WITH (fillfactor = 50);

CREATE TABLE IF NOT EXISTS models (
    id                text PRIMARY KEY CHECK (id ~ '^[A-Za-z0-9._:-]{1,64}$'),
    name              text NOT NULL CHECK (name <> ''),
    variant           text NOT NULL REFERENCES variants,
    provider          text NOT NULL CHECK (provider <> ''),
    router_model_name text NOT NULL CHECK (router_model_name <> ''),
    logo              text,
    active            boolean NOT NULL DEFAULT true,
    created_at        timestamptz NOT NULL,
    venue_account_index text CHECK (venue_account_index ~ '^([0-9]{1,15}|0x[0-9a-f]{40})$'),  -- null: VENUE_ACCOUNT_INDEX
    venue_key_variable text CHECK (venue_key_variable ~ '^[A-Z][A-Z0-9_]{0,40}_VENUE_API_KEY$'),  -- null: VENUE_API_KEY
    configuration     jsonb NOT NULL DEFAULT '{}' CHECK (jsonb_typeof(configuration) = 'object')
);

-- Entrants: a model with one configuration. Any change to it starts a new entrant with the next number. Number 0 is what
-- ran before entrants were recorded, with an unknown configuration. `configuration` is canonical JSON (RFC 8785), and
-- `fingerprint` its SHA-256 together with `answered_by`, the name of the model that answered (null until one has).
CREATE TABLE IF NOT EXISTS entrants (
    model_id      text NOT NULL REFERENCES models,
    number        integer NOT NULL CHECK (number >= 0),
    fingerprint   text CHECK (fingerprint ~ '^[0-9a-f]{64}$'),
    configuration text,
    answered_by   text,
    began_at      timestamptz NOT NULL,
    PRIMARY KEY (model_id, number),
    CHECK ((number = 0) = (fingerprint IS NULL)),
    CHECK ((fingerprint IS NULL) = (configuration IS NULL)),
    CHECK (fingerprint IS NOT NULL OR answered_by IS NULL)
);

-- A model's account has the model's ID. `sequence` counts its postings and locks out a second writer.
-- `liquidating`: a liquidation has begun but the books have not yet allowed it to end. `partly_liquidated_at`: when one
-- last left a part of a position on purpose. `seen_tick` and `seen_until`: the number and the time of the last tick that
-- the account had seen when it last changed.
CREATE TABLE IF NOT EXISTS accounts (
    id            text PRIMARY KEY CHECK (id ~ '^[A-Za-z0-9._:-]{1,64}$'),
    sequence      bigint NOT NULL DEFAULT 0 CHECK (sequence >= 0),
    created_at    timestamptz NOT NULL,
    changed_at    timestamptz NOT NULL,
    last_order_at timestamptz,
    liquidating   boolean NOT NULL DEFAULT false,
    partly_liquidated_at timestamptz,
    seen_tick     bigint NOT NULL DEFAULT 0 CHECK (seen_tick >= 0),
    seen_until    timestamptz
);

CREATE TABLE IF NOT EXISTS runs (
    id              uuid PRIMARY KEY,
    account_id      text NOT NULL REFERENCES accounts,
    number          integer NOT NULL CHECK (number >= 1),
    initial_capital amount  NOT NULL CHECK (initial_capital > 0),
    quote_currency  text NOT NULL,
    started_at      timestamptz NOT NULL,
    ended_at        timestamptz CHECK (ended_at >= started_at),
    UNIQUE (account_id, number),
    UNIQUE (id, account_id)
);
CREATE UNIQUE INDEX IF NOT EXISTS runs_one_current ON runs (account_id) WHERE ended_at IS NULL;

CREATE TABLE IF NOT EXISTS invocations (
    id             uuid PRIMARY KEY,
    model_id       text NOT NULL REFERENCES models,
    status         text NOT NULL CHECK (status IN ('running', 'completed', 'failed', 'timeout')),
    failure_reason text CHECK ((failure_reason IS NOT NULL) = (status IN ('failed', 'timeout'))),
    response       text,
    step_count     integer NOT NULL DEFAULT 0 CHECK (step_count >= 0),
    input_tokens   bigint NOT NULL DEFAULT 0 CHECK (input_tokens >= 0),
    output_tokens  bigint NOT NULL DEFAULT 0 CHECK (output_tokens >= 0),
    cost_usd       amount  CHECK (cost_usd >= 0),
    started_at     timestamptz NOT NULL,
    finished_at    timestamptz CHECK (finished_at >= started_at),
    failed_tool_calls integer NOT NULL DEFAULT 0 CHECK (failed_tool_calls >= 0),  -- maintained by a trigger on tool_calls
    -- provider attempts that may have used tokens without reporting them; the tokens above exclude them
    unmetered_attempts integer NOT NULL DEFAULT 0 CHECK (unmetered_attempts >= 0),
    unpriced_steps integer NOT NULL DEFAULT 0 CHECK (unpriced_steps >= 0),  -- answers of unknown cost
    entrant        integer,
    reserved_usd   amount  CHECK (reserved_usd >= 0),  -- the most that it may cost
    ended_by       text CHECK (ended_by IN ('holding', 'answer', 'steps', 'tokens', 'deadline', 'calls', 'error', 'timeout',
                                            'interruption')),
    FOREIGN KEY (model_id, entrant) REFERENCES entrants (model_id, number),
    CHECK ((finished_at IS NULL) = (status = 'running'))
);
CREATE INDEX IF NOT EXISTS invocations_by_time ON invocations (started_at DESC);
CREATE INDEX IF NOT EXISTS invocations_by_model ON invocations (model_id, started_at DESC);
CREATE INDEX IF NOT EXISTS invocations_failed ON invocations (started_at DESC)
    WHERE status IN ('failed', 'timeout') OR (status = 'completed' AND failed_tool_calls > 0);
CREATE INDEX IF NOT EXISTS invocations_failed_by_model ON invocations (model_id, started_at DESC)
    WHERE status IN ('failed', 'timeout') OR (status = 'completed' AND failed_tool_calls > 0);
CREATE INDEX IF NOT EXISTS invocations_running ON invocations (model_id) WHERE status = 'running';

-- The chain of the record, append-only: one link per invocation, written in the transaction that finishes it, and one per
-- record of results, whose text is stored here. `digest` is the SHA-256 of the previous digest (32 zero bytes for the first)
-- and `record_digest`, which is the SHA-256 of the canonical record. What an agent was shown and what its provider answered
-- are kept for a limited time; their digests stay here.
CREATE TABLE IF NOT EXISTS chain_links (
    position       bigint PRIMARY KEY CHECK (position >= 1),
    invocation_id  uuid UNIQUE,
    view_digest    bytea CHECK (length(view_digest) = 32),
    answers_digest bytea CHECK (length(answers_digest) = 32),
    record_digest  bytea NOT NULL CHECK (length(record_digest) = 32),
    digest         bytea NOT NULL CHECK (length(digest) = 32),
    kind           text NOT NULL DEFAULT 'invocation',
    record         text,
    CONSTRAINT invocation_or_record CHECK ((invocation_id IS NULL) = (record IS NOT NULL))
);
CREATE UNIQUE INDEX IF NOT EXISTS chain_links_begin ON chain_links (kind) WHERE kind = 'begin';

-- How far each account's results are in the chain: the ledger's sequence, the number of its last run, and the hour of its
-- equity. A process that appends results locks this table first, so that nothing is appended twice.
CREATE TABLE IF NOT EXISTS chain_marks (
    account_id text PRIMARY KEY,
    sequence   bigint NOT NULL CHECK (sequence >= 0),
    run_number integer NOT NULL CHECK (run_number >= 0),
    hour       timestamptz
);

-- Serializes appends: the lock ("chain" in ASCII) is held until the transaction ends, and a later statement sees what was
-- committed before it.
CREATE OR REPLACE FUNCTION append_chain_link() RETURNS trigger LANGUAGE plpgsql AS $$
DECLARE
    last record;
BEGIN
    PERFORM pg_advisory_xact_lock(x'636861696e'::bigint);
    SELECT position, digest INTO last FROM chain_links ORDER BY position DESC LIMIT 1;
    NEW.position := coalesce(last.position, 0) + 1;
    NEW.digest := sha256(coalesce(last.digest, decode(repeat('00', 32), 'hex')) || NEW.record_digest);
    RETURN NEW;
END $$;
CREATE OR REPLACE TRIGGER chain_links_appended BEFORE INSERT ON chain_links
    FOR EACH ROW EXECUTE FUNCTION append_chain_link();

-- Heads of the chain, recorded once an hour; `sent_at` is when an external sink accepted one.
CREATE TABLE IF NOT EXISTS anchors (
    position    bigint PRIMARY KEY CHECK (position >= 1),
    digest      bytea NOT NULL CHECK (length(digest) = 32),
    anchored_at timestamptz NOT NULL DEFAULT now(),
    sent_at     timestamptz
);
CREATE INDEX IF NOT EXISTS anchors_unsent ON anchors (position) WHERE sent_at IS NULL;

-- Seasons, append-only: the record that opened each one, its amendments, and the record that closed it, as canonical JSON
-- (RFC 8785). A season without a closing record is open; only one season is open at a time.
CREATE TABLE IF NOT EXISTS season_records (
    season integer NOT NULL CHECK (season >= 1),
    number integer NOT NULL CHECK (number >= 0),
    record text NOT NULL,
    digest bytea NOT NULL CHECK (digest = sha256(convert_to(record, 'UTF8'))),
    PRIMARY KEY (season, number)
);

-- The season that a moment belongs to by the rules in force; 0: none.
CREATE OR REPLACE FUNCTION season_at(moment timestamptz) RETURNS integer LANGUAGE sql STABLE AS $$
    SELECT coalesce(max(season), 0)
    FROM (
        SELECT DISTINCT ON (season) season, record::jsonb->'rules' AS rules
        FROM season_records WHERE record::jsonb ? 'rules'
        ORDER BY season, number DESC
    ) in_force
    WHERE (rules->>'start')::timestamptz <= moment AND moment < (rules->>'end')::timestamptz
$$;

-- Views that external agents have opened but not yet decided, so that a restart keeps their deadlines. `shown` is the JSON
-- of the messages; `pending` is the last order sent, whose answer may be missing from the calls; `inputs` is the JSON of what
-- each call was judged by, which goes into the payload at the end.
CREATE TABLE IF NOT EXISTS open_views (
    invocation_id uuid PRIMARY KEY REFERENCES invocations,
    deadline      timestamptz NOT NULL,
    shown         text NOT NULL,
    pending       jsonb,
    inputs        text[] NOT NULL DEFAULT '{}'
);

-- The messages and raw answers of an invocation (zlib-compressed JSON), stored apart from its record so that they can be
-- dropped by partition.
CREATE TABLE IF NOT EXISTS invocation_payloads (
    invocation_id uuid NOT NULL,
    payload       bytea NOT NULL,
    created_at    timestamptz NOT NULL,
    PRIMARY KEY (invocation_id, created_at)
) PARTITION BY RANGE (created_at);

CREATE TABLE IF NOT EXISTS invocation_steps (
    invocation_id uuid NOT NULL REFERENCES invocations,
    number        integer NOT NULL CHECK (number >= 1),
    provider      text NOT NULL,
    key_number    integer,
    model         text NOT NULL,
    tool_names    text[] NOT NULL,
    input_tokens  bigint CHECK (input_tokens >= 0),  -- null: not reported
    output_tokens bigint CHECK (output_tokens >= 0),
    cost_usd      amount  CHECK (cost_usd >= 0),
    duration_ms   integer NOT NULL CHECK (duration_ms >= 0),
    created_at    timestamptz NOT NULL,
    cached_tokens bigint CHECK (cached_tokens >= 0),  -- input tokens read from the provider's cache
    cache_write_tokens bigint CHECK (cache_write_tokens >= 0),  -- input tokens written to it
    PRIMARY KEY (invocation_id, number)
);

CREATE TABLE IF NOT EXISTS tool_calls (
    invocation_id uuid NOT NULL REFERENCES invocations,
    number        integer NOT NULL CHECK (number >= 1),
    id            uuid NOT NULL UNIQUE,
    type          text NOT NULL CHECK (type IN ('CREATE_POSITION', 'CLOSE_POSITION', 'UPDATE_EXIT_PLAN', 'HOLDING',
                                                'FETCH_INDICATORS', 'FETCH_ORDER_BOOK', 'NOTE', 'CANCEL_ORDER')),
    status        text NOT NULL CHECK (status IN ('ok', 'rejected', 'failed')),
    metadata      jsonb NOT NULL,
    created_at    timestamptz NOT NULL,
    PRIMARY KEY (invocation_id, number)
);
CREATE INDEX IF NOT EXISTS tool_calls_rejected ON tool_calls (created_at) WHERE status = 'rejected';

-- The note that each model keeps for itself: the last one it wrote.
CREATE TABLE IF NOT EXISTS notes (
    model_id   text PRIMARY KEY REFERENCES models,
    text       text NOT NULL CHECK (length(text) BETWEEN 1 AND 600),
    written_at timestamptz NOT NULL
);

CREATE OR REPLACE FUNCTION count_failed_tool_calls() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    UPDATE invocations i
    SET failed_tool_calls = i.failed_tool_calls + f.count
    FROM (SELECT invocation_id, count(*) FROM added WHERE status = 'failed' GROUP BY invocation_id) f
    WHERE i.id = f.invocation_id;
    RETURN NULL;
END $$;
CREATE OR REPLACE TRIGGER tool_calls_counted AFTER INSERT ON tool_calls
    REFERENCING NEW TABLE AS added FOR EACH STATEMENT EXECUTE FUNCTION count_failed_tool_calls();

-- How many invocations of an entrant ended within each run of its model (0: before its first) and what they cost, so
-- that no request counts a million rows. An invocation belongs to the run in which it started. `tool_failed` counts
-- completed invocations with a failed tool call, so failed + tool_failed counts each invocation once. `missed` counts due
-- cycles that started no invocation, the last one at `missed_at`. `season` is the season in which they started (0: none),
-- so that what a season shows is of the season.
CREATE TABLE IF NOT EXISTS invocation_counts (
    model_id    text NOT NULL REFERENCES models,
    run_number  integer NOT NULL,
    finished    bigint NOT NULL,
    failed      bigint NOT NULL,
    tool_failed bigint NOT NULL,
    input_tokens  bigint NOT NULL DEFAULT 0,
    output_tokens bigint NOT NULL DEFAULT 0,
    cost_usd    amount,  -- null until a provider reports a cost
    unmetered_attempts bigint NOT NULL DEFAULT 0,
    unpriced_steps bigint NOT NULL DEFAULT 0,
    entrant     integer NOT NULL DEFAULT 0,
    missed      bigint NOT NULL DEFAULT 0,
    season      integer NOT NULL DEFAULT 0,
    missed_at   timestamptz,
    PRIMARY KEY (model_id, run_number, entrant, season)
) WITH (fillfactor = 50);

CREATE OR REPLACE FUNCTION count_invocations() RETURNS trigger LANGUAGE plpgsql AS $$
DECLARE
    add_counts CONSTANT text := $count$
        INSERT INTO invocation_counts AS c (model_id, run_number, entrant, season, finished, failed, tool_failed,
                                            input_tokens, output_tokens, cost_usd, unmetered_attempts, unpriced_steps)
        SELECT i.model_id, r.number, coalesce(i.entrant, 0), season_at(i.started_at), $1 * count(*),
               $1 * count(*) FILTER (WHERE i.status IN ('failed', 'timeout')),
               $1 * count(*) FILTER (WHERE i.status = 'completed' AND i.failed_tool_calls > 0),
               $1 * sum(i.input_tokens), $1 * sum(i.output_tokens), $1 * sum(i.cost_usd),
               $1 * sum(i.unmetered_attempts), $1 * sum(i.unpriced_steps)
        FROM %I i
        CROSS JOIN LATERAL (
            SELECT coalesce(max(number), 0) AS number FROM runs
            WHERE account_id = i.model_id AND started_at <= i.started_at
        ) r
        WHERE i.status <> 'running'
        GROUP BY i.model_id, r.number, coalesce(i.entrant, 0), season_at(i.started_at)
        ORDER BY i.model_id, r.number, coalesce(i.entrant, 0), season_at(i.started_at)
        ON CONFLICT (model_id, run_number, entrant, season) DO UPDATE
        SET finished = c.finished + excluded.finished, failed = c.failed + excluded.failed,
            tool_failed = c.tool_failed + excluded.tool_failed,
            input_tokens = c.input_tokens + excluded.input_tokens,
            output_tokens = c.output_tokens + excluded.output_tokens,
            unmetered_attempts = c.unmetered_attempts + excluded.unmetered_attempts,
            unpriced_steps = c.unpriced_steps + excluded.unpriced_steps,
            cost_usd = coalesce(c.cost_usd + excluded.cost_usd, c.cost_usd, excluded.cost_usd)
    $count$;
BEGIN
    IF TG_OP = 'UPDATE' THEN
        EXECUTE format(add_counts, 'earlier') USING -1;
    END IF;
    EXECUTE format(add_counts, 'later') USING 1;
    RETURN NULL;
END $$;
CREATE OR REPLACE TRIGGER invocations_counted_new AFTER INSERT ON invocations
    REFERENCING NEW TABLE AS later FOR EACH STATEMENT EXECUTE FUNCTION count_invocations();
CREATE OR REPLACE TRIGGER invocations_counted AFTER UPDATE ON invocations
    REFERENCING OLD TABLE AS earlier NEW TABLE AS later FOR EACH STATEMENT EXECUTE FUNCTION count_invocations();

-- The single source of truth for positions: OPEN is a position, CLOSED a completed trade. A partial close moves the
-- closed part into a separate CLOSED row, whose parent_id is the position.
CREATE TABLE IF NOT EXISTS orders (
    id                 uuid PRIMARY KEY,
    parent_id          uuid REFERENCES orders,
    account_id         text NOT NULL,
    run_id             uuid NOT NULL,
    symbol             text NOT NULL,
    side               text NOT NULL CHECK (side IN ('LONG', 'SHORT')),
    status             text NOT NULL CHECK (status IN ('OPEN', 'CLOSED')),
    quantity           amount  NOT NULL CHECK (quantity > 0),
    entry_notional     amount  NOT NULL CHECK (entry_notional > 0),
    margin             amount  NOT NULL CHECK (margin > 0),
    leveraged          boolean NOT NULL,
    exit_notional      amount  CHECK (exit_notional > 0),
    gross_pnl          amount ,
    fees               amount  NOT NULL, -- negative: rebates
    liquidation_fees   amount  NOT NULL DEFAULT 0 CHECK (liquidation_fees >= 0),
    funding            amount  NOT NULL,
    net_pnl            amount ,
    insurance          amount  NOT NULL DEFAULT 0 CHECK (insurance >= 0),
    close_reason       text CHECK (close_reason IN ('order', 'limit', 'stop', 'invalidation', 'target', 'time',
                                                    'liquidation', 'reset', 'operator', 'manual', 'ended')),
    closing            text CHECK (closing IN ('stop', 'invalidation', 'target', 'time')),
    closing_at         timestamptz,
    stop               amount  CHECK (stop > 0),
    target             amount  CHECK (target > 0),
    invalidation       text,
    invalidation_price amount  CHECK (invalidation_price > 0),
    time_exit          timestamptz,
    trailing_distance  amount  CHECK (trailing_distance > 0),
    targets            text NOT NULL DEFAULT '[]' CHECK (json_array_length(targets::json) <= 3), -- price, fraction, quantity
    confidence         amount  CHECK (confidence BETWEEN 0 AND 100),
    invocation_id      uuid REFERENCES invocations,
    opened_at          timestamptz NOT NULL,
    funded_until       timestamptz NOT NULL,
    closed_at          timestamptz CHECK (closed_at >= opened_at),
    FOREIGN KEY (run_id, account_id) REFERENCES runs (id, account_id),
    CHECK ((status = 'CLOSED') = (closed_at IS NOT NULL)),
    CHECK ((status = 'CLOSED') = (exit_notional IS NOT NULL)),
    CHECK ((status = 'CLOSED') = (gross_pnl IS NOT NULL)),
    CHECK ((status = 'CLOSED') = (net_pnl IS NOT NULL)),
    CHECK ((status = 'CLOSED') = (close_reason IS NOT NULL)),
    CHECK (parent_id IS NULL OR status = 'CLOSED'),
    CHECK (closing IS NULL OR status = 'OPEN'),
    CONSTRAINT closing_at_of_a_trigger CHECK (closing_at IS NULL OR closing IS NOT NULL),
    CHECK (gross_pnl = CASE side WHEN 'LONG' THEN exit_notional - entry_notional
                                 ELSE entry_notional - exit_notional END),
    CHECK (net_pnl = gross_pnl - fees + funding)
);
CREATE UNIQUE INDEX IF NOT EXISTS orders_one_position ON orders (account_id, symbol) WHERE status = 'OPEN';
CREATE INDEX IF NOT EXISTS orders_closed_by_time ON orders (closed_at DESC) WHERE status = 'CLOSED';
CREATE INDEX IF NOT EXISTS orders_closed_by_account ON orders (account_id, closed_at DESC) WHERE status = 'CLOSED';
CREATE INDEX IF NOT EXISTS orders_by_run ON orders (run_id, status);
CREATE INDEX IF NOT EXISTS orders_by_parent ON orders (parent_id) WHERE parent_id IS NOT NULL;

-- Every placed order and its answer, including rejections. A repeated client order id gets its first answer again.
CREATE TABLE IF NOT EXISTS order_requests (
    id              uuid PRIMARY KEY,
    account_id      text NOT NULL,
    run_id          uuid NOT NULL,
    client_order_id text CHECK (length(client_order_id) BETWEEN 1 AND 128),
    answer          jsonb NOT NULL,
    created_at      timestamptz NOT NULL,
    UNIQUE (account_id, client_order_id),
    FOREIGN KEY (run_id, account_id) REFERENCES runs (id, account_id)
);

CREATE INDEX IF NOT EXISTS order_requests_manual ON order_requests (run_id) WHERE answer @> '{"manual": true}';

CREATE TABLE IF NOT EXISTS limit_orders (
    id                 uuid PRIMARY KEY REFERENCES order_requests,
    account_id         text NOT NULL,
    run_id             uuid NOT NULL,
    symbol             text NOT NULL,
    side               text NOT NULL CHECK (side IN ('buy', 'sell')),
    status             text NOT NULL CHECK (status IN ('RESTING', 'FILLED', 'CANCELLED')),
    quantity           amount  NOT NULL CHECK (quantity > 0),
    remaining          amount  NOT NULL CHECK (remaining BETWEEN 0 AND quantity),
    ahead              amount  NOT NULL DEFAULT 0 CHECK (ahead >= 0),  -- the quantity ahead of it at its price
    limit_price        amount  NOT NULL CHECK (limit_price > 0),
    leverage           amount  CHECK (leverage >= 1),
    reduce_only        boolean NOT NULL,
    stop               amount  CHECK (stop > 0),
    target             amount  CHECK (target > 0),
    invalidation       text,
    invalidation_price amount  CHECK (invalidation_price > 0),
    time_exit          timestamptz,
    trailing_distance  amount  CHECK (trailing_distance > 0),
    targets            text NOT NULL DEFAULT '[]' CHECK (json_array_length(targets::json) <= 3), -- price, fraction, quantity
    has_exit_plan      boolean NOT NULL,
    confidence         amount  CHECK (confidence BETWEEN 0 AND 100),
    invocation_id      uuid REFERENCES invocations,
    cancel_reason      text,
    sequence           bigint NOT NULL,
    created_at         timestamptz NOT NULL,
    closed_at          timestamptz CHECK (closed_at >= created_at),
    FOREIGN KEY (run_id, account_id) REFERENCES runs (id, account_id),
    CHECK ((status = 'RESTING') = (closed_at IS NULL)),
    CHECK (status <> 'RESTING' OR remaining > 0),
    CHECK (status <> 'FILLED' OR remaining = 0),
    CHECK ((status = 'CANCELLED') = (cancel_reason IS NOT NULL))
);
CREATE INDEX IF NOT EXISTS limit_orders_resting ON limit_orders (account_id, sequence) WHERE status = 'RESTING';

-- The ledger, append-only: fills, funding_payments and insurance_payments, ordered by `sequence`.
CREATE TABLE IF NOT EXISTS fills (
    account_id      text NOT NULL,
    sequence        bigint NOT NULL,
    run_id          uuid NOT NULL,
    order_id        uuid NOT NULL REFERENCES orders,
    request_id      uuid REFERENCES order_requests,
    symbol          text NOT NULL,
    side            text NOT NULL CHECK (side IN ('buy', 'sell')),
    quantity        amount  NOT NULL CHECK (quantity > 0),
    price           amount  NOT NULL CHECK (price > 0),
    fee             amount  NOT NULL,
    liquidation_fee amount  NOT NULL CHECK (liquidation_fee >= 0),
    maker           boolean NOT NULL,
    cause           text NOT NULL CHECK (cause IN ('order', 'limit', 'stop', 'invalidation', 'target', 'time',
                                                   'liquidation', 'reset', 'operator', 'manual', 'ended')),
    created_at      timestamptz NOT NULL,
    PRIMARY KEY (account_id, sequence),
    FOREIGN KEY (run_id, account_id) REFERENCES runs (id, account_id),
    CHECK (liquidation_fee = 0 OR cause = 'liquidation')
);
CREATE INDEX IF NOT EXISTS fills_by_request ON fills (request_id) WHERE request_id IS NOT NULL;
CREATE INDEX IF NOT EXISTS fills_by_run ON fills (run_id);
CREATE INDEX IF NOT EXISTS fills_by_time ON fills (account_id, created_at);

CREATE TABLE IF NOT EXISTS funding_payments (
    account_id text NOT NULL,
    sequence   bigint NOT NULL,
    run_id     uuid NOT NULL,
    order_id   uuid NOT NULL REFERENCES orders,
    symbol     text NOT NULL,
    boundary   timestamptz NOT NULL CHECK (boundary = date_trunc('hour', boundary, 'UTC')),
    quantity   amount  NOT NULL CHECK (quantity > 0),
    mark       amount  NOT NULL CHECK (mark > 0),
    rate       amount  NOT NULL,
    amount     amount  NOT NULL,
    created_at timestamptz NOT NULL,
    PRIMARY KEY (account_id, sequence),
    UNIQUE (run_id, symbol, boundary),
    FOREIGN KEY (run_id, account_id) REFERENCES runs (id, account_id)
);

CREATE TABLE IF NOT EXISTS insurance_payments (
    account_id text NOT NULL,
    sequence   bigint NOT NULL,
    run_id     uuid NOT NULL,
    order_id   uuid NOT NULL REFERENCES orders,
    amount     amount  NOT NULL CHECK (amount > 0),
    created_at timestamptz NOT NULL,
    PRIMARY KEY (account_id, sequence),
    FOREIGN KEY (run_id, account_id) REFERENCES runs (id, account_id)
);
CREATE INDEX IF NOT EXISTS insurance_payments_by_run ON insurance_payments (run_id);

-- Live trading only: the venue account of each account, which never changes, and when the two last agreed.
CREATE TABLE IF NOT EXISTS venue_accounts (
    account_id    text PRIMARY KEY REFERENCES accounts,
    account_index text NOT NULL UNIQUE CHECK (account_index ~ '^([0-9]{1,15}|0x[0-9a-f]{40})$'),
    agreed_at     timestamptz NOT NULL
);

-- Every order that may have reached the venue, written before it is sent, with the venue's reference to the transaction
-- that carries it (attempt). SENT: its outcome is unknown, and the account opens nothing else until it is known. STANDING: it rests or waits for its trigger there. DONE: it is final, and all
-- its fills are posted. REFUSED: the venue does not have it and never will.
CREATE TABLE IF NOT EXISTS venue_orders (
    account_id    text NOT NULL,
    client_index  bigint NOT NULL CHECK (client_index BETWEEN 1 AND 281474976710655),
    run_id        uuid NOT NULL,
    cause         text NOT NULL CHECK (cause IN ('order', 'stop', 'invalidation', 'target', 'time', 'operator')),
    status        text NOT NULL CHECK (status IN ('SENT', 'STANDING', 'DONE', 'REFUSED')),
    symbol        text NOT NULL,
    side          text NOT NULL CHECK (side IN ('buy', 'sell')),
    type          text NOT NULL CHECK (type IN ('market', 'limit', 'stop', 'target')),
    quantity      amount  NOT NULL CHECK (quantity > 0),
    price         amount  NOT NULL CHECK (price > 0),
    trigger_price amount  CHECK (trigger_price > 0),
    reduce_only   boolean NOT NULL,
    post_only     boolean NOT NULL DEFAULT false,
    request_id    uuid UNIQUE,
    request       jsonb,
    attempt       text,
    parent_index  bigint, -- of a stop or target: the order sent in the same transaction
    expires_at    timestamptz NOT NULL,
    venue_index   bigint,
    filled        amount  NOT NULL DEFAULT 0 CHECK (filled BETWEEN 0 AND quantity),
    reason        text,
    created_at    timestamptz NOT NULL,
    changed_at    timestamptz NOT NULL CHECK (changed_at >= created_at),
    PRIMARY KEY (account_id, client_index),
    FOREIGN KEY (run_id, account_id) REFERENCES runs (id, account_id),
    CHECK ((request_id IS NULL) = (request IS NULL)),
    CHECK ((request_id IS NOT NULL) = (cause IN ('order', 'operator'))),
    CHECK ((trigger_price IS NOT NULL) = (type IN ('stop', 'target'))),
    CHECK (reduce_only OR request_id IS NOT NULL),
    CHECK (status <> 'STANDING' OR (type <> 'market' AND venue_index IS NOT NULL)),
    CHECK (status <> 'REFUSED' OR (filled = 0 AND reason IS NOT NULL))
);
CREATE UNIQUE INDEX IF NOT EXISTS venue_orders_one_unknown ON venue_orders (account_id)
    WHERE status = 'SENT' AND NOT reduce_only;
CREATE INDEX IF NOT EXISTS venue_orders_open ON venue_orders (account_id) WHERE status IN ('SENT', 'STANDING');

-- The venue's posted trades, each once, append-only; `client_index` is null for a trade without one of our orders.
CREATE TABLE IF NOT EXISTS venue_trades (
    account_id   text NOT NULL,
    trade_id     bigint NOT NULL,
    run_id       uuid NOT NULL,
    client_index bigint,
    kind         text NOT NULL, -- the venue's word
    cause        text NOT NULL CHECK (cause IN ('manual', 'liquidation', 'ended')),  -- if none of our orders made it
    symbol       text NOT NULL,
    side         text NOT NULL CHECK (side IN ('buy', 'sell')),
    quantity     amount  NOT NULL CHECK (quantity > 0),
    price        amount  NOT NULL CHECK (price > 0),
    fee_rate     amount  NOT NULL,
    maker        boolean NOT NULL,
    traded_at    timestamptz NOT NULL,
    PRIMARY KEY (account_id, trade_id),
    FOREIGN KEY (account_id, client_index) REFERENCES venue_orders,
    FOREIGN KEY (run_id, account_id) REFERENCES runs (id, account_id)
);
CREATE INDEX IF NOT EXISTS venue_trades_by_order ON venue_trades (account_id, client_index);

-- Raw snapshots, dropped by partition after the retention period; the hourly rollup stays.
CREATE TABLE IF NOT EXISTS portfolio_snapshots (
    account_id     text NOT NULL,
    run_id         uuid NOT NULL,
    net_portfolio  amount  NOT NULL,
    cash           amount  NOT NULL,
    unrealized_pnl amount  NOT NULL,
    created_at     timestamptz NOT NULL,
    leverage       double precision CHECK (leverage >= 0), -- notional over equity; null if not recorded
    sequence       bigint  NOT NULL DEFAULT 0, -- of the account: the rows of the ledger that it includes
    PRIMARY KEY (account_id, created_at),
    CHECK (net_portfolio = cash + unrealized_pnl)
) PARTITION BY RANGE (created_at);
CREATE INDEX IF NOT EXISTS portfolio_snapshots_by_time ON portfolio_snapshots USING brin (created_at);

CREATE TABLE IF NOT EXISTS portfolio_hourly (
    account_id text NOT NULL,
    hour       timestamptz NOT NULL CHECK (hour = date_trunc('hour', hour, 'UTC')),
    run_id     uuid NOT NULL,
    total      amount  NOT NULL,
    count      integer NOT NULL CHECK (count > 0),
    last       amount  NOT NULL,
    last_at    timestamptz NOT NULL,
    leverage   double precision CHECK (leverage >= 0), -- the largest in the hour's snapshots
    sequence   bigint  NOT NULL DEFAULT 0, -- that of `last`
    PRIMARY KEY (account_id, hour)
) WITH (fillfactor = 70);
CREATE INDEX IF NOT EXISTS portfolio_hourly_by_hour ON portfolio_hourly (hour);

-- Closed candles for charts: one-minute candles, kept for a limited time, and hourly candles, kept for good. The statement
-- that writes minutes adds them to their hour. Floats, since they never enter the books.
CREATE TABLE IF NOT EXISTS candles (
    minutes   smallint NOT NULL CHECK (minutes IN (1, 60)),
    symbol    text NOT NULL,
    open_time timestamptz NOT NULL CHECK (open_time = date_trunc(CASE minutes WHEN 1 THEN 'minute' ELSE 'hour' END,
                                                                 open_time, 'UTC')),
    open      double precision NOT NULL CHECK (open BETWEEN low AND high),
    high      double precision NOT NULL,
    low       double precision NOT NULL CHECK (low > 0),
    close     double precision NOT NULL CHECK (close BETWEEN low AND high),
    volume    double precision CHECK (volume >= 0),  -- in base units; null: unknown
    PRIMARY KEY (minutes, symbol, open_time)
) WITH (fillfactor = 90);

-- The same sums per variant: the statement that writes a snapshot updates both tables, and the trigger below moves the
-- hours of a model that is added, removed or assigned to another variant.
CREATE TABLE IF NOT EXISTS variant_hourly (
    hour    timestamptz NOT NULL CHECK (hour = date_trunc('hour', hour, 'UTC')),
    variant text NOT NULL,
    total   amount  NOT NULL,
    count   bigint NOT NULL CHECK (count >= 0),
    PRIMARY KEY (hour, variant)
) WITH (fillfactor = 70);

CREATE OR REPLACE FUNCTION move_variant_hours() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    -- A snapshot that is being written must see this change, or be seen by it.
    LOCK TABLE portfolio_hourly IN SHARE ROW EXCLUSIVE MODE;
    IF TG_OP <> 'INSERT' THEN
        UPDATE variant_hourly v SET total = v.total - h.total, count = v.count - h.count
        FROM portfolio_hourly h WHERE h.account_id = OLD.id AND v.hour = h.hour AND v.variant = OLD.variant;
    END IF;
    IF TG_OP <> 'DELETE' THEN
        INSERT INTO variant_hourly AS v (hour, variant, total, count)
        SELECT hour, NEW.variant, total, count FROM portfolio_hourly WHERE account_id = NEW.id
        ON CONFLICT (hour, variant) DO UPDATE SET total = v.total + excluded.total, count = v.count + excluded.count;
    END IF;
    RETURN NULL;
END $$;
CREATE OR REPLACE TRIGGER models_move_hours AFTER INSERT OR DELETE ON models
    FOR EACH ROW EXECUTE FUNCTION move_variant_hours();
CREATE OR REPLACE TRIGGER models_change_hours AFTER UPDATE ON models
    FOR EACH ROW WHEN (OLD.variant <> NEW.variant OR OLD.id <> NEW.id) EXECUTE FUNCTION move_variant_hours();

-- Baselines: accounts that trade virtually alongside the models. `state` is the account with its agent's memory, and has
-- seen every tick up to seen_until. Their equity is in the snapshots and hours, under IDs that no account can have.
-- `variant` is the variant of a rule agent.
CREATE TABLE IF NOT EXISTS baselines (
    id              text PRIMARY KEY CHECK (id ~ '^baseline/[a-z-]{1,50}$'),
    name            text NOT NULL CHECK (name <> ''),
    variant         text REFERENCES variants,
    run_id          uuid NOT NULL,
    initial_capital amount  NOT NULL CHECK (initial_capital > 0),
    started_at      timestamptz NOT NULL,
    state           jsonb NOT NULL,
    seen_until      timestamptz NOT NULL
);

-- The state of a model's strategy after its latest decision, saved before the decision was executed.
CREATE TABLE IF NOT EXISTS strategy_states (
    model_id   text PRIMARY KEY REFERENCES models ON DELETE CASCADE,
    state      jsonb NOT NULL,
    decided_at timestamptz NOT NULL
);

-- Halts, in force until lifted: no new positions for the account or, without an account, for all.
-- Times in this and the next table are the database's own, even if market time comes from a recording.
CREATE TABLE IF NOT EXISTS halts (
    id         bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    account_id text CHECK (account_id ~ '^[A-Za-z0-9._:-]{1,64}$'),
    cause      text NOT NULL CHECK (cause IN ('operator', 'daily loss', 'drawdown', 'hourly bound', 'reconciliation',
                                                'ladder')),
    reason     text NOT NULL CHECK (reason <> ''),
    halted_by  text NOT NULL CHECK (halted_by <> ''),
    halted_at  timestamptz NOT NULL DEFAULT now(),
    lifted_by  text CHECK (lifted_by <> ''),
    lifted_at  timestamptz CHECK (lifted_at >= halted_at),
    CHECK ((lifted_at IS NULL) = (lifted_by IS NULL))
);
CREATE UNIQUE INDEX IF NOT EXISTS halts_in_force ON halts (account_id, cause) NULLS NOT DISTINCT
    WHERE lifted_at IS NULL;

-- Commands for the leading process, from operators and from loss limits, and their outcomes. `term` is the leader's term in
-- which a loss limit asked for it; null for a person's command, which expires.
CREATE TABLE IF NOT EXISTS commands (
    id          uuid PRIMARY KEY,
    verb        text NOT NULL CHECK (verb IN ('halt', 'resume', 'flatten', 'reset', 'remove')),
    account_id  text CHECK (account_id ~ '^[A-Za-z0-9._:-]{1,64}$'),
    reason      text NOT NULL CHECK (reason <> ''),
    asked_by    text NOT NULL CHECK (asked_by <> ''),
    term        bigint CHECK (term >= 1),
    asked_at    timestamptz NOT NULL DEFAULT now(),
    taken_at    timestamptz,
    progress    text,
    finished_at timestamptz,
    outcome     jsonb,
    CHECK ((finished_at IS NULL) = (outcome IS NULL))
);
CREATE INDEX IF NOT EXISTS commands_open ON commands (asked_at) WHERE finished_at IS NULL;

-- The notices of alarms, for `trader alarms --since`; `sender` is the process that reported it. Kept for 90 days.
CREATE TABLE IF NOT EXISTS alarm_history (
    id      bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    at      timestamptz NOT NULL,
    since   timestamptz NOT NULL,
    sender  text NOT NULL,
    state   text NOT NULL CHECK (state IN ('firing', 'resolved', 'event')),
    cause   text NOT NULL CHECK (cause <> ''),
    subject text NOT NULL,
    message text NOT NULL,
    impact  text NOT NULL
);
CREATE INDEX IF NOT EXISTS alarm_history_at ON alarm_history (at);

-- The last recorded backup, audit and verification: what the timers run with --record, for the metrics of the service.
CREATE TABLE IF NOT EXISTS maintenance (
    task         text PRIMARY KEY CHECK (task IN ('backup', 'audit', 'verify')),
    ran_at       timestamptz NOT NULL DEFAULT now(),
    succeeded_at timestamptz,
    problems     integer NOT NULL CHECK (problems >= 0)
);

-- Keys of external agents and tokens of operators. Only the SHA-256 digest and the first characters of a secret are stored.
-- A key with an account belongs to an agent and covers only that account; one without belongs to an operator. A null limit
-- means no limit. Times are the database's own.
CREATE TABLE IF NOT EXISTS credentials (
    id                   uuid PRIMARY KEY,
    name                 text NOT NULL CHECK (name <> ''),
    account_id           text REFERENCES models,
    scopes               text[] NOT NULL CHECK (scopes <@ '{read,trade,operate}' AND scopes <> '{}'),
    prefix               text NOT NULL UNIQUE,
    digest               bytea NOT NULL UNIQUE CHECK (length(digest) = 32),
    requests_per_minute  integer CHECK (requests_per_minute > 0),
    decisions_per_minute integer CHECK (decisions_per_minute > 0),
    created_at           timestamptz NOT NULL DEFAULT now(),
    revoked_at           timestamptz CHECK (revoked_at >= created_at)
);
CREATE UNIQUE INDEX IF NOT EXISTS credentials_valid ON credentials (name, account_id) NULLS NOT DISTINCT
    WHERE revoked_at IS NULL;

-- What an external agent declared about itself as an entrant with this configuration; null if it declared nothing.
CREATE OR REPLACE FUNCTION declared_in(configuration text) RETURNS jsonb LANGUAGE sql IMMUTABLE AS $$
    SELECT jsonb_strip_nulls(jsonb_build_object(
        'model', parsed->'routerModelName', 'version', parsed->'external'->'version',
        'promptDigest', parsed->'external'->'promptDigest'
    ))
    FROM CAST(configuration AS jsonb) AS parsed
    WHERE parsed->'external' ? 'version'
$$;

-- Where external agents receive the views that they decide on, and the secret that signs the requests.
CREATE TABLE IF NOT EXISTS webhooks (
    model_id text PRIMARY KEY REFERENCES models,
    url      text NOT NULL CHECK (url <> ''),
    secret   text NOT NULL CHECK (secret <> '')
);

-- Baselines against which losses are measured: of each account in its run, and of all together (without an account). The
-- next measured equity fills in a null value.
CREATE TABLE IF NOT EXISTS equity_marks (
    account_id text UNIQUE NULLS NOT DISTINCT,
    run_id     uuid,
    day        date NOT NULL,
    day_start  amount ,
    peak       amount ,
    last       amount  NOT NULL,
    updated_at timestamptz NOT NULL DEFAULT now(),
    CHECK ((account_id IS NULL) = (run_id IS NULL))
);

-- What a fill at the venue would have cost on paper, on the book at the moment its order was sent. `paper_price` is null
-- if that book held less than was filled; `drift_bps` is positive if the venue was more expensive than paper.
CREATE TABLE IF NOT EXISTS fill_drift (
    account_id  text NOT NULL,
    sequence    bigint NOT NULL,
    symbol      text NOT NULL,
    side        text NOT NULL CHECK (side IN ('buy', 'sell')),
    quantity    amount  NOT NULL CHECK (quantity > 0),
    maker       boolean NOT NULL,
    venue_price amount  NOT NULL CHECK (venue_price > 0),
    paper_price amount  CHECK (paper_price > 0),
    drift_bps   amount ,
    quoted_at   timestamptz,
    filled_at   timestamptz NOT NULL,
    PRIMARY KEY (account_id, sequence),
    FOREIGN KEY (account_id, sequence) REFERENCES fills (account_id, sequence),
    CHECK ((paper_price IS NULL) = (drift_bps IS NULL))
);

-- What an order in shadow would have met: it was signed, and never sent. `paper_price` is null if paper did not fill it.
-- `drift_bps` compares the book 300 ms later with paper, `later_bps` the one after a second; positive: worse than paper.
CREATE TABLE IF NOT EXISTS shadow_drift (
    id          bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    account_id  text NOT NULL,
    symbol      text NOT NULL,
    side        text NOT NULL CHECK (side IN ('buy', 'sell')),
    quantity    amount  NOT NULL CHECK (quantity > 0),
    paper_price amount  CHECK (paper_price > 0),
    drift_bps   amount ,
    later_bps   amount ,
    signed      text NOT NULL, -- the digest of the signed transaction
    sent_at     timestamptz NOT NULL
);
CREATE INDEX IF NOT EXISTS shadow_drift_by_account ON shadow_drift (account_id, sent_at);

-- Orders above the ladder's limit, which wait for a person; at most one of an account. Times are the database's own.
CREATE TABLE IF NOT EXISTS waiting_orders (
    id          uuid PRIMARY KEY,
    account_id  text NOT NULL REFERENCES accounts,
    request     jsonb NOT NULL,
    asked_at    timestamptz NOT NULL DEFAULT now(),
    approved_by text CHECK (approved_by <> ''),
    approved_at timestamptz,
    closed_at   timestamptz,
    CHECK ((approved_by IS NULL) = (approved_at IS NULL))
);
CREATE UNIQUE INDEX IF NOT EXISTS waiting_orders_open ON waiting_orders (account_id) WHERE closed_at IS NULL;
