-- Who may use the HTTP API, and for what. Of the secret itself only its SHA-256 is kept. `scopes`: a JSON array.
CREATE TABLE postbus.tokens (
    id text PRIMARY KEY,
    name text NOT NULL,
    digest text NOT NULL,
    scopes text NOT NULL,
    created_at timestamptz NOT NULL,
    expires_at timestamptz,
    revoked_at timestamptz
);
